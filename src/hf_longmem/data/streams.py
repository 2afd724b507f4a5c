"""Documents longer than a training sequence, read piece by piece in the rows of successive batches.

Row b of every batch goes on with the document in which row b of the batch before ended, and the model's memory of it
goes on too. A document is read by one row, from its first token to its last; a row that is done with a document takes
the next one that no row has taken. Where a document ends inside a piece, the rest of the piece is padding, and the next
document starts with the next piece. Once no document is left, a row's pieces are padding until the longest row is done.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow.compute
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from transformers.utils import logging

from hf_longmem._errors import complaint
from hf_longmem.data.documents import BESIDE_IDS, check_documents, check_table, ids_of_row, token_ids
from hf_longmem.data.text import token_pieces
from hf_longmem.models.stream_memory import MemoryStreams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.get_logger(__name__)

# How many token ids of an iterator are taken at a time.
_TOKENS = 64


class StreamPosition(NamedTuple):
    """Where in its streams a piece stands; it travels under the key ``memory`` until the collator puts one there.

    streams: the data set.
    row: which of its rows, among those of all processes.
    time: which piece of the row, from 0.
    next_token: the token after the piece, in the same document; None at a document's end.
    """

    streams: _Streams
    row: int
    time: int
    next_token: int | None


class _Streams(MemoryStreams):
    """What the two kinds of streams share: how many rows, and what a piece looks like."""

    def __init__(self, batch_size: int, sequence_length: int, world_size: int | None) -> None:
        world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        sizes = {"batch_size": batch_size, "sequence_length": sequence_length, "world_size": world_size}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(complaint(f"{name} must be at least 1", size, "use a positive number"))
        self.batch_size, self.sequence_length, self.world_size = batch_size, sequence_length, world_size

    @property
    def num_rows(self) -> int:
        """Rows of all processes together."""
        return self.batch_size * self.world_size

    def _piece(self, row: int, time: int, tokens: np.ndarray, next_token: int | None, starts: bool) -> dict[str, Any]:
        # Only what a model's forward has arguments for gets past Trainer's remove_unused_columns.
        return {
            "input_ids": tokens.astype(np.int64),
            "reset_memory": starts,
            "memory": StreamPosition(self, row, time, next_token),
        }

    def _check_process(self) -> None:
        worker = get_worker_info()
        if worker is not None:
            rule = "document streams are read where their memory is, in the process that trains"
            raise ValueError(complaint(rule, f"worker process {worker.id}", "set dataloader_num_workers=0"))


class DocumentStreams(_Streams, torch.utils.data.Dataset[dict[str, Any]]):
    """A map-style data set of the pieces of documents, in the order in which they must be read.

    Piece i is piece ``i // num_rows`` of row ``i % num_rows``, with ``num_rows = batch_size * world_size``: read in
    order, in batches of ``batch_size`` for each process, row b of a process always is the same row. To Trainer say
    ``train_sampling_strategy="sequential"`` and ``dataloader_num_workers=0``, and give it `DataCollatorForStreams`.
    Every epoch reads every document from its start.

    Args:
        documents: a `datasets.Dataset` with the column ``input_ids`` (read from disk piece by piece), or one with text
            and a ``tokenizer``, or a sequence of token-id sequences. An ``attention_mask`` beside ``input_ids`` must be
            1 throughout, and ``labels`` must be the ids: every token is trained on.
        batch_size: rows of one process: ``per_device_train_batch_size`` (or the one for evaluation).
        sequence_length: tokens of a piece.
        world_size: processes that train; by default what ``torchrun`` or ``accelerate launch`` says (``WORLD_SIZE``).
        tokenizer: for text. The end-of-sequence token, where it has one, ends each document; the token ids are held in
            memory, in as few bytes as they need (2 a token up to the id 65,535).
        text_column: the column with the text.
        balanced: share documents out the longest first, so that all rows end at about the same time; each row still
            reads its documents in the order given.

    Raises:
        ValueError: a size is below 1, a column or the tokenizer is missing, there are no tokens, or documents are no
            documents: a mapping of splits, a string, padded rows, labels of one's own, ids that are no whole numbers.

    Example:
        >>> streams = DocumentStreams([range(5), range(10, 13)], batch_size=2, sequence_length=3)
        >>> [piece["input_ids"].tolist() for piece in streams]
        [[0, 1, 2], [10, 11, 12], [3, 4], []]
    """

    def __init__(
        self,
        documents: Dataset | Sequence[Any],
        *,
        batch_size: int,
        sequence_length: int,
        world_size: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_column: str = "text",
        balanced: bool = False,
    ) -> None:
        super().__init__(batch_size, sequence_length, world_size)
        lengths, self._read = _stored(documents, tokenizer, text_column)
        if not lengths.any():
            raise ValueError(complaint("documents must have tokens", f"{len(lengths)} without any", "give longer ones"))
        self._lengths = lengths
        chosen = np.flatnonzero(lengths)
        order = chosen[np.argsort(-lengths[chosen], kind="stable")] if balanced else chosen
        taken: list[list[int]] = [[] for _ in range(self.num_rows)]
        # The next document goes to the row that is done first, as in streams from an iterable.
        done = [(0, row) for row in range(self.num_rows)]
        for document in order.tolist():
            time, row = done[0]
            taken[row].append(document)
            heapq.heapreplace(done, (time + self._num_pieces(document), row))
        self._rows = [
            _Row(documents, [0, *itertools.accumulate(map(self._num_pieces, documents))])
            for documents in map(sorted, taken)
        ]
        self._times = max(row.ends[-1] for row in self._rows)
        padding = 1 - sum(row.ends[-1] for row in self._rows) / len(self)
        if padding > 0.5:
            advice = "fewer rows, or balanced=True, waste less"
            logger.warning(
                f"{padding:.0%} of the pieces are padding: {len(chosen)} documents in {self.num_rows} rows; {advice}"
            )

    @classmethod
    def from_iterable(
        cls,
        documents: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        batch_size: int,
        sequence_length: int,
        world_size: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_column: str = "text",
    ) -> IterableDocumentStreams:
        """Make the same streams of documents that are too many, or too long, to be held in memory.

        Args:
            documents: what yields documents, or a function that returns such (needed for more than one epoch of a
                generator): token ids, text, rows with ``input_ids`` or text, or iterators of token ids or of strings,
                whose end is never looked for. A document is taken when a row is free, and read piece by piece; strings
                are put together and tokenised about 65,000 characters at a time (see `token_pieces`).
            batch_size, sequence_length, world_size, tokenizer, text_column: see `DocumentStreams`.

        Returns:
            A `torch.utils.data.IterableDataset`, whose pieces are those of `DocumentStreams`. Trainer needs
            ``max_steps``, and on several processes, each of which reads everything and keeps its own rows,
            ``accelerator_config={"dispatch_batches": False}``. Going on from a checkpoint reads what was read again; to
            Trainer everything is one epoch, so that runs to be resumed should give documents again and again instead.
        """
        return IterableDocumentStreams(
            documents,
            batch_size=batch_size,
            sequence_length=sequence_length,
            world_size=world_size,
            tokenizer=tokenizer,
            text_column=text_column,
        )

    def _num_pieces(self, document: int) -> int:
        return -(-int(self._lengths[document]) // self.sequence_length)

    def __len__(self) -> int:
        return self._times * self.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._check_process()
        if not 0 <= index < len(self):
            raise IndexError(complaint(f"a piece's index must be in 0 .. {len(self) - 1}", index, "use len(streams)"))
        time, row = divmod(index, self.num_rows)
        documents, ends = self._rows[row]
        if time >= ends[-1]:
            return self._piece(row, time, np.empty(0, np.int64), None, False)
        place = int(np.searchsorted(ends, time, side="right")) - 1
        number = time - ends[place]
        start = number * self.sequence_length
        stop = min(start + self.sequence_length, int(self._lengths[documents[place]]))
        tokens = self._read(documents[place], start, stop + 1)
        next_token = int(tokens[-1]) if len(tokens) > stop - start else None
        return self._piece(row, time, tokens[: stop - start], next_token, number == 0)


class IterableDocumentStreams(_Streams, IterableDataset[dict[str, Any]]):
    """The pieces of documents that are not held in memory; made by `DocumentStreams.from_iterable`.

    ``state_dict()`` says which time was reached, and ``load_state_dict()`` makes the next iteration begin there; at the
    end of an epoch that is the start of the next. An epoch without a piece raises ValueError.
    """

    def __init__(
        self,
        documents: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        batch_size: int,
        sequence_length: int,
        world_size: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_column: str = "text",
    ) -> None:
        super().__init__(batch_size, sequence_length, world_size)
        if documents is None:
            rule = "documents must be an iterable, or a function that returns one"
            raise ValueError(complaint(rule, "None", "pass a list of documents"))
        check_documents(documents)
        self._documents, self._tokenizer, self._text_column = documents, tokenizer, text_column
        self._spent = False
        self._time = self._start = 0

    def state_dict(self) -> dict[str, int]:
        """Say which time comes next; of a data loader that reads ahead, give ``{"time": batches used}`` instead."""
        return {"time": self._time}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next iteration at the time that ``state_dict()`` gave."""
        self._start = state["time"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._check_process()
        if self._spent:
            rule = "another epoch needs documents that can be read again"
            fix = "pass a function that returns the iterator, or one epoch only"
            raise ValueError(complaint(rule, "an iterator that was read before", fix))
        documents = self._documents() if callable(self._documents) else self._documents
        check_documents(documents)
        source = iter(documents)
        self._spent = source is self._documents
        start, self._start = self._start, 0
        open_rows: list[_OpenDocument | None] = [None] * self.num_rows
        for time in itertools.count():
            pieces = []
            for row, document in enumerate(open_rows):
                starts = document is None
                if document is None:
                    document = self._next_document(source)
                if document is None:
                    pieces.append(self._piece(row, time, np.empty(0, np.int64), None, False))
                    continue
                tokens, next_token = document.read(self.sequence_length)
                pieces.append(self._piece(row, time, tokens, next_token, starts))
                open_rows[row] = None if next_token is None else document
            if not any(len(piece["input_ids"]) for piece in pieces):
                self._check_epoch(time, start)
                self._time = 0
                return
            self._time = time + 1
            if time >= start:
                yield from pieces

    def _check_epoch(self, times: int, start: int) -> None:
        if not times:
            fix = "give documents with tokens; a function must return a new iterator for every epoch"
            raise ValueError(complaint("every epoch must have documents with tokens", "none", fix))
        if start >= times:
            rule = f"a state must be of a time before the documents' end, {times}"
            raise ValueError(complaint(rule, start, "load {'time': 0}, which begins the next epoch"))

    def _next_document(self, source: Iterator[Any]) -> _OpenDocument | None:
        for document in source:
            opened = _OpenDocument(_token_chunks(document, self._tokenizer, self._text_column))
            if not opened.is_empty():
                return opened
        return None


class _Row(NamedTuple):
    """A row's documents, and the time at which each of them ends, after a 0."""

    documents: list[int]
    ends: list[int]


class _OpenDocument:
    """A document that is being read; it knows one token more than it gave."""

    def __init__(self, chunks: Iterator[np.ndarray]) -> None:
        self.chunks, self.ahead = chunks, np.empty(0, np.int64)

    def is_empty(self) -> bool:
        return not len(self._look(1))

    def read(self, count: int) -> tuple[np.ndarray, int | None]:
        """Take ``count`` tokens, or those that are left, and look at the one after them."""
        tokens = self._look(count + 1)
        self.ahead = self.ahead[count:]
        return tokens[:count], int(tokens[count]) if len(tokens) > count else None

    def _look(self, count: int) -> np.ndarray:
        parts = [self.ahead]
        have = len(self.ahead)
        while have < count and (chunk := next(self.chunks, None)) is not None:
            parts.append(chunk)
            have += len(chunk)
        self.ahead = np.concatenate(parts) if len(parts) > 1 else self.ahead
        return self.ahead[:count]


def _token_chunks(document: Any, tokenizer: PreTrainedTokenizerBase | None, text_column: str) -> Iterator[np.ndarray]:
    """The tokens of a document of any kind, a chunk at a time, none of them earlier than asked for."""
    if isinstance(document, Mapping):
        known = [name for name in ("input_ids", text_column) if name in document]
        if not known:
            rule = f"a document must have input_ids or {text_column!r}"
            raise ValueError(complaint(rule, ", ".join(document), "name the text_column"))
        document = ids_of_row(document) if known[0] == "input_ids" else document[text_column]
    if isinstance(document, str):
        document = (document,)
    if not isinstance(document, Iterable):
        rule = "each document must hold token ids or text"
        raise ValueError(complaint(rule, repr(document), "pass a list of one document"))
    if isinstance(document, (np.ndarray, Tensor, range)):
        yield token_ids(document)
        return
    parts = iter(document)
    first = next(parts, None)
    if first is None:
        return
    parts = itertools.chain((first,), parts)
    if not isinstance(first, str):
        while len(tokens := token_ids(list(itertools.islice(parts, _TOKENS)))):
            yield tokens
        return
    tokenizer = _needed(tokenizer)
    yield from token_pieces(parts, tokenizer, np.dtype(np.int64))
    if tokenizer.eos_token_id is not None:
        yield np.asarray((tokenizer.eos_token_id,), np.int64)


def _stored(
    documents: Dataset | Sequence[Any], tokenizer: PreTrainedTokenizerBase | None, text_column: str
) -> tuple[np.ndarray, Callable[[int, int, int], np.ndarray]]:
    """The documents' lengths, and how to read tokens ``start .. stop`` of one."""
    check_documents(documents)
    if isinstance(documents, Dataset) and "input_ids" in documents.column_names:
        table = documents.select_columns(["input_ids"]).with_format("arrow")
        beside = [name for name in BESIDE_IDS if name in documents.column_names]
        counts = []
        for batch in documents.select_columns(["input_ids", *beside]).with_format("arrow").iter(batch_size=1000):
            check_table(batch)
            counts.append(pyarrow.compute.list_value_length(batch["input_ids"]).to_numpy())

        def read(document: int, start: int, stop: int) -> np.ndarray:
            # A view of the file: a piece of a long document costs no more than one of a short document.
            return table[document]["input_ids"].chunk(0)[0].values[start:stop].to_numpy(zero_copy_only=False)

        return np.concatenate([np.empty(0, np.int64), *counts]), read

    if isinstance(documents, Dataset) and text_column not in documents.column_names:
        rule = f"documents must have the column input_ids or {text_column!r}"
        raise ValueError(complaint(rule, ", ".join(documents.column_names), "name the text_column"))
    held = []
    for document in documents:
        tokens = np.concatenate([np.empty(0, np.int64), *_token_chunks(document, tokenizer, text_column)])
        if len(tokens):
            ends = (np.min_scalar_type(tokens.min()), np.min_scalar_type(tokens.max()))
            tokens = tokens.astype(np.result_type(*ends))
        held.append(tokens)
    lengths = np.asarray([len(document) for document in held], np.int64)
    return lengths, lambda document, start, stop: held[document][start:stop]


def _needed(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise ValueError(complaint("documents of text need a tokenizer", "none", "pass tokenizer, or token ids"))
    return tokenizer


__all__ = ["DocumentStreams", "IterableDocumentStreams", "StreamPosition"]
