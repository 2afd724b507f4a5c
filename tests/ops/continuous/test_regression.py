from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longmem.ops.continuous import (
    GaussianBasis,
    RegressionSpec,
    basis_parameters,
    contraction_radius,
    decay_tau,
    empty_memory,
    evaluate_basis,
    naive,
    ridge_regression,
    select_write_maps,
    uniform_write_maps,
    write_maps,
    write_memory,
)
from hf_longmem.ops.continuous.regression import bin_positions, first_positions, later_positions, solve_write_maps

FEW = settings(max_examples=12, deadline=None)
BASIS = GaussianBasis(12, (0.05, 0.1))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 257, 1000])
@pytest.mark.parametrize("padding", [False, True])
def test_first_write_fits_the_tokens_at_any_length(length: int, padding: bool) -> None:
    spec = RegressionSpec(BASIS, length, 3, padding=padding)
    x = torch.randn(length, 4, dtype=torch.float64)
    ours = solve_write_maps(spec, 0.5).first_LN.T @ x
    assert (ours - naive.write_memory(None, x, spec, 0.5)).abs().max() < 1e-9


@FEW
@given(
    num_basis=st.integers(2, 21),
    length=st.integers(1, 40),
    num_samples=st.integers(1, 40),
    tau=st.floats(0.05, 0.95),
    ridge=st.floats(0.1, 3),
    padding=st.booleans(),
    placement=st.sampled_from(["centre", "right_edge"]),
)
def test_contracting_is_sampling_and_fitting_anew(
    num_basis: int, length: int, num_samples: int, tau: float, ridge: float, padding: bool, placement: Any
) -> None:
    spec = RegressionSpec(GaussianBasis(num_basis, (0.04, 0.1)), length, num_samples, ridge, placement, padding)
    maps = solve_write_maps(spec, tau)
    generator = torch.Generator().manual_seed(0)
    old, x = (torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (num_basis, length))
    ours = maps.carry @ old + maps.new_LN.T @ x
    wanted = naive.write_memory(old, x, spec, tau)
    assert (ours - wanted).abs().max() < 1e-9 * max(1, wanted.abs().max())


def test_positions_share_the_line_by_tau() -> None:
    spec = RegressionSpec(BASIS, 3, 2)
    positions, padding = later_positions(spec, 0.6)
    assert torch.allclose(positions, torch.tensor([0.15, 0.45, 2 / 3, 0.8, 0.6 + 0.4 * 5 / 6], dtype=torch.float64))
    assert len(padding) == 0
    assert torch.allclose(first_positions(spec)[0], bin_positions(3))


def test_padding_costs_accuracy_at_the_newest_tokens() -> None:
    """Why the authors' zero targets outside [0, 1] are not our default."""
    basis, num = GaussianBasis(64, (0.01, 0.05)), 64
    error = {}
    for padding in (False, True):
        spec = RegressionSpec(basis, num, num, padding=padding)
        b = solve_write_maps(spec, 0.75).new_LN.T @ torch.ones(num, 1, dtype=torch.float64)
        newest = later_positions(spec, 0.75)[0][-4:]
        error[padding] = (naive.evaluate_basis(newest, basis) @ b - 1).abs().mean()
    assert error[False] < 0.02
    assert error[True] > 0.1


def test_float32_maps_are_the_float64_ones_rounded_once_at_published_size() -> None:
    spec = RegressionSpec(GaussianBasis(512, (0.005, 0.01)), 512, 512, 0.5)
    for exact, ours in zip(solve_write_maps(spec, 0.5)[:3], write_maps(spec, 0.5)[:3], strict=True):
        assert ours.dtype == torch.float32
        assert (ours - exact).norm() < 1e-6 * exact.norm()


def test_equal_settings_share_their_maps() -> None:
    def spec() -> RegressionSpec:
        return RegressionSpec(GaussianBasis(10, (0.05, 0.11)), 5, 6)

    with torch.inference_mode():
        first = write_maps(spec(), 0.75)
    assert write_maps(spec(), 0.75).carry is first.carry
    assert write_maps(spec(), 0.7).carry is not first.carry
    x = torch.randn(1, 5, 2, requires_grad=True)  # maps first asked for in inference mode serve training too
    state = write_memory(write_memory(empty_memory(1, 10, 2), x, first), x, first)
    state.coefficients_BNE.sum().backward()
    assert x.grad is not None


def test_maps_ignore_the_surrounding_default_device_dtype_and_autocast() -> None:
    spec = RegressionSpec(GaussianBasis(10, (0.05, 0.12)), 5, 6)
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        inside = solve_write_maps.__wrapped__(spec, 0.75)
    for there, here in zip(inside[:3], solve_write_maps(spec, 0.75)[:3], strict=True):
        assert there.device.type == "cpu"
        assert torch.equal(there, here)


@pytest.mark.parametrize("sticky", [False, True])
def test_uniform_table_holds_the_map_of_each_count_and_goes_on_with_the_last(sticky: bool) -> None:
    spec = RegressionSpec(BASIS, 5, 6)
    table = uniform_write_maps(spec, 4, sticky=sticky)
    picked = select_write_maps(table, torch.tensor([0, 1, 3, 4, 100]))
    for row, n in enumerate([1, 1, 3, 4, 4]):
        wanted = write_maps(spec, n / (n + 1), sticky=sticky)
        assert torch.equal(picked.new_LN[row], wanted.new_LN)
        assert torch.equal(picked.carry[row], wanted.carry)
    assert torch.equal(picked.first_LN, wanted.first_LN)


@pytest.mark.parametrize(("num_samples", "bounded"), [(32, False), (64, True), (128, True)])
def test_too_few_samples_of_the_past_amplify_it(num_samples: int, bounded: bool) -> None:
    spec = RegressionSpec(GaussianBasis(64, (0.01, 0.05)), 16, num_samples)
    assert (contraction_radius(spec, 0.9) < 1) == bounded
    state, maps = empty_memory(1, 64, 2, dtype=torch.float64), write_maps(spec, 0.9, dtype=torch.float64)
    for _ in range(400):
        state = write_memory(state, torch.randn(1, 16, 2, dtype=torch.float64), maps)
    assert (state.coefficients_BNE.abs().max() < 10) == bounded


def test_a_fixed_place_for_every_sample_may_amplify_what_even_samples_would_not() -> None:
    spec = RegressionSpec(GaussianBasis(64, (0.01, 0.05)), 64, 128)
    even = contraction_radius(spec, 0.75, bin_positions(128))
    assert abs(even - contraction_radius(spec, 0.75)) < 1e-9
    assert even < 1
    place = 0.691 + 0.01 * torch.erfinv(2 * bin_positions(128) - 1) * math.sqrt(
        2
    )  # as if all had read N(0.691, 0.01^2)
    assert contraction_radius(spec, 0.75, place) > 1
    step = solve_write_maps(spec, 0.75, True).carry @ evaluate_basis(
        place.double(), *basis_parameters(spec.basis, dtype=torch.float64)
    )
    grown = torch.linalg.matrix_power(step, 400).norm() / torch.linalg.matrix_power(step, 200).norm()
    assert abs(grown.log() / 200 - math.log(contraction_radius(spec, 0.75, place))) < 1e-3


def test_decay_tau() -> None:
    assert [decay_tau("uniform", n) for n in (1, 2, 9)] == [1 / 2, 2 / 3, 9 / 10]
    assert decay_tau(0.75, 9) == 0.75
    with pytest.raises(ValueError, match="decay must be 'uniform' or a number"):
        decay_tau("slow", 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1 segment"):
        decay_tau("uniform", 0)


@pytest.mark.parametrize("tau", [0.0, 1.0, -0.5, 1.5, float("nan")])
def test_impossible_tau_is_named(tau: float) -> None:
    with pytest.raises(ValueError, match="tau must lie strictly between 0 and 1, got"):
        write_maps(RegressionSpec(BASIS, 5, 6), tau)
    with pytest.raises(ValueError, match="tau must lie strictly between 0 and 1, got"):
        decay_tau(tau, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ridge": 0.0}, "ridge must be positive"),
        ({"ridge": -1.0}, "ridge must be positive"),
        ({"ridge": float("nan")}, "ridge must be positive"),
        ({"segment_length": 0}, "segment_length must be a whole number of at least 1, got 0"),
        ({"segment_length": 2.5}, "segment_length must be a whole number"),
        ({"num_samples": 0}, "num_samples must be a whole number of at least 1, got 0"),
        ({"placement": "left"}, "placement must be one of"),
    ],
)
def test_impossible_settings_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RegressionSpec(**({"basis": BASIS, "segment_length": 4, "num_samples": 4} | change))


def test_a_ridge_too_small_for_float64_is_named() -> None:
    with pytest.raises(ValueError, match="positive definite in float64"):
        ridge_regression(torch.full((4, 6), 1e3, dtype=torch.float64), 1e-300)


def test_max_segments_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"max_segments .* got 0; use 6, the number of centres"):
        uniform_write_maps(RegressionSpec(BASIS, 4, 4), 0)
