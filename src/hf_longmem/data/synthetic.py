"""Synthetic tasks that show what a long-memory model can and cannot remember."""

from __future__ import annotations

import pyarrow
import torch
from datasets import Dataset

from hf_longmem._errors import complaint

IGNORE_INDEX = -100


def duplication(
    num_examples: int, *, length: int = 256, num_symbols: int = 127, generator: int | torch.Generator = 0
) -> Dataset:
    """Draw sequences ``0 w 0 w``: a random string, then the same string again.

    Only the second ``w`` counts (labels elsewhere are -100): it can be predicted without error by a model that finds
    the place where it read the string before, and by no other. Kitaev et al. 2020, section 5.

    Args:
        num_examples: rows.
        length: tokens of a row, even; ``w`` has ``length / 2 - 1`` symbols.
        num_symbols: ``w`` is drawn uniformly from 1 .. num_symbols; the vocabulary is num_symbols + 1.
        generator: a seed, or the generator to draw from.

    Returns:
        Dataset: columns ``input_ids`` and ``labels``, both aligned with the input (a causal LM shifts them itself).

    Raises:
        ValueError: a size is out of range.

    >>> row = duplication(1, length=8, num_symbols=9)[0]
    >>> row["input_ids"][:4] == row["input_ids"][4:], row["labels"][:5]
    (True, [-100, -100, -100, -100, -100])
    """
    _check_at_least("num_examples", num_examples, 1)
    _check_at_least("num_symbols", num_symbols, 1)
    if length < 4 or length % 2:
        fix = "use 4 or more" if length < 4 else f"use {length - 1} or {length + 1}"
        raise ValueError(complaint("length must be even and at least 4", length, fix))
    generator = _generator(generator)
    half = length // 2
    words = torch.randint(1, num_symbols + 1, (num_examples, half - 1), generator=generator)
    zero = torch.zeros(num_examples, 1, dtype=words.dtype)
    input_ids = torch.cat([zero, words, zero, words], dim=1)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    labels[:, half + 1 :] = words
    return _dataset(input_ids=input_ids, labels=labels)


def sorting(
    num_examples: int, *, length: int = 1000, num_symbols: int = 20, generator: int | torch.Generator = 0
) -> Dataset:
    """Draw symbols whose frequencies drift, a separator, and the symbols by falling frequency.

    Token t is drawn from ``(1 - a) p_first + a p_last`` with ``a = t / (length - 1)``; both distributions are whole
    numbers 1 .. 10, normalised, drawn anew for every row. Only the answer counts (labels before it are -100): the
    ``num_symbols`` symbols from the most to the least frequent, in an order drawn at random where two are equally
    frequent. Whoever counts everything has 94 % of it right, whoever sees the last 128 tokens of 1,000 about a third,
    a guesser who repeats no symbol 18 %. Martins et al. 2021 (arXiv 2109.00301), section 4.1.

    Args:
        num_examples: rows.
        length: tokens to count.
        num_symbols: S; symbols are 0 .. S - 1, S is the separator, the vocabulary S + 1.
        generator: a seed, or the generator to draw from.

    Returns:
        Dataset: columns ``input_ids`` and ``labels`` of ``length + 1 + num_symbols`` tokens, both aligned with the
        input (a causal LM shifts them itself).

    Raises:
        ValueError: a size is out of range.

    >>> row = sorting(1, length=6, num_symbols=3)[0]
    >>> row["input_ids"][6], sorted(row["input_ids"][7:]), row["labels"][:8].count(-100)
    (3, [0, 1, 2], 7)
    """
    _check_at_least("num_examples", num_examples, 1)
    _check_at_least("length", length, 1)
    _check_at_least("num_symbols", num_symbols, 2)
    generator = _generator(generator)
    # Drawing from the first or the last distribution by a coin is drawing from their mixture.
    first, last = (
        torch.randint(1, 11, (num_examples, num_symbols), generator=generator)
        .double()
        .multinomial(length, replacement=True, generator=generator)
        for _ in range(2)
    )
    share = torch.linspace(0, 1, length, dtype=torch.float64)
    coin = torch.rand(num_examples, length, generator=generator, dtype=torch.float64)
    symbols = torch.where(coin < share, last, first)
    counts = torch.zeros(num_examples, num_symbols, dtype=torch.float64)
    counts.scatter_add_(1, symbols, torch.ones_like(coin))
    # Counts are whole, so that less than one decides between equals only.
    counts += torch.rand(counts.shape, generator=generator, dtype=torch.float64) / 2
    answer = counts.argsort(dim=1, descending=True)
    separator = torch.full((num_examples, 1), num_symbols, dtype=symbols.dtype)
    input_ids = torch.cat([symbols, separator, answer], dim=1)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    labels[:, length + 1 :] = answer
    return _dataset(input_ids=input_ids, labels=labels)


def recall(
    num_examples: int,
    *,
    length: int = 1024,
    num_pairs: int = 4,
    num_questions: int | None = None,
    num_keys: int = 32,
    num_values: int = 32,
    num_fillers: int = 32,
    generator: int | torch.Generator = 0,
) -> Dataset:
    """Draw ``k1 v1 k2 v2 ... filler ... ? k2 v2 ? k1 v1``: facts stated once at the start, asked for at the end.

    Only the values that are asked for count (labels elsewhere are -100). Whoever remembers the start has all of them
    right; whoever sees less than ``length - 3 * num_questions - 2 * num_pairs`` tokens back has ``1 / num_values``.

    Args:
        num_examples: rows.
        length: tokens of a row.
        num_pairs: facts; their keys are distinct, their values drawn uniformly.
        num_questions: how many of them are asked for, in an order drawn at random; default all.
        num_keys, num_values, num_fillers: symbols of each kind. 0 asks, then come the keys, the values and the
            fillers: the vocabulary is ``1 + num_keys + num_values + num_fillers``.
        generator: a seed, or the generator to draw from.

    Returns:
        Dataset: columns ``input_ids`` and ``labels``, both aligned with the input (a causal LM shifts them itself).

    Raises:
        ValueError: a size is out of range.

    >>> row = recall(1, length=9, num_pairs=1, num_keys=1, num_values=1, num_fillers=1)[0]
    >>> row["input_ids"], row["labels"].count(-100)
    ([1, 2, 3, 3, 3, 3, 0, 1, 2], 8)
    """
    num_questions = num_pairs if num_questions is None else num_questions
    counts = {"num_examples": num_examples, "num_pairs": num_pairs, "num_questions": num_questions}
    for name, count in (counts | {"num_values": num_values, "num_fillers": num_fillers}).items():
        _check_at_least(name, count, 1)
    _check_at_least("num_keys", num_keys, num_pairs)
    _check_at_least("num_pairs", num_pairs, num_questions)
    _check_at_least("length", length, 2 * num_pairs + 3 * num_questions)
    generator = _generator(generator)
    keys = torch.rand(num_examples, num_keys, generator=generator).argsort(dim=1)[:, :num_pairs] + 1
    values = torch.randint(num_values, keys.shape, generator=generator) + 1 + num_keys
    num_between = length - 2 * num_pairs - 3 * num_questions
    filler = torch.randint(num_fillers, (num_examples, num_between), generator=generator) + 1 + num_keys + num_values
    asked = torch.rand(num_examples, num_pairs, generator=generator).argsort(dim=1)[:, :num_questions]
    answers = values.gather(1, asked)
    questions = torch.stack([torch.zeros_like(answers), keys.gather(1, asked), answers], dim=2).flatten(1)
    input_ids = torch.cat([torch.stack([keys, values], dim=2).flatten(1), filler, questions], dim=1)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    labels[:, length - 3 * num_questions + 2 :: 3] = answers
    return _dataset(input_ids=input_ids, labels=labels)


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(complaint(f"{name} must be at least {least}", value, f"use {least} or more"))


def _generator(generator: int | torch.Generator) -> torch.Generator:
    return torch.Generator().manual_seed(generator) if isinstance(generator, int) else generator


def _dataset(**columns: torch.Tensor) -> Dataset:
    arrays = {
        name: pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(column.reshape(-1).numpy()), column.shape[1])
        for name, column in columns.items()
    }
    return Dataset(pyarrow.table(arrays))
