"""Numbers and positions of the documents of a row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longmem.ops.documents import document_numbers, document_positions


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=6), st.integers(-(2**40), 2**40))
def test_documents_are_counted_and_their_tokens_too(documents: list[tuple[int, int]], first: int) -> None:
    ids, numbers, positions = [], [], []
    current = first
    for number, (step, length) in enumerate(documents):
        current += step + 1
        ids += [current] * length
        numbers += [number] * length
        positions += range(length)
    found = document_numbers(torch.tensor([ids]))
    assert found.tolist() == [numbers]
    assert document_numbers(found).tolist() == [numbers]
    assert document_positions(found).tolist() == [positions]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(-99, 99)), min_size=1, max_size=12))
def test_what_padding_has_as_id_does_not_matter(tokens: list[tuple[int, bool, int]]) -> None:
    mask = torch.tensor([[real for _, real, _ in tokens]])
    ids = torch.tensor([[step for step, _, _ in tokens]]).cumsum(1)
    noise = torch.tensor([[noise for _, _, noise in tokens]])
    found = document_numbers(torch.where(mask, ids, noise), mask)
    assert torch.equal(found[mask], document_numbers(ids[mask][None])[0])


def test_integers_of_any_width_count_alike() -> None:
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert document_numbers(torch.tensor([[3, 3, 5]], dtype=dtype), torch.tensor([[0, 1, 1]])).tolist() == [
            [0, 0, 1]
        ]


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_nothing_has_no_documents(shape: tuple[int, int]) -> None:
    assert document_numbers(torch.zeros(shape, dtype=torch.int64)).shape == shape


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.tensor([[0, 1, 0]]), r"must not fall within a row, got 0 after 1 in row 0; number"),
        (torch.tensor([0, 1]), r"must be integers \[batch, tokens\], got torch.int64 of shape \[2\]"),
        (torch.tensor([[0.0, 1.0]]), r"must be integers .*torch.float32"),
        (torch.tensor([[False, True]]), r"must be integers .*torch.bool"),
    ],
)
def test_ids_that_cannot_be_meant_are_refused(ids: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        document_numbers(ids)


def test_padding_may_have_falling_ids_and_real_tokens_may_not() -> None:
    ids = torch.tensor([[4, 0, 5, 0, 4]])
    assert document_numbers(ids, torch.tensor([[1, 0, 1, 0, 0]])).tolist() == [[0, 0, 1, 1, 1]]
    with pytest.raises(ValueError, match="got 4 after 5 in row 0"):
        document_numbers(ids, torch.tensor([[1, 0, 1, 0, 1]]))
