"""Windowed attention against its dense twin, transformers' layer, and the promises of its docstring."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import ReformerConfig
from transformers.models.reformer.modeling_reformer import LocalSelfAttention

from hf_longmem.ops.local import local_attention, naive, tiles, window

LENGTHS = (1, 2, 63, 64, 65, 257, 1000)
PADDINGS = ("none", "all real", "left", "right", "scattered", "a row of padding")


def make_inputs(
    batch: int, heads: int, length: int, width: int = 4, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, length, heads, width)  # as a projection leaves them: heads and tokens are swapped by strides only
    tensors = [torch.randn(shape, generator=generator, dtype=dtype).transpose(1, 2) for _ in range(3)]
    return [tensor.requires_grad_() for tensor in tensors]


def make_mask(padding: str, batch: int, length: int) -> Tensor | None:
    if padding == "none":
        return None
    mask = torch.ones(batch, length, dtype=torch.bool)
    if padding == "left":
        mask[-1, : length // 3 + 1] = False
    elif padding == "right":
        mask[-1, length - length // 3 :] = False
    elif padding == "scattered":
        mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(1)) < 0.6
    elif padding == "a row of padding":
        mask[0] = False
    return mask


def output_and_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * probe).sum(), inputs)]


def assert_same(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", ["sliding", "chunk"])
def test_keys_and_values_of_padding_may_be_anything(rule: str) -> None:
    mask = make_mask("scattered", 2, 65)
    hidden = ~mask[:, None, :, None]
    found = []
    for value in (0.0, torch.nan):
        q, *keys_and_values = (x.detach() for x in make_inputs(2, 2, 65))
        inputs = [x.requires_grad_() for x in (q, *(x.masked_fill(hidden, value) for x in keys_and_values))]
        out = local_attention(*inputs, rule=rule, chunk_length=16, attention_mask=mask).masked_fill(hidden, 0.0)
        found.append([grad.masked_fill(hidden, 0.0) for grad in output_and_gradients(out, inputs)])
    for zeros, nans in zip(*found, strict=True):
        assert torch.equal(zeros, nans)


def test_the_default_type_does_not_matter() -> None:
    inputs = make_inputs(1, 2, 65, dtype=torch.float32)
    expected = local_attention(*inputs, chunk_length=16)
    torch.set_default_dtype(torch.float16)
    try:
        assert torch.equal(local_attention(*inputs, chunk_length=16), expected)
    finally:
        torch.set_default_dtype(torch.float32)


# The fast operator equals the dense one


@settings(deadline=None, max_examples=80)
@given(
    length=st.sampled_from(LENGTHS[:-1]),
    rule=st.sampled_from(("sliding", "chunk")),
    chunk_length=st.sampled_from((1, 5, 16, 64, 100, 2**40)),
    before=st.integers(0, 3),
    after=st.integers(0, 2),
    causal=st.booleans(),
    padding=st.sampled_from(PADDINGS),
    dtype=st.sampled_from((torch.float64, torch.float32)),
    tile_scores=st.sampled_from((1, 3000, tiles.TILE_SCORES["cpu"])),
    query_block=st.sampled_from((1, 7, tiles.QUERY_BLOCK)),
)
def test_fast_equals_naive_outputs_and_gradients(
    length: int,
    rule: window.Rule,
    chunk_length: int,
    before: int,
    after: int,
    causal: bool,
    padding: str,
    dtype: torch.dtype,
    tile_scores: int,
    query_block: int,
) -> None:
    inputs, mask = make_inputs(2, 3, length, dtype=dtype), make_mask(padding, 2, length)
    options: dict[str, Any] = {
        "rule": rule,
        "chunk_length": chunk_length,
        "chunks_before": before,
        "chunks_after": after,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiles.TILE_SCORES, "cpu", tile_scores)
        patch.setattr(tiles, "QUERY_BLOCK", query_block if length < 100 else tiles.QUERY_BLOCK)
        out = local_attention(*inputs, **options, causal=causal, attention_mask=mask)
        got = output_and_gradients(out, inputs)
    expected = output_and_gradients(
        naive.local_attention(*inputs, **options, causal=causal, attention_mask=mask), inputs
    )
    assert_same(got, expected, 1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("rule", ["sliding", "chunk"])
def test_fast_equals_naive_over_a_thousand_tokens(rule: window.Rule) -> None:
    inputs, mask = make_inputs(1, 2, 1000), make_mask("scattered", 1, 1000)
    options: dict[str, Any] = {"rule": rule, "chunk_length": 64, "attention_mask": mask}
    fast, dense = local_attention(*inputs, **options), naive.local_attention(*inputs, **options)
    assert_same(output_and_gradients(fast, inputs), output_and_gradients(dense, inputs), 1e-10)


def test_naive_weights_are_the_rule_spelt_out_by_hand() -> None:
    q, k, _ = make_inputs(1, 1, 6)

    def seen(**options: Any) -> list[str]:
        weights = naive.local_attention_weights(q, k, chunk_length=2, **options)[0, 0]
        torch.testing.assert_close(weights.sum(-1), torch.ones(6, dtype=torch.float64))
        return ["".join("x" if weight > 0 else "." for weight in row) for row in weights]

    assert seen(rule="sliding") == ["x.....", "xx....", "xxx...", ".xxx..", "..xxx.", "...xxx"]
    assert seen(rule="chunk") == ["x.....", "xx....", "xxx...", "xxxx..", "..xxx.", "..xxxx"]
    assert seen(rule="chunk", causal=False) == ["xx....", "xx....", "xxxx..", "xxxx..", "..xxxx", "..xxxx"]
    both = {"causal": False, "chunks_before": 0, "chunks_after": 1}
    assert seen(rule="sliding", **both) == ["xxx...", ".xxx..", "..xxx.", "...xxx", "....xx", ".....x"]
    assert seen(rule="chunk", **both) == ["xxxx..", "xxxx..", "..xxxx", "..xxxx", "....xx", "....xx"]


@pytest.mark.parametrize("rule", ["sliding", "chunk"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_of_the_whole_length_is_full_attention(rule: window.Rule, causal: bool) -> None:
    inputs = make_inputs(2, 2, 100)
    out = local_attention(*inputs, rule=rule, chunk_length=100, chunks_before=10**12, chunks_after=1, causal=causal)
    full = F.scaled_dot_product_attention(*inputs, is_causal=causal)
    assert_same(output_and_gradients(out, inputs), output_and_gradients(full, inputs), 1e-10)


@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (2, 2, 0, 4)])
def test_empty_inputs_give_empty_outputs(shape: tuple[int, ...]) -> None:
    inputs = [torch.zeros(shape, requires_grad=True) for _ in range(3)]
    for tensor in output_and_gradients(local_attention(*inputs, chunk_length=4), inputs):
        assert tensor.shape == shape


def test_any_strides_are_accepted() -> None:
    plain = [tensor.detach().contiguous() for tensor in make_inputs(2, 3, 70)]
    strided = [tensor.transpose(-1, -2).contiguous().transpose(-1, -2) for tensor in plain]
    assert strided[0].stride(-1) != 1
    for tensor in strided:
        tensor.requires_grad_()
    expected = local_attention(*plain, chunk_length=16)
    assert torch.equal(local_attention(*strided, chunk_length=16), expected)
    one = plain[0][:, :1].expand(2, 3, 70, 4)
    assert torch.equal(
        local_attention(one, one, one, chunk_length=16), local_attention(*[one.clone()] * 3, chunk_length=16)
    )


# Promises


@pytest.mark.parametrize("rule", ["sliding", "chunk"])
@pytest.mark.parametrize("token", [0, 31, 32, 100, 199])
def test_causal_outputs_before_a_changed_token_are_bit_identical(rule: window.Rule, token: int) -> None:
    inputs = [tensor.detach() for tensor in make_inputs(2, 2, 200, dtype=torch.float32)]
    changed = [tensor.clone() for tensor in inputs]
    for tensor in changed:
        tensor[:, :, token] += 3.0
    before, after = (local_attention(*tensors, rule=rule, chunk_length=16) for tensors in (inputs, changed))
    assert torch.equal(before[:, :, :token], after[:, :, :token])
    assert not torch.equal(before[:, :, token], after[:, :, token])


@pytest.mark.parametrize("rule", ["sliding", "chunk"])
def test_the_last_token_does_not_wrap_round_to_the_first(rule: window.Rule) -> None:
    inputs = [tensor.detach() for tensor in make_inputs(1, 2, 64, dtype=torch.float32)]
    changed = [tensor.clone() for tensor in inputs]
    for tensor in changed:
        tensor[:, :, -1] += 3.0
    options: dict[str, Any] = {"rule": rule, "chunk_length": 16, "chunks_after": 1, "causal": False}
    before, after = (local_attention(*tensors, **options) for tensors in (inputs, changed))
    changed_rows = (before != after).any(-1).any(1)[0].nonzero().flatten()
    assert changed_rows.min() >= (32 if rule == "chunk" else 47)


@pytest.mark.parametrize("rule", ["sliding", "chunk"])
def test_a_row_gives_the_same_alone_and_padded_in_a_batch(rule: window.Rule) -> None:
    long = [tensor.detach() for tensor in make_inputs(2, 2, 130, dtype=torch.float32)]
    mask = torch.ones(2, 130, dtype=torch.bool)
    mask[1, 77:] = False
    batched = local_attention(*long, rule=rule, chunk_length=16, attention_mask=mask)
    alone = local_attention(*(tensor[1:, :, :77] for tensor in long), rule=rule, chunk_length=16)
    torch.testing.assert_close(batched[1:, :, :77], alone, rtol=1e-5, atol=1e-5)
    for tensor in long:
        tensor[1, :, 77:] = 1e3
    again = local_attention(*long, rule=rule, chunk_length=16, attention_mask=mask)
    assert torch.equal(again[1, :, :77], batched[1, :, :77])


@pytest.mark.parametrize("rule", ["sliding", "chunk"])
def test_queries_that_see_no_key_give_zero_and_get_zero_gradient(rule: window.Rule) -> None:
    inputs = make_inputs(2, 2, 80, dtype=torch.float32)
    mask = torch.ones(2, 80, dtype=torch.bool)
    mask[0] = False
    mask[1, :40] = False
    out, *gradients = output_and_gradients(
        local_attention(*inputs, rule=rule, chunk_length=16, attention_mask=mask), inputs
    )
    for tensor in (out, *gradients):
        assert torch.isfinite(tensor).all()
        assert tensor[1, :, 41:].any(-1).all()
        assert torch.equal(tensor[~mask.unsqueeze(1).expand(2, 2, 80)], torch.zeros(2 * (80 + 40), 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_also_under_autocast(dtype: torch.dtype) -> None:
    half = [tensor.detach().to(dtype).requires_grad_() for tensor in make_inputs(2, 2, 150, dtype=torch.float32)]
    exact = [tensor.detach().float().requires_grad_() for tensor in half]
    mask = make_mask("scattered", 2, 150)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = output_and_gradients(local_attention(*half, chunk_length=16, attention_mask=mask), half)
    expected = output_and_gradients(local_attention(*exact, chunk_length=16, attention_mask=mask), exact)
    assert torch.equal(got[0], expected[0].to(dtype)), "only the result may be rounded"
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.float(), other, rtol=2e-2, atol=2e-2)


def allocation_peak(length: int) -> int:
    """Most bytes above the start while outputs and gradients of one head of width 64 are computed."""
    inputs = [tensor.requires_grad_() for tensor in torch.randn(3, 1, 1, length, 64).unbind()]
    probe = torch.ones(1, 1, length, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        torch.autograd.grad(local_attention(*inputs, chunk_length=64), inputs, probe)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_memory_is_outputs_and_gradients_plus_a_tile() -> None:
    peaks = {length: allocation_peak(length) for length in (8192, 32768)}
    row = 64 * 4
    for length, peak in peaks.items():
        kept = length * (4 * row + 4)  # output, log-sum-exp, three gradients
        assert kept <= peak <= kept + 2**24


# Dropout


@pytest.mark.parametrize("rule", ["sliding", "chunk"])
def test_gradcheck_with_dropout_replays_the_same_mask(rule: window.Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiles.TILE_SCORES, "cpu", 400)
    inputs, mask = make_inputs(2, 2, 21, width=2), make_mask("scattered", 2, 21)

    def attend(*inputs: Tensor) -> Tensor:
        torch.manual_seed(5)
        return local_attention(*inputs, rule=rule, chunk_length=4, attention_mask=mask, dropout=0.4)

    assert torch.autograd.gradcheck(attend, inputs)


def test_dropout_consumes_the_default_generator_and_never_reseeds_it() -> None:
    inputs = make_inputs(1, 1, 30)

    def draw(dropout: float) -> Tensor:
        return local_attention(*inputs, chunk_length=8, dropout=dropout)

    torch.manual_seed(3)
    first, second, after = draw(0.5), draw(0.5), torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(draw(0.5), first)
    assert not torch.equal(first, second)
    assert torch.equal(draw(0.5), second)
    second.sum().backward()
    assert torch.equal(torch.rand(1), after), "backward must draw nothing"
    state = torch.get_rng_state()
    draw(0.0)
    assert torch.equal(torch.get_rng_state(), state), "no dropout, no draw"


def test_dropout_drops_the_stated_share_and_keeps_the_mean() -> None:
    length, dropout = 400, 0.3
    q, k = (torch.randn(1, 1, length, 4, generator=torch.Generator().manual_seed(4)) for _ in range(2))
    identity = torch.eye(length)[None, None]
    wide = F.pad(torch.stack((q, k)), (0, length - 4))  # values of width T show the weights themselves
    torch.manual_seed(0)
    options: dict[str, Any] = {"chunk_length": 64}
    exact = local_attention(wide[0], wide[1], identity, **options)
    dropped = local_attention(wide[0], wide[1], identity, **options, dropout=dropout)
    visible = exact > 0
    share = (dropped[visible] == 0).double().mean().item()
    assert abs(share - dropout) < 4 * math.sqrt(dropout * (1 - dropout) / int(visible.sum()))
    kept = dropped > 0
    torch.testing.assert_close(dropped[kept], exact[kept] / (1 - dropout), rtol=1e-5, atol=1e-6)
    assert torch.equal(local_attention(wide[0], wide[1], identity, **options, dropout=1.0), torch.zeros_like(exact))


# Parity with transformers


def transformers_layer(causal: bool, chunk_length: int, before: int, after: int) -> LocalSelfAttention:
    config = ReformerConfig(
        attn_layers=["local"],
        hidden_size=24,
        num_attention_heads=3,
        attention_head_size=8,
        axial_pos_embds_dim=(12, 12),
        local_attn_chunk_length=chunk_length,
        local_num_chunks_before=before,
        local_num_chunks_after=after,
        is_decoder=causal,
    )
    torch.manual_seed(0)
    return LocalSelfAttention(config).double().eval()


def compare_with_transformers(
    length: int, causal: bool, before: int, after: int, mask: Tensor | None = None, chunk_length: int = 16
) -> tuple[Tensor, Tensor]:
    layer = transformers_layer(causal, chunk_length, before, after)
    hidden = torch.randn(2, length, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    heads = [
        projection(hidden).unflatten(-1, (3, 8)).transpose(1, 2) for projection in (layer.query, layer.key, layer.value)
    ]
    ours = local_attention(
        *heads,
        rule="chunk",
        chunk_length=chunk_length,
        chunks_before=before,
        chunks_after=after,
        causal=causal,
        attention_mask=mask,
    )
    return ours.transpose(1, 2).flatten(2), layer(hidden, attention_mask=mask).hidden_states


@pytest.mark.parametrize(("length", "before"), [(16, 1), (32, 1), (128, 1), (128, 3), (128, 0), (9, 1)])
def test_chunk_rule_equals_transformers_when_causal(length: int, before: int) -> None:
    ours, theirs = compare_with_transformers(length, True, before, 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_chunk_rule_equals_transformers_with_right_padding() -> None:
    mask = torch.ones(2, 96, dtype=torch.bool)
    mask[1, 53:] = False
    ours, theirs = compare_with_transformers(96, True, 1, 0, mask)
    torch.testing.assert_close(ours[mask], theirs[mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (1, 0), (0, 0)])
def test_chunk_rule_equals_transformers_bidirectionally_apart_from_its_wrap(before: int, after: int) -> None:
    length, chunk_length = 128, 16
    ours, theirs = compare_with_transformers(length, False, before, after)
    inner = slice(before * chunk_length, length - after * chunk_length)
    torch.testing.assert_close(ours[:, inner], theirs[:, inner], rtol=1e-5, atol=1e-5)
    if before or after:
        assert not torch.allclose(ours, theirs, atol=1e-3), "transformers wraps round, this operator does not"


# Autograd machinery, compile, export


def test_saved_tensor_hooks_hold_inputs_output_and_log_sum_exp_only() -> None:
    inputs, mask = make_inputs(2, 2, 90), make_mask("right", 2, 90)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        kept.append(tensor.clone())
        return len(kept) - 1

    def attend() -> Tensor:
        torch.manual_seed(0)
        return local_attention(*inputs, chunk_length=16, attention_mask=mask, dropout=0.2)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: kept[index]):
        out = attend()
    assert_same(output_and_gradients(out, inputs), output_and_gradients(attend(), inputs), 1e-12)
    assert (
        sum(tensor.numel() for tensor in kept if tensor.is_floating_point())
        <= 4 * out.numel() + 2 * 2 * 90 + out.numel()
    )


def test_second_derivatives_are_refused_and_a_retained_graph_is_exact() -> None:
    inputs = make_inputs(1, 1, 20)
    out = local_attention(*inputs, chunk_length=4)
    first, second = (torch.autograd.grad(out.sum(), inputs[0], retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(gradient.square().sum(), inputs[0])


def test_compiles_as_one_graph_with_equal_gradients_and_dropout() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
        return local_attention(q * 2.0, k, v, chunk_length=16, attention_mask=mask, dropout=dropout) + 1.0

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for length, dropout in ((70, 0.0), (90, 0.0), (90, 0.3)):
        inputs, mask = make_inputs(2, 2, length), make_mask("right", 2, length)
        assert mask is not None
        results = []
        for fn in (compiled, attend):
            torch.manual_seed(1)
            results.append(output_and_gradients(fn(*inputs, mask, dropout), inputs))
        assert_same(*results, 1e-12)


def test_exports_with_a_dynamic_length() -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return local_attention(x, x, x, chunk_length=16).transpose(1, 2).flatten(2)

    x = make_inputs(2, 2, 50)[0].detach()
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(Attention(), (x,), dynamic_shapes=({2: length},))
    longer = make_inputs(2, 2, 77)[0].detach()
    assert torch.equal(program.module()(longer), Attention()(longer))


@pytest.mark.parametrize("padding", ["none", "right"])
def test_operators_pass_pytorch_own_consistency_checks(padding: str) -> None:
    inputs, mask = make_inputs(2, 2, 20, dtype=torch.float32), make_mask(padding, 2, 20)
    documents = None if padding == "none" else (torch.arange(20) >= 7).long().expand(2, 20).contiguous()
    settings_ = ("sliding", 4, 1, 0, True, 0.0)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    # The remaining check also differentiates the log-sum-exp, which exists for backward alone.
    forward, backward = torch.ops.hf_longmem.local_attention, torch.ops.hf_longmem.local_attention_backward
    torch.library.opcheck(forward, (*inputs, mask, documents, None, *settings_), test_utils=checks)
    with torch.no_grad():
        out, lse = forward(*inputs, mask, documents, None, *settings_)
    torch.library.opcheck(
        backward, (torch.ones_like(out), *inputs, out, lse, mask, documents, None, *settings_), test_utils=checks
    )


def test_merging_heads_of_the_output_is_a_view() -> None:
    out = local_attention(*make_inputs(2, 3, 40), chunk_length=8)
    assert out.transpose(1, 2).is_contiguous()


# What a caller can get wrong


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_BHTD": torch.zeros(2, 10, 4)}, r"one shape \[B, H, T, D\], got \(2, 10, 4\)"),
        ({"k_BHTD": torch.zeros(1, 1, 10, 4)}, r"one shape \[B, H, T, D\]"),
        (
            {"v_BHTD": torch.zeros(1, 2, 10, 4).half()},
            "one floating dtype, got torch.float32, torch.float32, torch.float16",
        ),
        ({"rule": "window"}, 'rule must be "sliding" or "chunk", got \'window\''),
        ({"chunk_length": 0}, "chunk_length must be at least 1, got 0"),
        ({"chunks_before": -1}, "must not be negative, got -1 and 0"),
        ({"dropout": 1.5}, r"dropout must lie in \[0, 1\], got 1.5"),
        ({"attention_mask": torch.ones(1, 10)}, "attention_mask must be bool, got torch.float32"),
        (
            {"attention_mask": torch.ones(1, 9, dtype=torch.bool)},
            r"attention_mask must have shape \[B, T\], got \(1, 9\)",
        ),
    ],
)
@pytest.mark.parametrize("attend", [local_attention, naive.local_attention])
def test_attention_refuses_what_does_not_fit(attend: Any, change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {name: torch.zeros(1, 2, 10, 4) for name in ("q_BHTD", "k_BHTD", "v_BHTD")}
    call["chunk_length"] = 4
    call.update(change)
    with pytest.raises(ValueError, match=message):
        attend(call.pop("q_BHTD"), call.pop("k_BHTD"), call.pop("v_BHTD"), **call)
