"""Batches of long sequences, packed or not, for causal and masked language modelling."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from transformers.utils import logging

from hf_longmem._errors import complaint
from hf_longmem.data.words import WordStarts, first_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.get_logger(__name__)

# One value a token; what padding gets. Padding has the id of the document beside it.
_FILLS = {
    "attention_mask": 0,
    "labels": -100,
    "document_ids": 0,
    "special_tokens_mask": 1,
    "token_type_ids": 0,
    "position_ids": 0,
    "word_ids": -1,
    "offset_mapping": 0,
}
_NOT_FOR_MODELS = ("special_tokens_mask", "word_ids", "offset_mapping")


@dataclass
class DataCollatorForLongSequences:
    """Pads rows to the batch's longest and makes labels, for causal (default) or masked language modelling.

    A row is a mapping with ``input_ids``, or the ids alone. Ids may be one sequence, with ``document_ids`` if several
    documents are packed in it (see `pack_with_document_ids`), or a list of documents, which are packed here. Columns
    with a value a token are padded with their row; others are kept where they can be stacked, and left out where they
    cannot. No length has to fit a chunk.

    Labels are -100 at padding, told by the attention mask and not by the token, so that an end of sequence is learned
    also where it serves as padding. Causal ones, which models shift, are -100 too at a token that follows padding or
    the end of another document. A row's own ``labels`` are kept as they are.

    Masked language modelling replaces each token with probability ``mlm_probability``: by the mask token (80 %), by any
    ordinary token (10 %), or by itself. Special tokens and padding are never chosen. With ``whole_word_mask`` words
    are chosen and replaced whole. The column ``word_ids`` or ``offset_mapping`` says what a word is (Trainer drops both
    unless ``remove_unused_columns=False``), or else the vocabulary does: what stands between spaces for bytes and
    characters, by their marks for WordPiece, byte-level BPE and SentencePiece.

    Args:
        tokenizer: for its padding, its special tokens and, in masked language modelling, its vocabulary.
        mlm: masked language modelling, for models with ``is_decoder=False``.
        mlm_probability, mask_replace_prob, random_replace_prob: as in transformers' DataCollatorForLanguageModeling.
        whole_word_mask: choose words instead of tokens.
        pad_to_multiple_of: lengthen batches to a multiple of this.
        pad_token_id: instead of the tokenizer's; without either the end of sequence serves.
        return_document_ids: None for batches with a packed row, True for every batch, False for none (then documents
            see each other, and only their labels are apart).
        seed: draws the masks from a generator of its own, which goes on from batch to batch; a worker process adds its
            number, and starts anew when it is started anew. None draws from torch's default generator. Either way a
            resumed run draws other masks than the same run uninterrupted: a data loader makes batches ahead.

    Returns:
        A call returns a dict of tensors ``[B, T]``: ``input_ids``, ``attention_mask``, ``labels``, for packed rows
        ``document_ids``, and other columns.

    Raises:
        ValueError: settings or rows that do not fit together.

    >>> batch = DataCollatorForLongSequences(pad_token_id=0)([{"input_ids": [[5, 6], [7]]}, {"input_ids": [8, 9]}])
    >>> batch["labels"].tolist(), batch["document_ids"].tolist()
    ([[5, 6, -100], [8, 9, -100]], [[0, 0, 1], [0, 0, 0]])
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    mlm: bool = False
    mlm_probability: float = 0.15
    whole_word_mask: bool = False
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    pad_to_multiple_of: int | None = None
    pad_token_id: int | None = None
    return_document_ids: bool | None = None
    seed: int | None = None
    _generator: torch.Generator | None = field(default=None, init=False, repr=False, compare=False)
    _process: int | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.mlm and (self.tokenizer is None or self.tokenizer.mask_token_id is None):
            received = "no tokenizer" if self.tokenizer is None else type(self.tokenizer).__name__
            fix = (
                "add one, tokenizer.add_special_tokens({'mask_token': '<mask>'}) and "
                "model.resize_token_embeddings(len(tokenizer)), or use mlm=False for a causal model"
            )
            raise ValueError(complaint("mlm=True needs a tokenizer with a mask token", received, fix))
        if self.whole_word_mask and not self.mlm:
            raise ValueError(complaint("whole_word_mask needs mlm=True", self.mlm, "pass mlm=True"))
        for name in ("mlm_probability", "mask_replace_prob", "random_replace_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(complaint(f"{name} must lie in [0, 1]", getattr(self, name), "give a probability"))
        if self.mask_replace_prob + self.random_replace_prob > 1:
            rule = "mask_replace_prob and random_replace_prob must sum to 1 at most"
            received = f"{self.mask_replace_prob} and {self.random_replace_prob}"
            raise ValueError(complaint(rule, received, "lower one of them"))
        if self.pad_to_multiple_of is not None and self.pad_to_multiple_of < 1:
            raise ValueError(complaint("pad_to_multiple_of must be at least 1", self.pad_to_multiple_of, "use None"))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_generator": None, "_process": None}

    def __call__(self, features: Sequence[Any]) -> dict[str, Tensor]:
        """Make a batch of rows."""
        rows = [_unpack(feature) for feature in features]
        if not rows:
            raise ValueError(complaint("a batch must have rows", "none", "leave out empty batches"))
        packed = any("document_ids" in row for row in rows)
        batch = self._pad(rows)
        real = batch["attention_mask"] != 0
        documents = batch.pop("document_ids")
        apart = torch.ones_like(real)
        apart[:, 1:] = ~real[:, :-1] | (documents[:, 1:] != documents[:, :-1])
        if self.mlm:
            self._mask_tokens(batch, real, apart)
        elif "labels" not in batch:
            first = apart & (torch.arange(real.shape[1]) > 0)
            batch["labels"] = batch["input_ids"].masked_fill(~real | first, -100)
        for name in _NOT_FOR_MODELS:
            batch.pop(name, None)
        if packed if self.return_document_ids is None else self.return_document_ids:
            batch["document_ids"] = documents
        return batch

    def _pad(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        lengths = [len(row["input_ids"]) for row in rows]
        multiple = self.pad_to_multiple_of or 1
        width = -(-max(lengths) // multiple) * multiple
        left = self.tokenizer is not None and self.tokenizer.padding_side == "left"
        fills: dict[str, int] = _FILLS | {"input_ids": 0}
        if min(lengths) < width:
            fills["input_ids"] = self._pad_id()
        if self.tokenizer is not None:
            fills["token_type_ids"] = self.tokenizer.pad_token_type_id

        def padded(values: list[Tensor], fill: int, *, edge: bool = False) -> Tensor:
            shape = (len(rows), width, *values[0].shape[1:])
            result = torch.full(shape, fill, dtype=values[0].dtype)
            for target, value in zip(result, values, strict=True):
                if edge and len(value):
                    target[:] = value[0] if left else value[-1]
                target[width - len(value) if left else 0 : width if left else len(value)] = value
            return result

        batch: dict[str, Tensor] = {}
        for row, length in zip(rows, lengths, strict=True):
            row.setdefault("attention_mask", torch.ones(length, dtype=torch.int64))
            row.setdefault("document_ids", torch.zeros(length, dtype=torch.int64))
        for name in dict.fromkeys(name for row in rows for name in row):
            values = [row.get(name) for row in rows]
            tensors = [value for value in values if isinstance(value, Tensor)]
            if len(tensors) < len(rows):
                if name in fills and not all(value is None for value in values):
                    missing = sum(value is None for value in values)
                    fix = "give it in all rows or in none"
                    raise ValueError(complaint(f"every row of a batch must have {name}", f"{missing} without", fix))
                logger.warning_once(f"column {name!r} is no tensor in every row and is left out")
            elif name in fills:
                self._check_lengths(name, tensors, lengths)
                batch[name] = padded(tensors, fills[name], edge=name == "document_ids")
            elif len({tensor.shape for tensor in tensors}) == 1:
                batch[name] = torch.stack(tensors)
            elif all(tensor.shape[:1] == (length,) for tensor, length in zip(tensors, lengths, strict=True)):
                batch[name] = padded(tensors, 0)
            else:
                logger.warning_once(f"column {name!r} has another shape in every row and is left out")
        return batch

    def _pad_id(self) -> int:
        if self.pad_token_id is not None:
            return self.pad_token_id
        if self.tokenizer is not None:
            # Padding is never seen and never a label: any token would do.
            for index in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
                if index is not None:
                    return index
        rule = "rows of different lengths need a token to pad with"
        raise ValueError(complaint(rule, "none", "pass pad_token_id, or a tokenizer with a pad token"))

    @staticmethod
    def _check_lengths(name: str, tensors: list[Tensor], lengths: list[int]) -> None:
        for tensor, length in zip(tensors, lengths, strict=True):
            if tensor.shape[:1] != (length,):
                rule = f"{name} must have a value for each of a row's {length} tokens"
                received = f"shape {list(tensor.shape)}"
                raise ValueError(complaint(rule, received, "make both with one call of the tokenizer"))

    def _mask_tokens(self, batch: dict[str, Tensor], real: Tensor, apart: Tensor) -> None:
        if "labels" in batch:
            fix = "leave that column out, or use mlm=False to keep them"
            raise ValueError(complaint("mlm=True makes the labels", "rows with labels", fix))
        tokenizer: Any = self.tokenizer
        ids = batch["input_ids"]
        special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
        if "special_tokens_mask" in batch:
            special |= batch["special_tokens_mask"] != 0
        first = torch.arange(ids.shape[1]).expand(ids.shape)
        if self.whole_word_mask:
            apart = apart | special
            apart[:, 1:] |= special[:, :-1]
            words = batch.get("word_ids"), batch.get("offset_mapping")
            first = first_tokens(ids, apart, word_ids_BT=words[0], offsets_BT2=words[1], vocabulary=self._word_starts)
        generator = self._own_generator()
        # A word's fate is that of its first token.
        choice, fate = (torch.rand(ids.shape, generator=generator).gather(1, first) for _ in range(2))
        chosen = real & ~special & (choice < self.mlm_probability)
        batch["labels"] = ids.masked_fill(~chosen, -100)
        others = self._ordinary_ids[torch.randint(len(self._ordinary_ids), ids.shape, generator=generator)]
        masked = chosen & (fate < self.mask_replace_prob)
        random = chosen & ~masked & (fate < self.mask_replace_prob + self.random_replace_prob)
        batch["input_ids"] = torch.where(random, others, ids.masked_fill(masked, tokenizer.mask_token_id))

    @cached_property
    def _word_starts(self) -> WordStarts:
        return WordStarts(self.tokenizer)  # type: ignore[arg-type]  # there is one where words are masked

    @cached_property
    def _ordinary_ids(self) -> Tensor:
        tokenizer: Any = self.tokenizer
        special = torch.tensor(tokenizer.all_special_ids)
        every = torch.arange(len(tokenizer))
        return every[~torch.isin(every, special)]

    def _own_generator(self) -> torch.Generator | None:
        if self.seed is None:
            return None
        if self._generator is None or self._process != os.getpid():
            worker = get_worker_info()
            self._generator = torch.Generator().manual_seed(self.seed + (0 if worker is None else worker.id))
            self._process = os.getpid()
        return self._generator


def _unpack(feature: Any) -> dict[str, Any]:
    """A row's columns as tensors where they are numbers; documents in a list are put end to end."""
    row = dict(feature) if isinstance(feature, Mapping) else {"input_ids": feature}
    if "input_ids" not in row:
        fix = "tokenize the data set, and check remove_unused_columns"
        raise ValueError(complaint("every row must have input_ids", sorted(map(str, row)), fix))
    ids = row["input_ids"]
    if len(ids) and np.ndim(ids[0]) == 1:
        if "document_ids" in row:
            fix = "give one of them"
            raise ValueError(complaint("a list of documents needs no document_ids", "both", fix))
        lengths = torch.tensor([len(document) for document in ids])
        joined = {name: row[name] for name in ("input_ids", *_FILLS) if name in row}
        row |= {name: [value for document in documents for value in document] for name, documents in joined.items()}
        row["document_ids"] = torch.arange(len(lengths)).repeat_interleave(lengths)
    if "word_ids" in row:
        row["word_ids"] = [-1 if word is None else word for word in row["word_ids"]]
    tensors = {name: _tensor(value) for name, value in row.items()}
    for name in ("input_ids", *_FILLS):
        value = tensors.get(name)
        if value is not None:
            tensors[name] = value.long()
    if tensors["input_ids"] is None or tensors["input_ids"].dim() != 1:
        rule = "input_ids must be token ids, or a list of documents of them"
        raise ValueError(complaint(rule, type(row["input_ids"]).__name__, "tokenize first"))
    return tensors


def _tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    if array.dtype.kind not in "biuf":
        return None
    if array.dtype.kind == "u":
        array = array.astype("int64")
    if array.dtype == "float64":
        array = array.astype("float32")
    return torch.from_numpy(np.array(array))


__all__ = ["DataCollatorForLongSequences"]
