"""The duplication task is what the paper describes, and comes from its seed alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longmem.data.synthetic import duplication


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 9), st.integers(2, 40), st.integers(1, 127), st.integers(0, 2**32))
def test_a_row_is_a_word_twice_and_only_the_second_counts(rows: int, half: int, symbols: int, seed: int) -> None:
    dataset = duplication(rows, length=2 * half, num_symbols=symbols, generator=seed)
    assert len(dataset) == rows
    for row in dataset:
        ids, labels = row["input_ids"], row["labels"]
        word = ids[1:half]
        assert ids == [0, *word, 0, *word]
        assert labels == [-100] * (half + 1) + word
        assert all(1 <= symbol <= symbols for symbol in word)


def test_the_seed_decides_and_the_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    first, same, other = (duplication(5, generator=seed)["input_ids"] for seed in (3, 3, 4))
    assert first == same
    assert first != other
    assert torch.equal(state, torch.get_rng_state())


def test_a_generator_goes_on_where_it_stopped() -> None:
    generator = torch.Generator().manual_seed(3)
    first = duplication(5, generator=generator)["input_ids"]
    assert first == duplication(5, generator=3)["input_ids"]
    assert first != duplication(5, generator=generator)["input_ids"]


def test_every_symbol_of_the_papers_task_occurs_about_equally_often() -> None:
    ids = torch.tensor(duplication(400)["input_ids"])
    counts = torch.bincount(ids[:, 1:128].flatten(), minlength=128)
    assert ids.shape == (400, 256)
    assert counts[0] == 0
    assert (counts[1:] - 400).abs().max() < 5 * 400**0.5


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_examples": 0}, "num_examples must be at least 1, got 0"),
        ({"num_examples": 1, "num_symbols": 0}, "num_symbols must be at least 1, got 0"),
        ({"num_examples": 1, "length": 255}, "length must be even and at least 4, got 255; use 254 or 256"),
        ({"num_examples": 1, "length": 2}, "length must be even and at least 4, got 2; use 4 or more"),
    ],
)
def test_impossible_sizes_are_refused(arguments: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        duplication(**arguments)
