"""The long-term attention layer, against the naive operators."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_longmem.layers.continuous_attention import ContinuousAttention
from hf_longmem.ops.continuous import GaussianBasis, RegressionSpec, naive

E, H, D, N, L = 12, 3, 4, 16, 10
SPEC = RegressionSpec(GaussianBasis(N, (0.05, 0.1)), segment_length=L, num_samples=2 * N)


def layer_of(**options: Any) -> ContinuousAttention:
    torch.manual_seed(0)
    return ContinuousAttention(E, H, D, spec=SPEC, **options).double()


def written(layer: ContinuousAttention, segments: int, rows: int = 2) -> Any:
    memory = layer.empty(rows, torch.device("cpu"), torch.float64)
    generator = torch.Generator().manual_seed(1)
    for _ in range(segments):
        memory = layer.write(memory, torch.randn(rows, L, E, dtype=torch.float64, generator=generator))
    return memory


def read(layer: ContinuousAttention, x: Tensor, memory: Any, mask: Tensor | None = None) -> Any:
    return layer(x, layer.project(memory), memory, mask)


@pytest.mark.parametrize("segments", [1, 2, 5])
def test_reading_is_the_expectation_of_the_projected_signal(segments: int) -> None:
    layer = layer_of()
    memory = written(layer, segments)
    x = torch.randn(2, 7, E, dtype=torch.float64)
    out, _, divergence = read(layer, x, memory)
    heads = {"unflatten": (-1, (H, D))}

    def split(projected: Tensor) -> Tensor:
        return projected.unflatten(*heads["unflatten"]).transpose(1, 2)

    k, v = split(layer.k_proj(memory.coefficients_BNE)), split(layer.v_proj(memory.coefficients_BNE))
    scores = split(layer.q_proj(x)) @ k.mT / D**0.5
    mu = torch.sigmoid((scores * layer.density_heads[0]).sum(-1))
    variance = torch.nn.functional.softplus((scores * layer.density_heads[1]).sum(-1)).clamp(min=1e-4)
    weights = naive.expected_basis(mu, variance, SPEC.basis)
    expected = layer.o_proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    ratio = variance / 0.05**2
    torch.testing.assert_close(divergence, 0.5 * (ratio - ratio.log() - 1).mean(1))


class Wrapped(torch.nn.Module):
    """A projection that is no plain linear layer, such as one with an adapter."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        self.inner, self.in_features = inner, inner.in_features

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("tokens", [1, 4, 5, 30])
def test_queries_that_are_not_formed_read_what_formed_ones_do(tokens: int) -> None:
    x, found = torch.randn(2, tokens, E, dtype=torch.float64), []
    calls: list[int] = []
    for kind in ("plain", "wrapped", "hooked", "replaced forward"):
        layer = layer_of(sticky=True)
        memory, projection = written(layer, 3), layer.q_proj
        if kind == "wrapped":
            layer.q_proj = Wrapped(projection)
        elif kind == "hooked":
            projection.register_forward_hook(lambda *_: calls.append(1))
        elif kind == "replaced forward":
            inner = projection.forward
            projection.forward = lambda x, inner=inner: calls.append(2) or inner(x)
        given = x.clone().requires_grad_()
        out, recorded, divergence = read(layer, given, memory)
        (out.square().sum() + divergence.sum()).backward()
        found.append(
            (out, recorded.histogram_BK, divergence, given.grad, projection.weight.grad, layer.k_proj.weight.grad)
        )
    assert calls == [1, 2]
    for other in found[1:]:
        for ours, theirs in zip(other, found[0], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_an_empty_memory_reads_zeros_and_has_no_regulariser() -> None:
    layer = layer_of()
    memory = layer.empty(2, torch.device("cpu"), torch.float64)
    out, _, divergence = read(layer, torch.randn(2, 5, E, dtype=torch.float64), memory)
    assert not out.any()
    assert not divergence.any()


def test_zero_init_reads_zeros_from_a_full_memory() -> None:
    layer = layer_of(zero_init=True)
    out, *_ = read(layer, torch.randn(2, 5, E, dtype=torch.float64), written(layer, 3))
    assert not out.any()


def test_padding_queries_count_neither_for_the_regulariser_nor_for_sticky_memories() -> None:
    layer = layer_of(sticky=True)
    memory = written(layer, 2)
    x = torch.randn(2, 6, E, dtype=torch.float64)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 4:] = False
    _, recorded, divergence = read(layer, x, memory, mask)
    other = x.clone()
    other[0, 4:] += 5
    _, recorded_again, divergence_again = read(layer, other, memory, mask)
    torch.testing.assert_close(recorded.histogram_BK, recorded_again.histogram_BK)
    torch.testing.assert_close(divergence, divergence_again)
    assert divergence.ne(0).sum() == 10


SETTINGS = [
    dict(zip(("decay", "sticky", "gate"), values, strict=True))
    for values in itertools.product((0.5, "uniform"), (False, True), (False, True))
]


@pytest.mark.parametrize("options", SETTINGS)
def test_every_parameter_gets_a_gradient_once_something_is_written(options: dict[str, Any]) -> None:
    layer = layer_of(**options)
    memory = written(layer, 3)
    read(layer, torch.randn(2, 5, E, dtype=torch.float64), memory)[0].square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("options", SETTINGS)
def test_rows_that_do_not_write_keep_their_memory_bit_for_bit(options: dict[str, Any]) -> None:
    layer = layer_of(**options)
    memory = written(layer, 2)
    after = layer.write(memory, torch.randn(2, L, E, dtype=torch.float64), torch.tensor([True, False]))
    for new, old in zip(after, memory, strict=True):
        assert torch.equal(new[1], old[1])
    assert after.segments_B.tolist() == [3, 2]
