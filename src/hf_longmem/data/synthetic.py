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
    if num_examples < 1:
        raise ValueError(complaint("num_examples must be at least 1", num_examples, "use a positive number"))
    if num_symbols < 1:
        raise ValueError(complaint("num_symbols must be at least 1", num_symbols, "the paper's task has 127"))
    if length < 4 or length % 2:
        fix = "use 4 or more" if length < 4 else f"use {length - 1} or {length + 1}"
        raise ValueError(complaint("length must be even and at least 4", length, fix))
    if isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator)
    half = length // 2
    words = torch.randint(1, num_symbols + 1, (num_examples, half - 1), generator=generator)
    zero = torch.zeros(num_examples, 1, dtype=words.dtype)
    input_ids = torch.cat([zero, words, zero, words], dim=1)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    labels[:, half + 1 :] = words
    return _dataset(input_ids=input_ids, labels=labels)


def _dataset(**columns: torch.Tensor) -> Dataset:
    arrays = {
        name: pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(column.reshape(-1).numpy()), column.shape[1])
        for name, column in columns.items()
    }
    return Dataset(pyarrow.table(arrays))
