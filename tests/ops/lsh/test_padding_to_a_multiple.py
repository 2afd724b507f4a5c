"""Padding that only lengthens the ring of chunks: the same as padding by hand, in the fast operator and its twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_longmem.ops.lsh import draw_rotations, hash_vectors, lsh_attention
from hf_longmem.ops.lsh.naive import lsh_attention as naive_attention
from hf_longmem.ops.lsh.naive import lsh_attention_weights


@pytest.mark.parametrize("length", [1, 20, 21, 30, 48])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_it_equals_padding_by_hand_and_the_naive_twin(length: int, masked: bool, causal: bool) -> None:
    generator = torch.Generator().manual_seed(length)
    qk, v = torch.randn(2, 2, 2, length, 6, generator=generator, dtype=torch.float64).requires_grad_()
    buckets = hash_vectors(qk, draw_rotations(2, 6, 3, 4, generator=generator, dtype=torch.float64), 4)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, length // 2 + 1 :] = False
    rules: dict[str, Any] = {"chunk_length": 8, "chunks_after": int(not causal), "causal": causal}
    rules |= {"candidates": "chunk", "merge": "sum"}
    padding = -length % 24 if length > 20 else 0
    by_hand = lsh_attention(
        torch.nn.functional.pad(qk, (0, 0, 0, padding)),
        torch.nn.functional.pad(v, (0, 0, 0, padding)),
        torch.nn.functional.pad(buckets, (0, padding)),
        attention_mask=torch.nn.functional.pad(mask if masked else torch.ones_like(mask), (0, padding)),
        **rules,
    )[:, :, :length]
    rules |= {"pad_beyond": 20, "pad_to_multiple_of": 24, "attention_mask": mask if masked else None}
    fast, naive = (attend(qk, v, buckets, **rules) for attend in (lsh_attention, naive_attention))
    weights = lsh_attention_weights(qk, buckets, **rules)
    assert weights.shape == (2, 2, length, length)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, length, dtype=torch.float64))
    upstream = torch.randn(fast.shape, generator=generator, dtype=torch.float64)
    expected = (by_hand, *torch.autograd.grad(by_hand, (qk, v), upstream))
    for out in (fast, naive):
        for ours, theirs in zip((out, *torch.autograd.grad(out, (qk, v), upstream)), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_the_ring_is_longer_with_it() -> None:
    qk = torch.randn(1, 1, 21, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    buckets = torch.arange(21).flip(0).remainder(4).expand(1, 1, 3, 21)
    rules: dict[str, Any] = {"chunk_length": 8, "candidates": "chunk", "merge": "sum", "causal": False}
    plain, longer = (lsh_attention(qk, qk, buckets, pad_to_multiple_of=n, **rules) for n in (8, 48))
    assert (plain - longer).abs().max() > 1e-3


@pytest.mark.parametrize("bad", [{"pad_beyond": -1}, {"pad_to_multiple_of": 0}])
def test_impossible_values_are_refused(bad: dict[str, int]) -> None:
    qk, buckets = torch.randn(1, 1, 4, 2), torch.zeros(1, 1, 1, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="pad_beyond must be at least 0, pad_to_multiple_of at least 1, got"):
        lsh_attention(qk, qk, buckets, chunk_length=2, **bad)
