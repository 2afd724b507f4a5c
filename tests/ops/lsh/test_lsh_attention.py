"""The seven invariants of LSH attention, against the dense twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_longmem.ops.lsh import attend, draw_rotations, hash_vectors, layout, lsh_attention, naive

RULES = [(candidates, merge) for candidates in ("bucket", "chunk") for merge in ("union", "sum")]
LENGTHS = [1, 2, 63, 64, 65, 257]


def draw(length, *, batch=2, heads=2, head_dim=8, rounds=3, num_buckets=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, length, head_dim)
    qk = torch.randn(shape, dtype=dtype, generator=generator)
    v = torch.randn(shape, dtype=dtype, generator=generator)
    rotations = draw_rotations(heads, head_dim, rounds, num_buckets, generator=generator)
    return qk, v, hash_vectors(qk, rotations, num_buckets)


def padding(kind, batch, length, seed=0):
    if kind is None:
        return None
    mask = torch.ones(batch, length, dtype=torch.bool)
    cut = length // 3
    if kind == "left":
        mask[0, :cut] = False
    elif kind == "right":
        mask[0, length - cut :] = False
    elif kind == "scattered":
        mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) > 0.4
    elif kind == "a whole row":
        mask[0] = False
    return mask


def assert_fast_equals_naive(qk, v, buckets, tolerance, **settings_):
    results = []
    for function in (lsh_attention, naive.lsh_attention):
        qk_, v_ = qk.clone().requires_grad_(), v.clone().requires_grad_()
        out = function(qk_, v_, buckets, **settings_)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        grads = torch.autograd.grad((out * weight).sum(), (qk_, v_))
        results.append((out, *grads))
    for name, fast, dense in zip(("output", "gradient of qk", "gradient of v"), *results, strict=True):
        torch.testing.assert_close(
            fast, dense, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", [None, "left", "right", "scattered", "a whole row"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("candidates", "merge"), RULES)
@pytest.mark.parametrize("length", LENGTHS)
def test_fast_equals_naive_in_float64(length, candidates, merge, causal, kind):
    assert_fast_equals_naive(
        *draw(length),
        1e-10,
        chunk_length=16,
        chunks_after=0 if causal else 1,
        causal=causal,
        candidates=candidates,
        merge=merge,
        attention_mask=padding(kind, 2, length),
    )


@pytest.mark.parametrize(("candidates", "merge"), RULES)
def test_fast_equals_naive_in_float32_at_length_1000(candidates, merge):
    qk, v, buckets = draw(1000, batch=1, dtype=torch.float32, num_buckets=[4, 8], head_dim=16)
    assert_fast_equals_naive(qk, v, buckets, 1e-5, chunk_length=32, candidates=candidates, merge=merge)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 90),
    rounds=st.integers(1, 5),
    num_buckets=st.sampled_from([2, 4, [2, 4], 32]),
    chunk_length=st.integers(1, 40),
    before=st.integers(0, 3),
    after=st.integers(0, 2),
    rule=st.sampled_from(RULES),
    causal=st.booleans(),
    kind=st.sampled_from([None, "left", "right", "scattered"]),
    seed=st.integers(0, 1000),
)
def test_fast_equals_naive_for_any_setting(
    length, rounds, num_buckets, chunk_length, before, after, rule, causal, kind, seed
):
    candidates, merge = rule
    if causal and candidates == "bucket":
        after = 0
    assert_fast_equals_naive(
        *draw(length, rounds=rounds, num_buckets=num_buckets, seed=seed),
        1e-10,
        chunk_length=chunk_length,
        chunks_before=before,
        chunks_after=after,
        causal=causal,
        candidates=candidates,
        merge=merge,
        attention_mask=padding(kind, 2, length, seed),
    )


@pytest.mark.parametrize("scores_per_tile", [1, 3000, 2**25])
@pytest.mark.parametrize(("candidates", "merge"), RULES)
def test_the_size_of_a_tile_changes_nothing(monkeypatch, candidates, merge, scores_per_tile):
    monkeypatch.setattr(layout, "SCORES_PER_TILE_CPU", scores_per_tile)
    assert_fast_equals_naive(*draw(130), 1e-10, chunk_length=16, candidates=candidates, merge=merge)


@pytest.mark.parametrize("merge", ["union", "sum"])
@pytest.mark.parametrize("changed", [1, 100, 255])
def test_a_later_token_changes_no_earlier_bit(merge, changed):
    qk, v, _ = draw(256, dtype=torch.float32, head_dim=16)
    rotations = draw_rotations(2, 16, 3, [4, 4], generator=torch.Generator().manual_seed(4))
    outs = []
    for noise in (0.0, 5.0):
        qk_, v_ = qk.clone(), v.clone()
        qk_[:, :, changed:] += noise * torch.randn(qk_[:, :, changed:].shape)
        v_[:, :, changed:] += noise
        buckets = hash_vectors(qk_, rotations, [4, 4])
        outs.append(lsh_attention(qk_, v_, buckets, chunk_length=16, merge=merge))
    assert torch.equal(outs[0][:, :, :changed], outs[1][:, :, :changed])
    assert not torch.equal(outs[0][:, :, changed:], outs[1][:, :, changed:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("chunk_length", "chunks_before"), [(64, 1), (64, 2), (64, 3), (300, 1), (512, 2)])
def test_a_later_token_changes_no_earlier_bit_however_wide_the_window(dtype, chunk_length, chunks_before):
    """Products over more keys are added in parts, whose borders must not move with what comes later."""
    qk, v, _ = draw(1500, batch=1, dtype=torch.float32, head_dim=16)
    rotations = draw_rotations(2, 16, 2, 2, generator=torch.Generator().manual_seed(4))
    outs = []
    for noise in (0.0, 5.0):
        qk_ = qk.clone()
        qk_[:, :, 1300:] += noise * torch.randn(qk_[:, :, 1300:].shape)
        buckets = hash_vectors(qk_, rotations, 2)
        shape = {"chunk_length": chunk_length, "chunks_before": chunks_before}
        outs.append(lsh_attention(qk_.to(dtype), v.to(dtype), buckets, **shape))
    assert torch.equal(outs[0][:, :, :1300], outs[1][:, :, :1300])
    assert not torch.equal(outs[0][:, :, 1300:], outs[1][:, :, 1300:])


@pytest.mark.parametrize("most_in_order", [0, 10**9], ids=["aligned", "dense"])
@pytest.mark.parametrize("kind", [None, "scattered", "a whole row"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("merge", ["union", "sum"])
@pytest.mark.parametrize("length", [1, 65, 257])
def test_buckets_that_begin_with_a_block_change_nothing(monkeypatch, length, merge, causal, kind, most_in_order):
    monkeypatch.setattr(layout, "KEYS_IN_ORDER_CPU", most_in_order)
    monkeypatch.setattr(layout, "SCORES_PER_TILE_CPU", 10_000)
    shape = {"chunk_length": 16, "chunks_before": 2, "chunks_after": 0 if causal else 1, "causal": causal}
    mask = padding(kind, 2, length)
    assert_fast_equals_naive(*draw(length, dtype=torch.float32), 1e-5, **shape, merge=merge, attention_mask=mask)


@pytest.mark.parametrize(("candidates", "merge"), RULES)
def test_what_stands_for_padding_may_be_anything(candidates, merge):
    qk, v, buckets = draw(65)
    mask = padding("scattered", 2, 65)
    hidden = ~mask[:, None, :, None]
    results = []
    for value in (0.0, torch.nan):
        qk_, v_ = (x.masked_fill(hidden, value).requires_grad_() for x in (qk, v))
        out = lsh_attention(qk_, v_, buckets, chunk_length=16, candidates=candidates, merge=merge, attention_mask=mask)
        out = out.masked_fill(hidden, 0.0)
        grads = torch.autograd.grad(out.square().sum(), (qk_, v_))
        results.append((out, *(grad.masked_fill(hidden, 0.0) for grad in grads)))
    for zeros, nans in zip(*results, strict=True):
        assert torch.equal(zeros, nans)


def test_a_second_derivative_is_refused_by_name():
    qk, v, buckets = draw(20)
    qk.requires_grad_()
    (grad,) = torch.autograd.grad(lsh_attention(qk, v, buckets, chunk_length=8).sin().sum(), qk, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        grad.sum().backward()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dropout_draws_its_seed_from_the_cpu_whatever_the_default_device(device):
    qk, v, buckets = draw(40)
    torch.manual_seed(0)
    expected = lsh_attention(qk, v, buckets, chunk_length=8, dropout=0.5)
    torch.manual_seed(0)
    with torch.device(device):
        assert torch.equal(lsh_attention(qk, v, buckets, chunk_length=8, dropout=0.5), expected)


def test_the_chunk_rule_leaks_the_future_as_documented():
    qk, v, _ = draw(256, dtype=torch.float32)
    rotations = draw_rotations(2, 8, 3, 8, generator=torch.Generator().manual_seed(4))
    other = qk.clone()
    other[:, :, 128:] = torch.randn(other[:, :, 128:].shape)
    outs = [
        lsh_attention(x, v, hash_vectors(x, rotations, 8), chunk_length=16, candidates="chunk") for x in (qk, other)
    ]
    assert not torch.allclose(outs[0][:, :, :128], outs[1][:, :, :128], atol=1e-3)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["left", "right", "scattered"])
def test_a_row_is_the_same_alone_in_a_batch_and_with_padding(causal, kind):
    qk, v, _ = draw(90, dtype=torch.float32)
    rotations = draw_rotations(2, 8, 3, 8, generator=torch.Generator().manual_seed(4))
    mask = padding(kind, 2, 90)
    shape = {"chunk_length": 16, "chunks_after": 0 if causal else 1, "causal": causal}
    batched = lsh_attention(qk, v, hash_vectors(qk, rotations, 8), attention_mask=mask, **shape)
    real = mask[0]
    alone_qk, alone_v = qk[:1, :, real], v[:1, :, real]
    alone = lsh_attention(alone_qk, alone_v, hash_vectors(alone_qk, rotations, 8), **shape)
    torch.testing.assert_close(batched[:1, :, real], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_one_bucket_and_a_wide_window_is_full_attention(causal):
    qk, v, _ = draw(100)
    buckets = torch.zeros(2, 2, 1, 100, dtype=torch.int32)
    scores = qk @ naive.unit_keys(qk).transpose(-1, -2)
    itself = torch.eye(100, dtype=torch.bool)
    hidden = itself | (torch.ones(100, 100).triu(1).bool() if causal else itself)
    hidden[0, 0] = hidden[0, 0] and not causal
    expected = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1) @ v
    out = lsh_attention(
        qk, v, buckets, chunk_length=25, chunks_before=4, chunks_after=0 if causal else 4, causal=causal
    )
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)


def test_the_union_of_rounds_converges_to_full_attention():
    qk, v, _ = draw(64, batch=1)
    full = lsh_attention(qk, v, torch.zeros(1, 2, 1, 64, dtype=torch.int32), chunk_length=64)
    errors = []
    for rounds in (1, 4, 16, 64):
        rotations = draw_rotations(2, 8, rounds, 8, generator=torch.Generator().manual_seed(0))
        out = lsh_attention(qk, v, hash_vectors(qk, rotations, 8), chunk_length=64)
        errors.append((out - full).abs().mean().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02 * errors[0]


def test_a_token_that_sees_nothing_keeps_its_own_value():
    qk, v, _ = draw(10)
    buckets = torch.arange(10, dtype=torch.int32).expand(2, 2, 3, 10)
    out = lsh_attention(qk, v, buckets, chunk_length=4, dropout=0.5)
    assert torch.equal(out, v)


@pytest.mark.parametrize(("candidates", "merge"), RULES)
def test_gradient_with_dropout(candidates, merge):
    qk, v, buckets = draw(20, batch=1, head_dim=3, rounds=2, num_buckets=4)

    def attention(qk, v):
        torch.manual_seed(7)
        return lsh_attention(qk, v, buckets, chunk_length=4, candidates=candidates, merge=merge, dropout=0.4)

    with torch.random.fork_rng():
        assert torch.autograd.gradcheck(attention, (qk.requires_grad_(), v.requires_grad_()))


def test_dropout_drops_weights_at_its_rate_and_keeps_their_mean():
    qk, _, buckets = draw(60, batch=1, num_buckets=2, head_dim=60)
    identity = torch.eye(60, dtype=torch.float64).expand(1, 2, 60, 60).contiguous()
    weights = naive.lsh_attention_weights(qk, buckets, chunk_length=60)
    torch.manual_seed(0)
    dropped = torch.stack([lsh_attention(qk, identity, buckets, chunk_length=60, dropout=0.25) for _ in range(400)])
    torch.testing.assert_close(dropped.mean(0), weights, atol=0.08, rtol=0)
    seen = (weights > 1e-9) & (weights < 1.0)
    kept = dropped[:, seen]
    assert abs((kept == 0).double().mean().item() - 0.25) < 0.01
    torch.testing.assert_close(kept[kept != 0], (weights[seen] / 0.75).expand_as(kept)[kept != 0], atol=1e-10, rtol=0)


def test_dropout_advances_the_default_generator_and_follows_its_seed():
    qk, v, buckets = draw(40)
    torch.manual_seed(1)
    first = lsh_attention(qk, v, buckets, chunk_length=8, dropout=0.5)
    second = lsh_attention(qk, v, buckets, chunk_length=8, dropout=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, lsh_attention(qk, v, buckets, chunk_length=8, dropout=0.5))
    assert not torch.equal(first, second)


def test_without_dropout_no_random_number_is_drawn():
    qk, v, buckets = draw(40)
    before = torch.get_rng_state()
    lsh_attention(qk.requires_grad_(), v, buckets, chunk_length=8).sum().backward()
    assert torch.equal(before, torch.get_rng_state())


class LargestTensor(TorchDispatchMode):
    """Remembers the largest storage any operation returned."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("rounds", [2, 8])
def test_no_tensor_grows_with_rounds_times_window(rounds):
    # The largest allowed: a table of keys and values or its gradient (2 D + 1 floats a slot), a tile, or int64 orders.
    qk, v, buckets = draw(4096, batch=1, heads=2, head_dim=32, rounds=rounds, num_buckets=64, dtype=torch.float32)
    slots = 2 * 4096
    with torch.no_grad(), LargestTensor() as largest:
        out = attend.attend_tiles(qk, v, buckets, None, None, None, 64, 1, 0, True, "bucket", "union", 0.0)
        attend.attend_tiles_backward(
            out[0], qk, v, buckets, None, None, None, *out, 64, 1, 0, True, "bucket", "union", 0.0
        )
    table = (slots + 2) * 65 * 4
    orders = rounds * (slots + 200) * 8
    tile = layout.SCORES_PER_TILE_CPU * 4
    assert largest.bytes <= 1.05 * max(table, orders, tile)
    assert largest.bytes < rounds * slots * 2 * 64 * 4 / 3


def test_what_backward_keeps_is_linear_and_positions_are_int32():
    qk, v, buckets = draw(512, dtype=torch.float32)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        lsh_attention(qk.requires_grad_(), v, buckets, chunk_length=16)
    assert len(kept) >= 6
    assert not any(tensor.dtype == torch.int64 and tensor.numel() > 1 for tensor in kept)
    assert all(tensor.numel() <= max(qk.numel(), buckets.numel()) for tensor in kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_come_back_in_their_dtype_close_to_float32(dtype):
    qk, v, buckets = draw(200, dtype=torch.float32)
    half_qk, half_v = qk.to(dtype).requires_grad_(), v.to(dtype).requires_grad_()
    out = lsh_attention(half_qk, half_v, buckets, chunk_length=16)
    out.sum().backward()
    exact = lsh_attention(half_qk.detach().float(), half_v.detach().float(), buckets, chunk_length=16)
    assert out.dtype == half_qk.grad.dtype == half_v.grad.dtype == dtype
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), exact, atol=8 * precision, rtol=4 * precision)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_inside(dtype):
    qk, v, buckets = draw(70, dtype=torch.float32)
    expected = lsh_attention(qk, v, buckets, chunk_length=16)
    with torch.autocast("cpu", dtype):
        assert torch.equal(lsh_attention(qk, v, buckets, chunk_length=16), expected)
        lsh_attention(qk.requires_grad_(), v, buckets, chunk_length=16).sum().backward()


@pytest.mark.parametrize("candidates", ["bucket", "chunk"])
def test_operator_is_traceable(candidates):
    qk, v, buckets = draw(40, dtype=torch.float32)
    mask = padding("right", 2, 40)
    numbers = (torch.arange(40) >= 15).long().expand(2, 40).contiguous() if candidates == "chunk" else None
    arguments = (qk.requires_grad_(), v, buckets, mask, numbers, None, 16, 1, 0, True, candidates, "union", 0.0)
    torch.library.opcheck(attend._attend, arguments)


def test_compiles_without_a_graph_break():
    qk, v, buckets = draw(40, dtype=torch.float32)

    def attention(qk, v):
        return lsh_attention(qk, v, buckets, chunk_length=16)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(qk, v), attention(qk, v))


def test_a_second_derivative_is_refused():
    qk, v, buckets = draw(10)
    out = lsh_attention(qk.requires_grad_(), v, buckets, chunk_length=4)
    (grad,) = torch.autograd.grad(out.square().sum(), qk, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


@pytest.mark.parametrize("shape", [(0, 2, 10, 8), (2, 2, 0, 8)])
def test_empty_inputs_give_empty_outputs(shape):
    qk = torch.randn(shape, requires_grad=True)
    buckets = torch.zeros(*shape[:2], 3, shape[2], dtype=torch.int32)
    out = lsh_attention(qk, torch.randn(shape), buckets, chunk_length=4)
    out.sum().backward()
    assert out.shape == qk.grad.shape == shape


def test_inputs_need_not_be_contiguous():
    qk, v, buckets = draw(50)
    qk, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (qk, v))
    assert_fast_equals_naive(qk, v, buckets, 1e-10, chunk_length=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidates": "nearby"}, "candidates must be"),
        ({"merge": "mean"}, "merge must be"),
        ({"chunks_after": 1}, "causal attention looks at no chunk after"),
        ({"dropout": 1.5}, r"dropout must lie in \[0, 1\], got 1.5"),
        ({"chunk_length": 0}, "chunk_length must be at least 1"),
        ({"attention_mask": torch.ones(2, 9)}, r"attention_mask must be \[2, 10\], got \(2, 9\)"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    qk, v, buckets = draw(10)
    with pytest.raises(ValueError, match=message):
        lsh_attention(qk, v, buckets, **{"chunk_length": 4, **change})


def test_bad_shapes_are_refused():
    qk, v, buckets = draw(10)
    with pytest.raises(ValueError, match="qk and v must be"):
        lsh_attention(qk, v[..., :4], buckets, chunk_length=4)
    with pytest.raises(ValueError, match="buckets must be"):
        lsh_attention(qk, v, buckets[..., :5], chunk_length=4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("candidates", "merge"), RULES)
def test_a_chunk_far_longer_than_the_input_needs_no_more_memory_than_it(candidates, merge, causal):
    after = 0 if causal else 1
    reach = {"chunk_length": 2**40, "chunks_after": after, "candidates": candidates, "merge": merge, "causal": causal}
    assert_fast_equals_naive(*draw(70), 1e-10, **reach)
