"""Documents packed in one row hash, sort and attend as if each were alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_longmem.ops.lsh import draw_rotations, hash_vectors, layout, lsh_attention, naive

RULES = [(candidates, merge) for candidates in ("bucket", "chunk") for merge in ("union", "sum")]
ROWS = ([1, 2, 63, 64, 65], [257], [5, 17, 1, 1, 33])
PADDINGS = (None, "left", "right", "scattered")


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
        documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        ids[row, places] = 3 + 2 * documents
        mask[row, places] = True
    return ids, None if mask.all() else mask


def draw(batch: int, length: int, *, rounds: int = 3, num_buckets: int = 4, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    qk, v = torch.randn(2, batch, 2, length, 8, dtype=torch.float64, generator=generator)
    rotations = draw_rotations(2, 8, rounds, num_buckets, generator=generator)
    return [qk.requires_grad_(), v.requires_grad_(), hash_vectors(qk, rotations, num_buckets)]


def probe(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("merge", ["union", "sum"])
def test_each_document_is_what_it_is_alone(merge: str, causal: bool, padding: str | None) -> None:
    ids, mask = pack(ROWS, padding)
    qk, v, buckets = draw(*ids.shape)
    reach = {"chunk_length": 16, "chunks_after": 0 if causal else 1, "causal": causal, "merge": merge}
    out = lsh_attention(qk, v, buckets, attention_mask=mask, document_ids=ids, **reach)
    weight = probe(out)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    grads = torch.autograd.grad((out * weight)[real[:, None].expand(out.shape[:3])].sum(), (qk, v))
    for row in range(len(ROWS)):
        for document in ids[row][real[row]].unique():
            here = (ids[row] == document) & real[row]
            alone = [x[row : row + 1, :, here].detach().requires_grad_() for x in (qk, v)]
            expected = lsh_attention(*alone, buckets[row : row + 1, :, :, here], **reach)
            torch.testing.assert_close(out[row : row + 1, :, here], expected, atol=1e-10, rtol=0)
            expected_grads = torch.autograd.grad((expected * weight[row : row + 1, :, here]).sum(), alone)
            for grad, expected_grad in zip(grads, expected_grads, strict=True):
                torch.testing.assert_close(grad[row : row + 1, :, here], expected_grad, atol=1e-10, rtol=0)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=2),
    rounds=st.integers(1, 4),
    num_buckets=st.sampled_from([2, 8]),
    chunk_length=st.integers(1, 24),
    before=st.integers(0, 2),
    after=st.integers(0, 2),
    rule=st.sampled_from(RULES),
    causal=st.booleans(),
    padding=st.sampled_from(PADDINGS),
    multiple=st.sampled_from([1, 12]),
    scores_per_tile=st.sampled_from([1, 3000, 2**19]),
    seed=st.integers(0, 1000),
)
def test_fast_equals_naive(
    rows, rounds, num_buckets, chunk_length, before, after, rule, causal, padding, multiple, scores_per_tile, seed
) -> None:
    candidates, merge = rule
    ids, mask = pack(tuple(rows), padding, seed=seed)
    qk, v, buckets = draw(*ids.shape, rounds=rounds, num_buckets=num_buckets, seed=seed)
    reach = {
        "chunk_length": chunk_length,
        "chunks_before": before,
        "chunks_after": 0 if causal and candidates == "bucket" else after,
        "causal": causal,
        "candidates": candidates,
        "merge": merge,
        "pad_to_multiple_of": multiple,
        "attention_mask": mask,
        "document_ids": ids,
    }
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SCORES_PER_TILE_CPU", scores_per_tile)
        for function in (lsh_attention, naive.lsh_attention):
            out = function(qk, v, buckets, **reach)
            results.append((out, *torch.autograd.grad((out * probe(out)).sum(), (qk, v))))
    for fast, dense in zip(*results, strict=True):
        torch.testing.assert_close(fast, dense, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("candidates", "merge"), RULES)
@pytest.mark.parametrize("causal", [True, False])
def test_another_document_changes_no_bit_and_gets_no_gradient(candidates: str, merge: str, causal: bool) -> None:
    ids, mask = pack(([30, 41, 29],), "right")
    qk, v, _ = draw(*ids.shape)
    rotations = draw_rotations(2, 8, 3, 4, generator=torch.Generator().manual_seed(4))
    reach = {"chunk_length": 16, "chunks_after": 0 if causal else 1, "causal": causal}
    reach |= {"candidates": candidates, "merge": merge, "attention_mask": mask, "document_ids": ids, "dropout": 0.0}
    middle = slice(30, 71)
    outs = []
    for noise in (0.0, 9.0):
        qk_, v_ = qk.detach().clone(), v.detach().clone()
        qk_[:, :, middle] += noise * torch.randn(qk_[:, :, middle].shape, dtype=qk.dtype)
        v_[:, :, middle] -= noise
        qk_.requires_grad_()
        outs.append(lsh_attention(qk_, v_.requires_grad_(), hash_vectors(qk_, rotations, 4), **reach))
        grads = torch.autograd.grad(outs[-1][:, :, middle].square().sum(), (qk_, v_))
        for grad in grads:
            assert grad[:, :, middle].any()
            assert not grad[:, :, :30].any()
            assert not grad[:, :, 71:].any()
    assert not torch.equal(outs[0][:, :, middle], outs[1][:, :, middle])
    for others in (slice(0, 30), slice(71, 100)):
        assert torch.equal(outs[0][:, :, others], outs[1][:, :, others])


@pytest.mark.parametrize(("candidates", "merge"), RULES)
def test_one_document_is_no_documents(candidates: str, merge: str) -> None:
    qk, v, buckets = draw(2, 130)
    reach = {"chunk_length": 16, "candidates": candidates, "merge": merge}
    packed = lsh_attention(qk, v, buckets, document_ids=torch.full((2, 130), 7), **reach)
    assert torch.equal(packed, lsh_attention(qk, v, buckets, **reach))


def test_many_documents_and_buckets_do_not_overflow() -> None:
    length, most = 5000, 2**31 - 2
    qk, v, _ = draw(1, length)
    buckets = torch.randint(0, 2, (1, 2, 2, length), generator=torch.Generator().manual_seed(0)).int() * most
    ids = torch.arange(length)[None] // 2
    out = lsh_attention(qk, v, buckets, chunk_length=4, document_ids=ids)
    pairs = buckets[0, :, :, 0::2] == buckets[0, :, :, 1::2]
    expected = v.detach().clone()
    meets = pairs.any(1)
    expected[0, :, 1::2][meets] = v[0, :, 0::2][meets].detach()
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)


def test_dropout_drops_the_same_weights_in_backward() -> None:
    ids, _ = pack(([20, 30],), None)
    qk, v, buckets = draw(*ids.shape)

    def attend(qk: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(3)
        out = lsh_attention(qk, v, buckets, chunk_length=16, document_ids=ids, dropout=0.3)
        return (out * probe(out)).sum()

    steps = [1e-6 * torch.randn(qk.shape, dtype=qk.dtype) for _ in range(2)]
    grads = torch.autograd.grad(attend(qk, v), (qk, v))
    slope = sum((grad * step).sum() for grad, step in zip(grads, steps, strict=True))
    with torch.no_grad():
        rise = (attend(qk + steps[0], v + steps[1]) - attend(qk - steps[0], v - steps[1])) / 2
    torch.testing.assert_close(slope, rise, atol=1e-12, rtol=1e-5)


@pytest.mark.parametrize("function", [lsh_attention, naive.lsh_attention])
def test_ids_that_do_not_fit_are_refused(function) -> None:
    qk, v, buckets = draw(1, 10)
    with pytest.raises(ValueError, match="must not fall"):
        function(qk, v, buckets, chunk_length=4, document_ids=torch.arange(10, 0, -1)[None])


def test_a_missing_id_is_refused() -> None:
    qk, v, buckets = draw(1, 10)
    with pytest.raises(ValueError, match=r"document_ids must be \[1, 10\], got \(1, 9\)"):
        lsh_attention(qk, v, buckets, chunk_length=4, document_ids=torch.zeros(1, 9, dtype=torch.long))
