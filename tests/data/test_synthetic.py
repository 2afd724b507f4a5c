"""The synthetic tasks are what the papers describe, and come from their seeds alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longmem.data.synthetic import duplication, recall, sorting


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


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 60), st.integers(2, 20), st.integers(0, 2**32))
def test_symbols_follow_by_falling_count_after_a_separator(rows: int, length: int, symbols: int, seed: int) -> None:
    dataset = sorting(rows, length=length, num_symbols=symbols, generator=seed)
    assert len(dataset) == rows
    for row in dataset:
        ids, labels = row["input_ids"], row["labels"]
        text, answer = ids[:length], ids[length + 1 :]
        assert ids[length] == symbols
        assert all(0 <= symbol < symbols for symbol in text)
        assert sorted(answer) == list(range(symbols))
        counts = [text.count(symbol) for symbol in answer]
        assert counts == sorted(counts, reverse=True)
        assert labels == [-100] * (length + 1) + answer


def test_frequencies_drift_from_one_distribution_to_another() -> None:
    # The same seed and fewer symbols than rows: each row has distributions of its own, and its halves differ.
    ids = torch.tensor(sorting(200, length=1000)["input_ids"])[:, :1000]
    shares = [torch.stack([row.bincount(minlength=20) for row in part]) / part.shape[1] for part in ids.split(250, 1)]
    distances = [(shares[0] - share).abs().sum(dim=1).mean() for share in shares]
    assert distances[0] < distances[1] < distances[2] < distances[3]


def test_equal_counts_are_in_random_order() -> None:
    answers = torch.tensor(sorting(300, length=1, num_symbols=5)["input_ids"])[:, 2:]
    # Of five symbols one occurs once; any of the four others may follow, whatever its number.
    rises = (answers[:, 2:] > answers[:, 1:-1]).double().mean()
    assert abs(rises - 0.5) < 0.1


def test_who_counts_everything_is_right_about_as_often_as_said() -> None:
    ids = torch.tensor(sorting(300, generator=5)["input_ids"])
    counts = torch.stack([row.bincount(minlength=20) for row in ids[:, :1000]])
    right = 0
    for place in range(20):
        answer = ids[:, 1001 + place]
        right += int((counts.argmax(dim=1) == answer).sum())
        counts.scatter_(1, answer[:, None], -1)
    assert abs(right / ids[:, 1001:].numel() - 0.942) < 0.01


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_examples": 0}, "num_examples must be at least 1, got 0"),
        ({"num_examples": 1, "num_symbols": 1}, "num_symbols must be at least 2, got 1"),
        ({"num_examples": 1, "length": 0}, "length must be at least 1, got 0"),
    ],
)
def test_impossible_sizes_of_sorting_are_refused(arguments: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        sorting(**arguments)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 20), st.integers(1, 9), st.integers(0, 2**32), st.data())
def test_facts_stated_first_are_asked_for_last(
    rows: int, pairs: int, between: int, values: int, seed: int, data: st.DataObject
) -> None:
    questions = data.draw(st.integers(1, pairs))
    sizes = {"num_pairs": pairs, "num_questions": questions, "num_keys": 6, "num_values": values, "num_fillers": 5}
    length = 2 * pairs + between + 3 * questions
    for row in recall(rows, length=length, **sizes, generator=seed):
        ids, labels = row["input_ids"], row["labels"]
        assert len(ids) == len(labels) == length
        facts = dict(zip(ids[: 2 * pairs : 2], ids[1 : 2 * pairs : 2], strict=True))
        assert len(facts) == pairs
        assert all(1 <= key <= 6 and 7 <= value <= 6 + values for key, value in facts.items())
        assert all(7 + values <= filler <= 11 + values for filler in ids[2 * pairs : length - 3 * questions])
        asked = [tuple(ids[at : at + 3]) for at in range(length - 3 * questions, length, 3)]
        assert all(mark == 0 and facts[key] == value for mark, key, value in asked)
        assert len({key for _, key, _ in asked}) == questions
        assert [label for label in labels if label != -100] == [value for _, _, value in asked]
        assert all(label in (-100, token) for label, token in zip(labels, ids, strict=True))


def test_facts_come_from_their_seed_and_impossible_sizes_are_refused() -> None:
    first, same, other = (recall(5, generator=seed)["input_ids"] for seed in (3, 3, 4))
    assert first == same != other
    for sizes, message in (
        ({"num_questions": 5}, "num_pairs must be at least 5, got 4"),
        ({"num_keys": 3}, "num_keys must be at least 4, got 3"),
        ({"length": 19}, "length must be at least 20, got 19; use 20 or more"),
        ({"num_values": 0}, "num_values must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            recall(1, **sizes)
