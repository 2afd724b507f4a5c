"""Chunked application and the chunked loss against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_longmem.ops.chunking import apply_in_chunks, chunked_linear_cross_entropy

LENGTHS = (1, 2, 63, 64, 65, 257, 1000)


def make_problem(
    length: int, vocab: int = 11, width: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(length, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.randn(vocab, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(0, vocab, (length,), generator=generator)
    return hidden, weight, bias, labels


def plain_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, **options: float) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias).flatten(0, -2), labels.flatten(), **options)


def loss_and_gradients(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, tensors)]


def assert_all_close(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def allocation_peak(fn: Callable[[], object]) -> int:
    """Most bytes that the allocator held above the start while ``fn`` ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fn()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


# apply_in_chunks


@settings(deadline=None, max_examples=25)
@given(
    length=st.sampled_from((0, *LENGTHS)), chunk=st.sampled_from((0, 1, 7, 64, 2000)), dim=st.sampled_from((0, 1, -2))
)
def test_apply_in_chunks_equals_one_call(length: int, chunk: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(length)
    shape = [length if axis == dim % 3 else 2 for axis in range(3)]
    first, second = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    weight = torch.randn(shape[-1], 3, generator=generator, dtype=torch.float64).requires_grad_()

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x * y) @ weight

    chunked, whole = apply_in_chunks(fn, chunk, dim, first, second), fn(first, second)
    torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-12)
    probe = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
    inputs = (first, second, weight)
    got = torch.autograd.grad((chunked * probe).sum(), inputs)
    expected = torch.autograd.grad((whole * probe).sum(), inputs)
    assert_all_close(list(got), list(expected), 1e-10)


def test_apply_in_chunks_calls_with_at_most_chunk_size_positions() -> None:
    sizes = []

    def fn(x: Tensor) -> Tensor:
        sizes.append(x.size(1))
        return x

    apply_in_chunks(fn, 4, 1, torch.zeros(2, 10))
    assert sizes == [4, 4, 2]


def test_apply_in_chunks_refuses_what_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match=r"chunk_size must be 0 .* got -1"):
        apply_in_chunks(torch.neg, -1, 0, torch.zeros(3))
    with pytest.raises(ValueError, match="at least one tensor"):
        apply_in_chunks(torch.neg, 1, 0)
    with pytest.raises(ValueError, match=r"one size along dim 0, got \[3, 4\]"):
        apply_in_chunks(torch.add, 1, 0, torch.zeros(3), torch.zeros(4))


# chunked_linear_cross_entropy: numbers


@settings(deadline=None, max_examples=40)
@given(
    length=st.sampled_from(LENGTHS),
    chunk=st.sampled_from((0, 1, 64, 1024)),
    with_bias=st.booleans(),
    smoothing=st.sampled_from((0.0, 0.1, 1.0)),
    ignored=st.sampled_from((0.0, 0.3, 0.9)),
    ignore_index=st.sampled_from((-100, 3)),
)
def test_loss_and_gradients_equal_plain_cross_entropy_in_float64(
    length: int, chunk: int, with_bias: bool, smoothing: float, ignored: float, ignore_index: int
) -> None:
    hidden, weight, bias, labels = make_problem(length)
    drop = torch.rand(length, generator=torch.Generator().manual_seed(1)) < ignored
    drop[0] = False
    labels = labels.masked_fill(drop, ignore_index)
    labels[0] = 5
    head_bias = bias if with_bias else None
    inputs = (hidden, weight, bias) if with_bias else (hidden, weight)
    got = chunked_linear_cross_entropy(
        hidden, weight, head_bias, labels, chunk_size=chunk, ignore_index=ignore_index, label_smoothing=smoothing
    )
    expected = plain_loss(hidden, weight, head_bias, labels, ignore_index=ignore_index, label_smoothing=smoothing)
    assert_all_close(loss_and_gradients(got, *inputs), loss_and_gradients(expected, *inputs), 1e-10)


def test_loss_equals_plain_cross_entropy_in_float32_and_for_huge_logits() -> None:
    hidden, weight, bias, labels = make_problem(257, dtype=torch.float32)
    for scale in (1.0, 1e4):
        big = (hidden.detach() * scale).requires_grad_()
        inputs = (big, weight, bias)
        got = loss_and_gradients(chunked_linear_cross_entropy(*inputs, labels, chunk_size=64), *inputs)
        expected = loss_and_gradients(plain_loss(*inputs, labels), *inputs)
        assert_all_close(got, expected, 1e-5)


def test_batched_hidden_equals_flat_hidden_and_int32_labels_are_accepted() -> None:
    hidden, weight, bias, labels = make_problem(24)
    flat = chunked_linear_cross_entropy(hidden, weight, bias, labels, chunk_size=5)
    batched = chunked_linear_cross_entropy(hidden.view(2, 12, -1), weight, bias, labels.view(2, 12).int(), chunk_size=5)
    assert torch.equal(flat, batched)


def test_no_label_of_an_unsigned_type_is_taken_for_the_ignored_one() -> None:
    hidden, weight = torch.randn(3, 4), torch.randn(200, 4)
    labels = torch.tensor([156, 3, 7], dtype=torch.uint8)  # 156 = -100 mod 256
    expected = F.cross_entropy(hidden @ weight.T, labels.long())
    torch.testing.assert_close(chunked_linear_cross_entropy(hidden, weight, None, labels), expected)


def test_gradcheck_of_loss_scaled_by_the_caller() -> None:
    hidden, weight, bias, labels = make_problem(7)
    labels[2] = -100

    def scaled(*inputs: Tensor) -> Tensor:
        return chunked_linear_cross_entropy(*inputs, labels, chunk_size=3, num_items=5, label_smoothing=0.2) * 3.7

    assert torch.autograd.gradcheck(scaled, (hidden, weight, bias))


@pytest.mark.parametrize("num_items", [13, torch.tensor(13), torch.tensor([13]), torch.tensor(13.0)])
def test_num_items_divides_the_sum(num_items: Tensor | int) -> None:
    hidden, weight, bias, labels = make_problem(20)
    labels[:4] = -100
    inputs = (hidden, weight, bias)
    got = chunked_linear_cross_entropy(*inputs, labels, chunk_size=6, num_items=num_items)
    expected = plain_loss(*inputs, labels, reduction="sum") / 13
    assert_all_close(loss_and_gradients(got, *inputs), loss_and_gradients(expected, *inputs), 1e-12)


@pytest.mark.parametrize("num_items", [None, 0, 7])
@pytest.mark.parametrize("length", [0, 9])
def test_nothing_to_count_gives_zero_loss_and_zero_gradients(length: int, num_items: int | None) -> None:
    hidden, weight, bias, labels = make_problem(length)
    inputs = (hidden, weight, bias)
    loss = chunked_linear_cross_entropy(*inputs, torch.full_like(labels, -100), num_items=num_items)
    for tensor in loss_and_gradients(loss, *inputs):
        assert torch.equal(tensor, torch.zeros_like(tensor))


@pytest.mark.parametrize("trained", [(True, False, False), (False, True, False), (False, False, True)])
def test_frozen_inputs_get_no_gradient_and_the_rest_is_exact(trained: tuple[bool, ...]) -> None:
    tensors = [tensor.detach() for tensor in make_problem(30)[:3]]
    labels = make_problem(30)[3]
    for tensor, train in zip(tensors, trained, strict=True):
        tensor.requires_grad_(train)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    got = chunked_linear_cross_entropy(*tensors, labels, chunk_size=8)
    assert_all_close(loss_and_gradients(got, *leaves), loss_and_gradients(plain_loss(*tensors, labels), *leaves), 1e-12)
    with torch.no_grad():
        assert not chunked_linear_cross_entropy(*tensors, labels).requires_grad


def test_tied_weight_collects_both_gradients() -> None:
    _, weight, _, labels = make_problem(40)
    ids = labels.roll(1)
    got = chunked_linear_cross_entropy(torch.tanh(F.embedding(ids, weight)), weight, None, labels, chunk_size=16)
    expected = plain_loss(torch.tanh(F.embedding(ids, weight)), weight, None, labels)
    assert_all_close(loss_and_gradients(got, weight), loss_and_gradients(expected, weight), 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_autocast_keeps_float32_results_near_the_exact_ones(dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, bias, labels = make_problem(300, vocab=70, dtype=torch.float32)
    inputs = (hidden, weight, bias)
    with torch.autocast("cpu", dtype=dtype):
        loss = chunked_linear_cross_entropy(*inputs, labels, chunk_size=64)
    got = loss_and_gradients(loss, *inputs)
    assert [tensor.dtype for tensor in got] == [torch.float32] * 4
    for one, other in zip(got, loss_and_gradients(plain_loss(*inputs, labels), *inputs), strict=True):
        assert (one - other).norm() <= tolerance * other.norm()
    exact = chunked_linear_cross_entropy(*inputs, labels, chunk_size=64)
    assert not torch.equal(got[0], exact), "autocast must have had an effect"


def test_half_precision_inputs_give_half_gradients_and_a_float32_loss() -> None:
    hidden, weight, bias, labels = (
        tensor.detach().bfloat16().requires_grad_() if tensor.is_floating_point() else tensor
        for tensor in make_problem(300, vocab=70)
    )
    got = loss_and_gradients(
        chunked_linear_cross_entropy(hidden, weight, bias, labels, chunk_size=50), hidden, weight, bias
    )
    assert [tensor.dtype for tensor in got] == [torch.float32, *[torch.bfloat16] * 3]
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    for one, other in zip(got, loss_and_gradients(plain_loss(*exact, labels), *exact), strict=True):
        assert (one - other).norm() <= 2e-2 * other.norm()


def test_float16_gradients_of_a_loss_divided_by_millions_survive_with_a_loss_scale() -> None:
    hidden, weight, bias, labels = make_problem(64, vocab=70, dtype=torch.float32)
    items, loss_scale = 2**22, 2.0**16
    half = hidden.detach().half().requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = chunked_linear_cross_entropy(half, weight, bias, labels, num_items=items)
    got = torch.autograd.grad(loss * loss_scale, half)[0].float()
    plain = plain_loss(hidden, weight, bias, labels, reduction="sum") / items * loss_scale
    expected = torch.autograd.grad(plain, hidden)[0]
    assert (got - expected).norm() <= 2e-3 * expected.norm()


# chunked_linear_cross_entropy: memory


def test_peak_memory_stays_below_the_logits() -> None:
    length, vocab, width = 2048, 50257, 8
    hidden, weight, bias, labels = make_problem(length, vocab, width, dtype=torch.float32)
    logits_bytes = length * vocab * 4
    chunk_bytes = 256 * vocab * 4
    peaks = {}
    for chunk_size in (256, 1024):
        peaks[chunk_size] = allocation_peak(
            lambda size=chunk_size: torch.autograd.grad(
                chunked_linear_cross_entropy(hidden, weight, bias, labels, chunk_size=size), (hidden, weight, bias)
            )
        )
    assert peaks[1024] < 0.6 * logits_bytes
    assert peaks[256] < 1.2 * chunk_bytes
    short = slice(0, 512)
    plain = allocation_peak(lambda: plain_loss(hidden[short], weight, bias, labels[short]).backward())
    assert plain > logits_bytes / 4, "the measurement must see what the plain loss allocates"


# chunked_linear_cross_entropy: autograd machinery, compile, export


def test_saved_tensor_hooks_see_and_may_replace_what_backward_uses() -> None:
    hidden, weight, bias, labels = make_problem(20)
    inputs = (hidden, weight, bias)
    packed = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: packed[index]):
        loss = chunked_linear_cross_entropy(*inputs, labels, chunk_size=6)
    got = loss_and_gradients(loss, *inputs)
    assert len(packed) >= 3
    assert_all_close(got, loss_and_gradients(plain_loss(*inputs, labels), *inputs), 1e-12)


def test_backward_twice_over_a_retained_graph_is_exact_and_second_derivatives_are_refused() -> None:
    hidden, weight, bias, labels = make_problem(20)
    loss = chunked_linear_cross_entropy(hidden, weight, bias, labels, chunk_size=6)
    first, second = (torch.autograd.grad(loss * 2.0, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(gradient.square().sum(), hidden)


def test_compiles_as_one_graph_with_equal_gradients() -> None:
    hidden, weight, bias, labels = make_problem(40)
    labels[:9] = -100
    inputs = (hidden, weight, bias)

    def scaled(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        return chunked_linear_cross_entropy(hidden * 2.0, weight, bias, labels, chunk_size=7, label_smoothing=0.1) * 0.5

    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (40, 33):
        cut = (hidden[:length], weight, bias, labels[:length])
        assert_all_close(loss_and_gradients(compiled(*cut), *inputs), loss_and_gradients(scaled(*cut), *inputs), 1e-12)


def test_exports_for_inference() -> None:
    class Scorer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(5, 11)

        def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
            return chunked_linear_cross_entropy(hidden, self.head.weight, self.head.bias, labels)

    hidden, _, _, labels = make_problem(12, dtype=torch.float32)
    scorer = Scorer().eval()
    with torch.no_grad():
        program = torch.export.export(scorer, (hidden.detach(), labels))
        assert torch.equal(program.module()(hidden.detach(), labels), scorer(hidden, labels))


def test_operator_passes_pytorch_own_consistency_checks() -> None:
    hidden, weight, bias, labels = make_problem(9, dtype=torch.float32)
    operator = torch.ops.hf_longmem.summed_linear_cross_entropy
    arguments = (hidden, weight, bias, labels, 4, -100, 0.1, torch.float32, True, True, True)
    # The remaining check differentiates every output; all but the sum exist for backward alone and refuse it.
    torch.library.opcheck(
        operator, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


# chunked_linear_cross_entropy: what a caller can get wrong


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hidden": torch.zeros(4, 6)},
            r"hidden must be \[..., T, E\] and weight \[V, E\], got \(4, 6\) and \(11, 5\)",
        ),
        ({"hidden": torch.zeros(5)}, "hidden must be"),
        ({"bias": torch.zeros(5)}, r"bias must have shape \(11,\), got \(5,\)"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, "labels must have hidden's shape"),
        ({"labels": torch.zeros(4)}, "labels must be integers, got torch.float32"),
        ({"labels": torch.tensor([0, 1, 11, 2])}, r"ignore_index \(-100\) or lie in \[0, 11\), got 11"),
        ({"labels": torch.tensor([0, 1, -1, 2])}, "got -1"),
        ({"weight": torch.zeros(11, 5, dtype=torch.float64)}, "share a dtype, got torch.float32 and torch.float64"),
        ({"chunk_size": -1}, "chunk_size must be 0 .* got -1"),
        ({"label_smoothing": 1.5}, r"label_smoothing must lie in \[0, 1\], got 1.5"),
        ({"num_items": torch.tensor([1, 2])}, "num_items must be one number"),
    ],
)
def test_loss_refuses_what_does_not_fit(change: dict[str, object], message: str) -> None:
    call: dict[str, object] = {
        "hidden": torch.zeros(4, 5),
        "weight": torch.zeros(11, 5),
        "bias": None,
        "labels": torch.zeros(4, dtype=torch.long),
    }
    with pytest.raises(ValueError, match=message):
        chunked_linear_cross_entropy(**{**call, **change})  # type: ignore[arg-type]
