"""Packing loses no token and mixes no documents."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longmem.data.packing import pack_with_document_ids


def unpack(row: dict[str, list[int]]) -> list[list[int]]:
    documents: list[list[int]] = [[] for _ in set(row["document_ids"])]
    for token, number in zip(row["input_ids"], row["document_ids"], strict=True):
        documents[number].append(token)
    return documents


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=30).filter(any), capacity=st.integers(1, 25))
def test_every_token_is_in_one_row_and_documents_stay_whole(lengths: list[int], capacity: int) -> None:
    # The first token names the document, so that pieces can be told apart.
    documents = [[1000 * (index + 1) + place for place in range(length)] for index, length in enumerate(lengths)]
    packed = pack_with_document_ids(documents, capacity)
    pieces = [piece for row in packed for piece in unpack(row)]
    expected = [d[start : start + capacity] for d in documents for start in range(0, len(d), capacity)]
    assert sorted(pieces) == expected
    for row in packed:
        assert len(row["input_ids"]) <= capacity
        assert row["document_ids"] == sorted(row["document_ids"])
        assert unpack(row) == sorted(unpack(row))
    firsts = [row["input_ids"][0] for row in packed]
    assert firsts == sorted(firsts)
    # Best fit, longest first, never needs more than 11/9 of the least rows and one: no two half-full rows are left.
    halves = [row for row in packed if len(row["input_ids"]) * 2 <= capacity]
    assert len(halves) <= 1


def test_a_data_set_of_ids_is_packed_too_and_always_alike() -> None:
    data = Dataset.from_dict({"input_ids": [[5, 6, 7, 8], [], [9], [10, 11]], "name": list("abcd")})
    for documents in (data, data.to_list(), iter(data["input_ids"]), data.with_format("numpy")):
        packed = pack_with_document_ids(documents, 5)
        assert packed[:] == {
            "input_ids": [[5, 6, 7, 8, 9], [10, 11]],
            "document_ids": [[0, 0, 0, 0, 1], [0, 0]],
        }


@pytest.mark.parametrize(
    ("documents", "length", "words"),
    [
        ([[1]], 0, "must be at least 1, got 0"),
        ([], 5, "some tokens to pack, got none"),
        ([[], []], 5, "some tokens to pack, got none"),
        (["a text"], 5, "must be token ids"),
        ("a text", 5, "got str; pass a list of one document"),
        ({"train": [[1]]}, 5, "got a dict of train"),
        ([{"text": "a"}], 5, "must be token ids, or mappings with input_ids, got text"),
        ([[1, None]], 5, "must be whole numbers, one list a document, got null among them"),
        ([[1.5]], 5, "got numbers with fractions"),
        ([[[1, 2]]], 5, "got lists in a list"),
        ([5], 5, "whole numbers, one list a document, got 5"),
        ([[2**31]], 5, "must be at most 2,147,483,647, got 2147483648"),
        ([{"input_ids": [5, 0], "attention_mask": [1, 0]}], 5, "no padding .* got a row with zeros"),
        ([{"input_ids": [5, 6], "labels": [-100, 6]}], 5, "labels must equal input_ids"),
    ],
)
def test_what_cannot_be_packed_is_refused(documents: Any, length: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pack_with_document_ids(documents, length)
