"""Windows end at the borders of documents packed in one row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_longmem.ops.local import local_attention, naive, tiles, window

ROWS = ([1, 2, 63, 64, 65], [257])


def pack(rows: tuple[list[int], ...], padding: str | None, *, seed: int = 0) -> tuple[Tensor, Tensor | None]:
    """Ids and mask of rows of documents of these lengths, padded to a common length."""
    totals = [sum(lengths) for lengths in rows]
    length = max(totals) + (0 if padding is None else 7)
    ids, mask = torch.full((len(rows), length), -5), torch.zeros(len(rows), length, dtype=torch.bool)
    for row, lengths in enumerate(rows):
        places = torch.arange(totals[row])
        if padding == "left":
            places += length - totals[row]
        elif padding == "scattered":
            shuffled = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
            places = shuffled[: totals[row]].sort().values
        ids[row, places] = 3 + 2 * torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        mask[row, places] = True
    return ids, None if mask.all() else mask


def draw(batch: int, length: int) -> list[Tensor]:
    return list(torch.randn(3, batch, 2, length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("padding", [None, "right"])
@pytest.mark.parametrize("causal", [True, False])
def test_each_document_is_what_it_is_alone(causal: bool, padding: str | None) -> None:
    ids, mask = pack(ROWS, padding)
    inputs = [x.requires_grad_() for x in draw(*ids.shape)]
    reach: dict[str, Any] = {"chunk_length": 16, "chunks_after": 1, "causal": causal}
    out = local_attention(*inputs, attention_mask=mask, document_ids=ids, **reach)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    grads = torch.autograd.grad((out * weight).masked_fill(~real[:, None, :, None], 0).sum(), inputs)
    for row in range(len(ROWS)):
        for document in ids[row][real[row]].unique():
            here = (ids[row] == document) & real[row]
            alone = [x[row : row + 1, :, here].detach().requires_grad_() for x in inputs]
            expected = local_attention(*alone, **reach)
            torch.testing.assert_close(out[row : row + 1, :, here], expected, atol=1e-10, rtol=0)
            expected_grads = torch.autograd.grad((expected * weight[row : row + 1, :, here]).sum(), alone)
            for grad, expected_grad in zip(grads, expected_grads, strict=True):
                torch.testing.assert_close(grad[row : row + 1, :, here], expected_grad, atol=1e-10, rtol=0)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=2),
    rule=st.sampled_from(("sliding", "chunk")),
    chunk_length=st.integers(1, 24),
    before=st.integers(0, 2),
    after=st.integers(0, 2),
    causal=st.booleans(),
    padding=st.sampled_from((None, "left", "right", "scattered")),
    tile_scores=st.sampled_from((1, 3000, tiles.TILE_SCORES["cpu"])),
    query_block=st.sampled_from((3, tiles.QUERY_BLOCK)),
    seed=st.integers(0, 1000),
)
def test_fast_equals_naive(
    rows: list[list[int]],
    rule: window.Rule,
    chunk_length: int,
    before: int,
    after: int,
    causal: bool,
    padding: str | None,
    tile_scores: int,
    query_block: int,
    seed: int,
) -> None:
    ids, mask = pack(tuple(rows), padding, seed=seed)
    inputs = [x.requires_grad_() for x in draw(*ids.shape)]
    reach: dict[str, Any] = {"rule": rule, "chunk_length": chunk_length, "chunks_before": before}
    reach |= {"chunks_after": after, "causal": causal, "attention_mask": mask, "document_ids": ids}
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiles.TILE_SCORES, "cpu", tile_scores)
        patch.setattr(tiles, "QUERY_BLOCK", query_block)
        for function in (local_attention, naive.local_attention):
            out = function(*inputs, **reach)
            weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
            results.append((out, *torch.autograd.grad((out * weight).sum(), inputs)))
    for fast, dense in zip(*results, strict=True):
        torch.testing.assert_close(fast, dense, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("rule", ["sliding", "chunk"])
@pytest.mark.parametrize("causal", [True, False])
def test_another_document_changes_no_bit_and_gets_no_gradient(rule: window.Rule, causal: bool) -> None:
    ids, _ = pack(([30, 41, 29],), None)
    q, k, v = draw(*ids.shape)
    reach: dict[str, Any] = {"rule": rule, "chunk_length": 16, "chunks_after": 1, "causal": causal}
    outs = []
    for noise in (0.0, 9.0):
        inputs = [x.clone() for x in (q, k, v)]
        for x in inputs:
            x[:, :, 30:71] += noise
            x.requires_grad_()
        outs.append(local_attention(*inputs, document_ids=ids, **reach))
        for grad in torch.autograd.grad(outs[-1][:, :, 30:71].square().sum(), inputs):
            assert grad[:, :, 30:71].any()
            assert not grad[:, :, :30].any()
            assert not grad[:, :, 71:].any()
    assert not torch.equal(outs[0][:, :, 30:71], outs[1][:, :, 30:71])
    for others in (slice(0, 30), slice(71, 100)):
        assert torch.equal(outs[0][:, :, others], outs[1][:, :, others])


@pytest.mark.parametrize("rule", ["sliding", "chunk"])
def test_one_document_is_no_documents(rule: window.Rule) -> None:
    inputs = draw(2, 130)
    packed = local_attention(*inputs, rule=rule, chunk_length=16, document_ids=torch.full((2, 130), 7))
    assert torch.equal(packed, local_attention(*inputs, rule=rule, chunk_length=16))


@pytest.mark.parametrize("function", [local_attention, naive.local_attention])
def test_ids_that_do_not_fit_are_refused(function: Any) -> None:
    inputs = draw(1, 10)
    with pytest.raises(ValueError, match="must not fall"):
        function(*inputs, chunk_length=4, document_ids=torch.arange(10, 0, -1)[None])
    with pytest.raises(ValueError, match=r"must have shape \[B, T\], got \(1, 9\)"):
        function(*inputs, chunk_length=4, document_ids=torch.zeros(1, 9, dtype=torch.long))
