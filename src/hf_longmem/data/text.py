"""Whole documents as fixed-length token sequences, with nothing dropped on the way.

``documents -> split_documents -> pack_documents``: a table of documents (columns ``name`` and ``text``) is split by
document into a training and a held-out part, and each part is tokenised, joined and cut into sequences of one length.
For document streams, ``tokenize_documents`` leaves documents whole.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset, DatasetDict, Features, List, Value, load_dataset, load_from_disk
from transformers.utils import logging

from hf_longmem._errors import complaint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.get_logger(__name__)

# Tokenised at once: bounds the Python lists that a tokenizer returns, whatever the length of a document.
_PIECE_CHARACTERS = 1 << 16
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def python_documents() -> Dataset:
    """Real text that every machine has: Python's language reference and the sources of its standard library.

    The reference is the text behind ``help("topics")`` (`pydoc_data.topics`), one document a topic; the library's
    own tests are left out, and so is a file that is not UTF-8.

    Returns:
        Dataset: columns ``name`` and ``text``, one row a document, ordered by name.
    """
    documents: dict[str, str] = {}
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name, text in topics.items():
        documents[f"topics/{name}"] = text
    library = Path(sysconfig.get_path("stdlib"))
    for path in library.rglob("*.py"):
        relative = path.relative_to(library)
        if _NOT_LIBRARY.isdisjoint(relative.parts) and relative.parts[0] != "pydoc_data":
            try:
                documents[relative.as_posix()] = path.read_bytes().decode("utf-8")
            except (OSError, UnicodeDecodeError) as reason:
                logger.info("left out %s: %s", relative, reason)
    return _documents(sorted(documents.items()))


def read_documents(paths: Sequence[str | Path]) -> Dataset:
    """Read text files, one document a file, exactly as they are (line endings too).

    Args:
        paths: the files, in UTF-8.

    Returns:
        Dataset: columns ``name`` (the path as given) and ``text``, in the order given.

    Raises:
        FileNotFoundError: a path is not a file.
        ValueError: a file is empty, or not UTF-8; or no path was given.
    """
    if not paths:
        raise ValueError(complaint("at least one text file is needed", "none", "name one"))
    return _documents([(str(path), _read(Path(path))) for path in paths])


def load_documents(
    name: str, config_name: str | None = None, *, text_column: str = "text", held_out_fraction: float = 0.05
) -> DatasetDict:
    """Load a text data set of the Hub, or of a local folder, with the `datasets` library.

    The split ``train`` is trained on; ``validation``, or else ``test``, is held out; without either, `split_documents`
    holds some documents out.

    Args:
        name: a data set's name on the Hub, a folder of data files, or a folder written by ``Dataset.save_to_disk``.
        config_name: the data set's configuration, where it has several.
        text_column: the column with the text; each row is a document, and rows without text are left out.
        held_out_fraction: the part of the documents to hold out where the data set has no split for it.

    Returns:
        DatasetDict: ``train`` and ``held_out``, with columns ``name`` and ``text``.

    Raises:
        ValueError: there is no such column, no ``train`` split, or no text.
    """
    folder = Path(name)
    saved = (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file()
    loaded: Any = load_from_disk(name) if saved else load_dataset(name, config_name)
    splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    if "train" not in splits:
        raise ValueError(complaint(f"data set {name} must have a train split", sorted(splits), "name another data set"))
    train = _text_rows(splits["train"], f"{name}/train", text_column)
    held_out = next((split for split in ("validation", "test") if split in splits), None)
    if held_out is None:
        return split_documents(train, held_out_fraction)
    return DatasetDict(train=train, held_out=_text_rows(splits[held_out], f"{name}/{held_out}", text_column))


def split_documents(documents: Dataset, held_out_fraction: float = 0.05) -> DatasetDict:
    """Split whole documents into a training and a held-out part, the same on every run and machine.

    The ``ceil(held_out_fraction * n)`` documents whose text has the smallest SHA-256 are held out, so that equal
    documents are never on both sides. Of a single document the end is held out. A warning says so where few documents
    of unequal length make the held-out part far larger than was asked for.

    Args:
        documents: columns ``name`` and ``text``.
        held_out_fraction: in (0, 1).

    Returns:
        DatasetDict: ``train`` and ``held_out``, neither empty, each in the order given.

    Raises:
        ValueError: the fraction is not in (0, 1), or there is too little text for two parts.
    """
    if not 0 < held_out_fraction < 1:
        raise ValueError(complaint("held_out_fraction must be in (0, 1)", held_out_fraction, "use for instance 0.05"))
    digests = [hashlib.sha256(text.encode("utf-8")).digest() for text in documents["text"]]
    distinct = sorted(set(digests))
    if len(distinct) < 2:
        return _split_one(documents, held_out_fraction)
    # Counted over documents, taken in whole groups of equal ones; the largest digest always stays in training.
    wanted = math.ceil(held_out_fraction * len(digests))
    last = min(sorted(digests)[wanted - 1], distinct[-2])
    held_out = [row for row, digest in enumerate(digests) if digest <= last]
    train = [row for row, digest in enumerate(digests) if digest > last]
    lengths = [len(text) for text in documents["text"]]
    share = sum(lengths[row] for row in held_out) / max(sum(lengths), 1)
    if share > max(3 * held_out_fraction, 0.2):
        logger.warning(
            f"{share:.0%} of the text is held out: whole documents are, at least one; give more, or only one"
        )
    return DatasetDict(train=documents.select(train), held_out=documents.select(held_out))


def pack_documents(
    documents: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    *,
    max_sequences: int | None = None,
    seed: int | None = None,
) -> Dataset:
    """Tokenise documents, join them with the end-of-sequence token after each, and cut the result into sequences.

    Every token of every document is in exactly one sequence; the last sequence may be shorter than the others. Text
    that looks like a special token (``</s>``) is encoded as the text it is. The result is held in memory, 2 bytes a
    token for vocabularies up to 65,536.

    Args:
        documents: columns ``name`` and ``text``.
        tokenizer: any tokenizer; one without an end-of-sequence token joins documents without a mark.
        sequence_length: tokens a sequence.
        max_sequences: stop after this many full sequences; the log says what was left out. None takes everything.
        seed: take the documents in an order drawn with this seed; None keeps the order given.

    Returns:
        Dataset: one column, ``input_ids``.

    Raises:
        ValueError: a size is below 1, or there is no text.
    """
    for label, size in (("sequence_length", sequence_length), ("max_sequences", max_sequences)):
        _check_size(label, size)
    dtype = _token_dtype(tokenizer)
    sequences: list[np.ndarray] = []
    pending = np.empty(0, dtype)
    for opened, tokens in enumerate(_drawn(documents, tokenizer, seed), start=1):
        pending = np.concatenate([pending, tokens])
        full = len(pending) // sequence_length
        sequences += [pending[i * sequence_length : (i + 1) * sequence_length] for i in range(full)]
        pending = pending[full * sequence_length :]
        if max_sequences is not None and len(sequences) >= max_sequences:
            logger.info("stopped at max_sequences=%d in document %d of %d", max_sequences, opened, len(documents))
            sequences = sequences[:max_sequences]
            break
    else:
        if len(pending):
            sequences.append(pending)
    if not sequences:
        raise ValueError(complaint("there must be some text to train or evaluate on", "none", "give longer documents"))
    return Dataset.from_dict({"input_ids": sequences}, features=Features({"input_ids": List(Value(dtype.name))}))


def tokenize_documents(
    documents: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int | None = None,
    seed: int | None = None,
) -> list[np.ndarray]:
    """Tokenise whole documents, each ended by the end-of-sequence token.

    Args:
        documents: columns ``name`` and ``text``.
        tokenizer: any tokenizer.
        max_tokens: stop after so many tokens, in the middle of a document if it comes to that; None takes everything.
        seed: take the documents in an order drawn with this seed; None keeps the order given.

    Returns:
        The token ids of each document, 2 bytes a token for vocabularies up to 65,536.

    Raises:
        ValueError: the size is below 1, or there is no text.
    """
    _check_size("max_tokens", max_tokens)
    found: list[np.ndarray] = []
    left = math.inf if max_tokens is None else max_tokens
    for tokens in _drawn(documents, tokenizer, seed):
        if len(tokens):
            found.append(tokens[: int(min(left, len(tokens)))])
            left -= len(found[-1])
        if not left:
            logger.info("stopped at max_tokens=%d in document %d of %d", max_tokens, len(found), len(documents))
            break
    if not found:
        raise ValueError(complaint("there must be some text to train or evaluate on", "none", "give longer documents"))
    return found


def _drawn(documents: Dataset, tokenizer: PreTrainedTokenizerBase, seed: int | None) -> Iterator[np.ndarray]:
    dtype = _token_dtype(tokenizer)
    order = np.arange(len(documents)) if seed is None else np.random.default_rng(seed).permutation(len(documents))
    end = np.asarray([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id], dtype)
    for row in order.tolist():
        yield np.concatenate([*token_pieces(documents[row]["text"], tokenizer, dtype), end])


def _token_dtype(tokenizer: PreTrainedTokenizerBase) -> np.dtype:
    return np.dtype("uint16" if len(tokenizer) <= 1 << 16 else "int32")


def _check_size(name: str, size: int | None) -> None:
    if size is not None and size < 1:
        raise ValueError(complaint(f"{name} must be at least 1", size, "use a positive number"))


def token_pieces(
    text: str | Iterable[str], tokenizer: PreTrainedTokenizerBase, dtype: np.dtype
) -> Iterator[np.ndarray]:
    """Tokenise a text of any length, a bounded piece at a time, without special tokens.

    A piece ends before a space between two words, where byte-level BPE, SentencePiece with words of its own and
    WordPiece tokenise both sides as they would the whole. Other tokens than those of the whole text come at a cut where
    65,536 characters have no such space, or where a tokenizer puts a space before whatever it is given, spaces too.

    Args:
        text: a string, or strings that are one text when put together, however that is cut.
        tokenizer: any tokenizer.
        dtype: of the token ids.

    Returns:
        The token ids of one piece after another.

    Raises:
        ValueError: something among the strings is none.
    """
    waiting = ""
    for part in (text,) if isinstance(text, str) else text:
        if not isinstance(part, str):
            rule = "a document of text must hold strings alone"
            raise ValueError(complaint(rule, repr(part), "leave such parts out"))
        waiting += part
        start = 0
        while len(waiting) - start > _PIECE_CHARACTERS:
            end = _between_words(waiting, start, start + _PIECE_CHARACTERS)
            yield _tokens(waiting[start:end], tokenizer, dtype)
            start = end
        waiting = waiting[start:]
    if waiting:
        yield _tokens(waiting, tokenizer, dtype)


def _between_words(text: str, start: int, end: int) -> int:
    """The last place up to ``end`` before a space with no other beside it; ``end`` where there is none."""
    place = text.rfind(" ", start + 1, end)
    while place != -1 and (text[place - 1].isspace() or text[place + 1].isspace()):
        place = text.rfind(" ", start + 1, place)
    return end if place == -1 else place


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase, dtype: np.dtype) -> np.ndarray:
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return np.asarray(ids, dtype)


def _documents(rows: Iterable[tuple[str, str]]) -> Dataset:
    names, texts = zip(*rows, strict=True)
    return Dataset.from_dict(
        {"name": list(names), "text": list(texts)},
        features=Features({"name": Value("string"), "text": Value("large_string")}),
    )


def _read(path: Path) -> str:
    if not path.is_file():
        found = "a directory" if path.is_dir() else "no such file"
        raise FileNotFoundError(complaint(f"{path} must be a text file", found, "check the path"))
    content = path.read_bytes()
    if not content:
        raise ValueError(complaint(f"{path} must contain text", "an empty file", "give a file with text"))
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            complaint(
                f"{path} must be UTF-8",
                f"byte 0x{content[error.start]:02x} at offset {error.start}",
                f"convert it, for instance with: iconv -f latin1 -t utf-8 {path}",
            )
        ) from None


def _text_rows(split: Dataset, name: str, text_column: str) -> Dataset:
    if text_column not in split.column_names:
        columns = ", ".join(split.column_names)
        raise ValueError(complaint(f"{name} must have the column {text_column!r}", columns, "name the text's column"))
    rows = [(f"{name}/{row}", text) for row, text in enumerate(split[text_column]) if text]
    if len(rows) < len(split):
        logger.info("%s: left out %d rows without text", name, len(split) - len(rows))
    if not rows:
        raise ValueError(complaint(f"{name} must contain text", f"{len(split)} empty rows", "name another data set"))
    if not isinstance(rows[0][1], str):
        found = type(rows[0][1]).__name__
        raise ValueError(complaint(f"{name}: {text_column!r} must hold strings", found, "name another column"))
    return _documents(rows)


def _split_one(documents: Dataset, held_out_fraction: float) -> DatasetDict:
    name, text = documents[0]["name"], documents[0]["text"]
    if len(text) < 2:
        raise ValueError(complaint(f"{name} must be long enough to hold some text out", len(text), "give more text"))
    kept = min(max(round(len(text) * (1 - held_out_fraction)), 1), len(text) - 1)
    return DatasetDict(train=_documents([(name, text[:kept])]), held_out=_documents([(name, text[kept:])]))
