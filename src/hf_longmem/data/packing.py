"""Short documents side by side in long rows, each known by its id."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value

from hf_longmem._errors import complaint
from hf_longmem.data.documents import check_documents, ids_of_row, token_ids

_LARGEST = np.iinfo("int32").max


def pack_with_document_ids(documents: Iterable[Any], sequence_length: int) -> Dataset:
    """Pack tokenised documents into few rows of at most ``sequence_length`` tokens, with ``document_ids``.

    Greedy, longest first: each document goes into the fullest row that still holds it. No document is cut but one
    longer than a row, whose pieces become documents of their own, and no token is lost. The models keep the documents
    of a row apart by their ids; no row is padded here, see `DataCollatorForLongSequences`. The result is held in
    memory, and depends on nothing but the arguments.

    Args:
        documents: token ids of each document, or mappings with ``input_ids``, such as a ``datasets.Dataset``. An
            ``attention_mask`` there must be 1 throughout, and ``labels`` must be the ids: neither is taken over.
        sequence_length: the most tokens of a row.

    Returns:
        Dataset: columns ``input_ids`` and ``document_ids``, which number the documents of a row from 0. A row's
        documents, and the rows by their first one, are in the order given.

    Raises:
        ValueError: ``sequence_length`` is below 1, there is no token, or documents are no documents: a mapping of
            splits, a string, padded rows, labels of one's own, ids that are no whole numbers.

    >>> pack_with_document_ids([[5, 6, 7, 8], [9], [10, 11]], 5)[:]
    {'input_ids': [[5, 6, 7, 8, 9], [10, 11]], 'document_ids': [[0, 0, 0, 0, 1], [0, 0]]}
    """
    if sequence_length < 1:
        raise ValueError(complaint("sequence_length must be at least 1", sequence_length, "use a positive number"))
    check_documents(documents)
    pieces: list[np.ndarray] = []
    for document in documents:
        tokens = _tokens(document)
        pieces += [tokens[start : start + sequence_length] for start in range(0, len(tokens), sequence_length)]
    if not pieces:
        raise ValueError(complaint("there must be some tokens to pack", "none", "give documents that are not empty"))
    rows = _best_fit([len(piece) for piece in pieces], sequence_length)
    columns = {
        "input_ids": [np.concatenate([pieces[index] for index in row]) for row in rows],
        "document_ids": [np.repeat(np.arange(len(row), dtype="int32"), [len(pieces[i]) for i in row]) for row in rows],
    }
    return Dataset.from_dict(columns, features=Features({name: List(Value("int32")) for name in columns}))


def _tokens(document: Any) -> np.ndarray:
    tokenized = not isinstance(document, Mapping) or "input_ids" in document
    if isinstance(document, str) or not tokenized:
        rule = "documents must be token ids, or mappings with input_ids"
        received = "a text" if tokenized else ", ".join(map(str, document))
        raise ValueError(complaint(rule, received, "tokenize first, for instance with Dataset.map"))
    ids = token_ids(ids_of_row(document) if isinstance(document, Mapping) else document)
    if len(ids) and ids.max() > _LARGEST:
        raise ValueError(complaint(f"token ids must be at most {_LARGEST:,}", ids.max(), "look at the tokenized data"))
    return ids.astype("int32")


def _best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(room, (lengths[index], -1))
        if place < len(room):
            left, row = room.pop(place)
        else:
            left, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if left > lengths[index]:
            insort(room, (left - lengths[index], row))
    return sorted(sorted(row) for row in rows)


__all__ = ["pack_with_document_ids"]
