from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hf_longmem.ops.continuous import (
    GaussianBasis,
    basis_parameters,
    expected_basis,
    gaussian_kl,
    naive,
    read_density,
    read_density_of_inputs,
    read_memory,
    read_values,
    summarise_coefficients,
)

BASIS = GaussianBasis(9, (0.05, 0.1))


def inputs(seed: int = 0, dtype: torch.dtype = torch.float64, tokens: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()

    return {
        "q": draw(2, 3, tokens, 4),
        "coefficients": draw(2, 9, 6),
        "heads": draw(2, 9),
        "key_weight": draw(12, 6),
        "value_weight": draw(12, 6),
    }


def fast(data: dict[str, Tensor], floor: float) -> tuple[Tensor, Tensor, Tensor]:
    coefficients = data["coefficients"]
    keys = (summarise_coefficients(coefficients, data["heads"]) @ data["key_weight"].T).unflatten(-1, (3, 4))
    values = (coefficients @ data["value_weight"].T).unflatten(-1, (3, 4))
    return read_memory(data["q"], keys.transpose(1, 2), values.transpose(1, 2), BASIS, variance_floor=floor)


def slow(data: dict[str, Tensor], floor: float) -> tuple[Tensor, Tensor, Tensor]:
    keys = (data["coefficients"] @ data["key_weight"].T).unflatten(-1, (3, 4)).transpose(1, 2)
    values = (data["coefficients"] @ data["value_weight"].T).unflatten(-1, (3, 4)).transpose(1, 2)
    return naive.read_memory(data["q"], keys, values, data["heads"], BASIS, variance_floor=floor)


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("floor", [1e-6, 1e-2])
def test_reading_is_the_integral_over_every_score(tokens: int, floor: float) -> None:
    data = inputs(tokens=tokens)
    for ours, wanted in zip(fast(data, floor), slow(data, floor), strict=True):
        assert (ours - wanted).abs().max() < 1e-9


@pytest.mark.parametrize("floor", [1e-6, 1e-2])
def test_gradients_of_reading_equal_those_of_the_naive_twin(floor: float) -> None:
    data = inputs(1)
    with torch.no_grad():  # narrow densities, where digits are easily lost
        data["heads"][1] *= 5
    names = list(data)
    ours = torch.autograd.grad(fast(data, floor)[0].square().sum(), [data[name] for name in names])
    wanted = torch.autograd.grad(slow(data, floor)[0].square().sum(), [data[name] for name in names])
    for name, mine, theirs in zip(names, ours, wanted, strict=True):
        assert (mine - theirs).abs().max() < 1e-9 * theirs.abs().max(), name
    single = {name: value.detach().float().requires_grad_() for name, value in data.items()}
    in_float32 = torch.autograd.grad(fast(single, floor)[0].square().sum(), list(single.values()))
    for name, mine, theirs in zip(names, in_float32, wanted, strict=True):
        assert (mine - theirs).norm() < 1e-5 * theirs.norm(), name


@pytest.mark.parametrize("basis", [BASIS, GaussianBasis(9, (0.2,)), GaussianBasis(9, (0.01, 0.05, 0.1))])
def test_values_are_averaged_under_the_expected_basis(basis: GaussianBasis) -> None:
    """With as many centres for every width, and with one more for some."""
    mu, variance = torch.rand(2, 3, 65).double(), torch.rand(2, 3, 65).double() * 0.1
    values = torch.randn(2, 3, 9, 4).double()
    wanted = expected_basis(mu, variance, *basis_parameters(basis, dtype=torch.float64)) @ values
    assert (read_values(mu, variance, values, basis) - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("basis", [BASIS, GaussianBasis(8, (0.05, 0.1))])
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, True), (False, False, True)])
def test_gradients_and_their_gradients_are_those_of_the_formula(basis: GaussianBasis, needs: tuple[bool, ...]) -> None:
    shapes = ((1, 2, 3), (1, 2, 3), (1, 2, basis.num_basis, 2))
    given = [
        torch.rand(shape, dtype=torch.float64, requires_grad=needed)
        for shape, needed in zip(shapes, needs, strict=True)
    ]

    def average(mu: Tensor, variance: Tensor, values: Tensor) -> Tensor:
        return read_values(mu, variance * 0.01 + 1e-3, values, basis)

    assert torch.autograd.gradcheck(average, given)
    assert torch.autograd.gradgradcheck(average, given)


@pytest.mark.parametrize("tokens", [20, 700, 1900])
@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("basis", [GaussianBasis(300, (0.01, 0.05)), GaussianBasis(301, (0.01, 0.05, 0.2))])
def test_tiles_of_queries_join_without_a_seam(basis: GaussianBasis, needs_gradient: bool, tokens: int) -> None:
    """At 20 queries one tile takes all heads, at 700 two or three of them, at 1,900 a part of one or a whole one."""
    given = [torch.rand(1, 5, tokens, dtype=torch.float64), torch.rand(1, 5, tokens, dtype=torch.float64) * 0.01]
    given = [part.requires_grad_(needs_gradient) for part in (*given, torch.randn(1, 5, basis.num_basis, 4).double())]
    ours = read_values(*given, basis)
    wanted = expected_basis(*given[:2], *basis_parameters(basis, dtype=torch.float64)) @ given[2]
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)
    if needs_gradient:
        weight = torch.randn_like(wanted)
        for mine, theirs in zip(
            torch.autograd.grad((ours * weight).sum(), given),
            torch.autograd.grad((wanted * weight).sum(), given),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_gradients_are_the_same_with_a_graph_where_one_argument_was_made_of_another() -> None:
    v = torch.randn(1, 1, 9, 4, dtype=torch.float64)
    p = torch.rand(1, 1, 5, dtype=torch.float64, requires_grad=True)
    plain, with_graph = (
        torch.autograd.grad(read_values(p, p.square() + 0.01, v, BASIS).sum(), p, create_graph=graph)[0]
        for graph in (False, True)
    )
    assert (plain - with_graph).abs().max() < 1e-12


def test_values_that_heads_and_rows_share_get_the_sum_of_their_gradients() -> None:
    mu, variance = torch.rand(2, 3, 7, dtype=torch.float64), torch.full((2, 3, 7), 0.01, dtype=torch.float64)
    values = torch.randn(1, 1, 9, 4, dtype=torch.float64, requires_grad=True)
    ours = read_values(mu, variance, values, BASIS)
    wanted = expected_basis(mu, variance, *basis_parameters(BASIS, dtype=torch.float64)) @ values
    torch.testing.assert_close(ours, wanted)
    gradients = [torch.autograd.grad(out.square().sum(), values)[0] for out in (ours, wanted)]
    torch.testing.assert_close(*gradients)


def test_queries_need_not_be_formed() -> None:
    x, weight = torch.randn(2, 6, 8, dtype=torch.float64), torch.randn(3, 4, 8, dtype=torch.float64)
    keys = torch.randn(2, 3, 2, 4, dtype=torch.float64)
    queries = torch.einsum("bte,hde->bhtd", x, weight)
    for ours, wanted in zip(read_density_of_inputs(x, weight, keys), read_density(queries, keys), strict=True):
        torch.testing.assert_close(ours, wanted)
    with pytest.raises(ValueError, match="variance_floor must not be negative, got -1"):
        read_density_of_inputs(x, weight, keys, variance_floor=-1)


def test_reading_holds_no_table_of_queries_and_basis_functions() -> None:
    """Not for backward either, and what it works in does not grow with the queries."""
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            largest.extend(part.numel() for part in pytree.tree_leaves(out) if isinstance(part, Tensor))
            return out

    values = torch.randn(1, 2, 512, 4, requires_grad=True)
    for tokens in (1100, 2200):
        mu = torch.rand(1, 2, tokens, requires_grad=True)
        largest.clear()
        with Watch():
            read_values(mu, torch.full_like(mu, 0.01), values, GaussianBasis(512, (0.01, 0.05))).sum().backward()
        assert max(largest) <= 2 * 2**18


@pytest.mark.parametrize("variance", [1e-6, 1e-4, 1e-2])
def test_no_number_in_a_read_is_subnormal(variance: float) -> None:
    """A product with one takes up to a hundred times as long."""
    seen: list[float] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            fresh = not any(word in str(func) for word in ("empty", "view", "slice", "select", "expand", "alias"))
            if fresh and isinstance(out, Tensor) and out.is_floating_point():
                size = out.abs()
                seen.append(((size > 0) & (size < torch.finfo(out.dtype).tiny)).sum().item())
            return out

    mu, values = torch.rand(1, 1, 50, requires_grad=True), torch.randn(1, 1, 64, 4, requires_grad=True)
    with Watch():
        context = read_values(mu, torch.full_like(mu, variance), values, GaussianBasis(64, (0.01, 0.05)))
        context.backward(torch.full_like(context, 1e-9))
    assert len(seen) > 20
    assert not any(seen)


def test_a_read_compiles_into_one_graph_with_its_gradient() -> None:
    def loss(mu: Tensor, values: Tensor) -> Tensor:
        return read_values(mu, torch.full_like(mu, 0.01), values, BASIS).square().sum()

    given = (torch.rand(1, 2, 5, requires_grad=True), torch.randn(1, 2, 9, 4, requires_grad=True))
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for ours, wanted in zip(
        torch.autograd.grad(compiled(*given), given), torch.autograd.grad(loss(*given), given), strict=True
    ):
        torch.testing.assert_close(ours, wanted)


def test_bfloat16_queries_are_placed_in_float32() -> None:
    data = {name: value.detach().bfloat16() for name, value in inputs(2).items()}
    keys = torch.randn(2, 3, 2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mu, variance = read_density(data["q"], keys)
    wanted, _ = read_density(data["q"].float(), keys)
    assert mu.dtype == variance.dtype == torch.float32
    assert torch.equal(mu, wanted)
    values = torch.randn(2, 3, 9, 4).bfloat16()
    context = read_memory(data["q"], keys, values, BASIS).context_BHTD
    exact = read_memory(data["q"].float(), keys, values.float(), BASIS).context_BHTD
    assert context.dtype == torch.bfloat16
    # Rounding r and the context to bfloat16, 2^-9 each, over sums of magnitude |r| |V|.
    assert (context.float() - exact).abs().max() < 3 * 2**-9 * exact.abs().max()


def test_rows_that_hold_nothing_read_exact_zeros() -> None:
    data = inputs(3)
    keys, values = torch.randn(2, 3, 2, 4).double(), torch.randn(2, 3, 9, 4).double()
    everything = read_memory(data["q"], keys, values, BASIS).context_BHTD
    written = torch.tensor([False, True])
    context = read_memory(data["q"], keys, values, BASIS, written_B=written).context_BHTD
    assert torch.equal(context[0], torch.zeros_like(context[0]))
    assert torch.equal(context[1], everything[1])


def test_kl_is_the_divergence_of_two_gaussians() -> None:
    mu, std = torch.rand(20, dtype=torch.float64), torch.rand(20, dtype=torch.float64) + 0.01
    prior_std = torch.tensor(0.05, dtype=torch.float64)
    wanted = kl_divergence(Normal(mu, std), Normal(torch.full_like(mu, 0.5), prior_std))
    assert torch.allclose(gaussian_kl(std.square(), 0.05, mu=mu, prior_mu=0.5), wanted, rtol=1e-12)
    centred = kl_divergence(Normal(mu, std), Normal(mu, prior_std))
    assert torch.allclose(gaussian_kl(std.square(), 0.05), centred, rtol=1e-9, atol=1e-12)


def test_impossible_readings_are_named() -> None:
    q, keys, values = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2, 4), torch.randn(1, 1, 8, 4)
    with pytest.raises(ValueError, match="one row for each of the 9 basis functions, got 8"):
        read_memory(q, keys, values, BASIS)
    with pytest.raises(ValueError, match="variance_floor must not be negative, got -1"):
        read_density(q, keys, variance_floor=-1)
    with pytest.raises(ValueError, match="prior_std must be positive and finite, got 0"):
        gaussian_kl(torch.ones(1), 0)
    with pytest.raises(ValueError, match="go together"):
        gaussian_kl(torch.ones(1), 0.05, mu=torch.ones(1))
