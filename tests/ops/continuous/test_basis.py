from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_longmem.ops.continuous import GaussianBasis, basis_parameters, evaluate_basis, expected_basis, naive

FEW = settings(max_examples=12, deadline=None)
BASES = [GaussianBasis(1, (0.1,)), GaussianBasis(7, (0.05, 0.1)), GaussianBasis(16, (0.01, 0.05, 0.2))]


@FEW
@given(num_basis=st.integers(1, 40), widths=st.lists(st.floats(1e-3, 0.5), min_size=1, max_size=4))
def test_any_number_of_functions_covers_the_line(num_basis: int, widths: list[float]) -> None:
    if num_basis < len(widths):
        with pytest.raises(ValueError, match="one for each width"):
            GaussianBasis(num_basis, tuple(widths))
        return
    basis = GaussianBasis(num_basis, tuple(widths))
    for k in range(len(widths)):
        same_width = basis.centres[k :: len(widths)]
        assert same_width == (0.5,) or (same_width[0] == 0 and same_width[-1] == 1)
        gaps = torch.tensor(same_width, dtype=torch.float64).diff()
        assert torch.allclose(gaps, gaps.mean().expand_as(gaps)) if len(gaps) else True


def test_a_list_of_widths_is_the_same_basis_as_a_tuple() -> None:
    assert hash(GaussianBasis(4, [0.1, 0.2])) == hash(GaussianBasis(4, (0.1, 0.2)))  # type: ignore[arg-type]


@pytest.mark.parametrize("widths", [(), (0.0,), (-0.1, 0.1), (float("nan"),), (float("inf"),)])
def test_impossible_widths_are_named(widths: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="width"):
        GaussianBasis(8, widths)


@pytest.mark.parametrize("num_basis", [0, -2, 1, 2.0])
def test_impossible_numbers_of_functions_are_named(num_basis: int) -> None:
    with pytest.raises(ValueError, match=r"num_basis must be a whole number of at least 2.*, got"):
        GaussianBasis(num_basis, (0.1, 0.2))


@pytest.mark.parametrize("basis", BASES)
def test_basis_functions_are_densities(basis: GaussianBasis) -> None:
    t = torch.linspace(-4, 5, 20001, dtype=torch.float64)
    psi = evaluate_basis(t, *basis_parameters(basis, dtype=torch.float64))
    assert torch.allclose(psi.sum(dim=0) * (t[1] - t[0]), torch.ones(basis.num_basis, dtype=torch.float64), atol=1e-9)
    assert (psi - naive.evaluate_basis(t, basis)).abs().max() < 1e-12


def test_the_basis_can_be_differentiated_in_the_positions() -> None:
    t = torch.rand(5, dtype=torch.float64, requires_grad=True)
    parameters = basis_parameters(BASES[1], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda t: evaluate_basis(t, *parameters), t)
    assert torch.autograd.gradgradcheck(lambda t: evaluate_basis(t, *parameters), t)


@FEW
@given(mu=st.floats(0, 1), sigma=st.floats(1e-3, 0.7), which=st.sampled_from(BASES))
def test_closed_form_is_the_integral(mu: float, sigma: float, which: GaussianBasis) -> None:
    mean, variance = torch.tensor([mu], dtype=torch.float64), torch.tensor([sigma**2], dtype=torch.float64)
    r = expected_basis(mean, variance, *basis_parameters(which, dtype=torch.float64))
    assert (r - naive.expected_basis(mean, variance, which)).abs().max() < 1e-9


def gradients(dtype: torch.dtype, read: str, basis: GaussianBasis) -> tuple[Tensor, Tensor]:
    mu = torch.tensor([0.0, 0.31, 0.5, 0.97], dtype=dtype).requires_grad_()
    variance = torch.tensor([1e-6, 1e-6, 1e-4, 1e-2], dtype=dtype).requires_grad_()
    weights = torch.arange(1, basis.num_basis + 1, dtype=dtype).cos()
    if read == "closed":
        r = expected_basis(mu, variance, *basis_parameters(basis, dtype=dtype))
    else:
        r = naive.expected_basis(mu, variance, basis)
    grad_mu, grad_variance = torch.autograd.grad((r * weights).sum(), (mu, variance))
    return grad_mu.double(), grad_variance.double()


@pytest.mark.parametrize("basis", BASES)
def test_gradients_at_small_sigma_equal_those_through_the_integral(basis: GaussianBasis) -> None:
    exact = gradients(torch.float64, "quadrature", basis)
    for ours, wanted in zip(gradients(torch.float64, "closed", basis), exact, strict=True):
        assert (ours - wanted).abs().max() < 1e-9 * wanted.abs().max()
    for ours, wanted in zip(gradients(torch.float32, "closed", basis), exact, strict=True):
        assert (ours - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_a_density_of_no_width_reads_the_point() -> None:
    parameters = basis_parameters(BASES[1], dtype=torch.float64)
    t = torch.rand(5, dtype=torch.float64)
    assert torch.allclose(expected_basis(t, torch.zeros_like(t), *parameters), evaluate_basis(t, *parameters))


def test_half_precision_is_read_in_float32() -> None:
    mu, variance = torch.tensor([0.5], dtype=torch.float16), torch.tensor([1e-3], dtype=torch.float16)
    r = expected_basis(mu, variance, *basis_parameters(BASES[0]))
    assert r.dtype == torch.float32


def test_parameters_are_computed_once_and_usable_after_inference_mode() -> None:
    basis = GaussianBasis(6, (0.071, 0.1))
    with torch.inference_mode():
        first = basis_parameters(basis)
    assert basis_parameters(GaussianBasis(6, (0.071, 0.1)))[0] is first[0]
    mu = torch.tensor([0.5], requires_grad=True)
    expected_basis(mu, torch.tensor([0.01]), *first).sum().backward()
    assert mu.grad is not None


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 1e-20), (torch.float64, 1e-140)])
def test_a_function_far_away_is_negligible_and_not_subnormal(dtype: torch.dtype, least: float) -> None:
    basis = GaussianBasis(16, (0.01, 0.05))
    values = evaluate_basis(torch.linspace(0, 1, 400, dtype=dtype), *basis_parameters(basis, dtype=dtype))
    peak = values.max(dim=0).values
    assert (values >= least * peak).all()
    assert ((values / peak).min(dim=0).values < 1e-17).all()
