from __future__ import annotations

import math
import re
from importlib import resources
from typing import Any

import pytest
import torch

from hf_longmem.ops.continuous import GaussianBasis, RegressionSpec, memory_retention, naive, reading_weights
from hf_longmem.ops.continuous.retention import segment_edges


@pytest.mark.parametrize(
    ("tau", "num_samples", "least", "most"), [(0.75, 512, 12, 13), (0.5, 512, 7, 7), (0.9, 2048, 24, 24)]
)
def test_segments_kept_at_the_published_sizes(tau: float, num_samples: int, least: int, most: int) -> None:
    spec = RegressionSpec(GaussianBasis(512, (0.01, 0.05)), 512, num_samples)
    assert least <= memory_retention(spec, tau, 24).kept() <= most


@pytest.mark.parametrize("num_basis", [64, 128])
def test_the_table_of_the_documentation_is_what_the_command_gives(num_basis: int) -> None:
    """The rows of 256 and 512 take the same code, for longer."""
    text = resources.files("hf_longmem.ops.continuous").joinpath("README.md").read_text(encoding="utf-8")
    header = next(line for line in text.splitlines() if line.startswith("| N | M | tau"))
    taus = [float(tau) for tau in re.findall(r"tau ([\d.]+)", header)]
    row = next(line for line in text.splitlines() if line.startswith(f"| {num_basis} |"))
    _, num_samples, *kept, uniform = [int(cell) for cell in row.strip("| ").split(" | ")]
    spec = RegressionSpec(GaussianBasis(num_basis, (0.01, 0.05)), num_basis, num_samples)
    assert [memory_retention(spec, tau, 96).kept() for tau in taus] == kept
    longest = [n for n in (4, 8, 16, 24, 32, 48, 64, 96) if memory_retention(spec, "uniform", n).kept() == n]
    assert longest[-1] == uniform


def test_uniform_decay_keeps_every_segment_where_a_fixed_one_forgets() -> None:
    spec = RegressionSpec(GaussianBasis(128, (0.01, 0.05)), 64, 128)
    uniform, fixed = memory_retention(spec, "uniform", 20), memory_retention(spec, 0.75, 20)
    assert uniform.kept(0.95) == 20
    assert fixed.kept() < 14
    assert fixed.fidelity_A[17] < 0.3


@pytest.mark.parametrize("decay", [0.6, "uniform"])
def test_the_response_is_that_of_random_constants_written_by_the_naive_twin(decay: Any) -> None:
    spec = RegressionSpec(GaussianBasis(24, (0.02, 0.06)), 8, 24)
    constants = torch.randn(6, 20000, dtype=torch.float64)
    coefficients = None
    for n, constant in enumerate(constants):
        tau = n / (n + 1) if decay == "uniform" and n else 0.6
        coefficients = naive.write_memory(coefficients, constant.expand(8, -1), spec, tau)
    middle = segment_edges(decay, 6).mean(dim=1)
    assert coefficients is not None
    recalled, written = naive.evaluate_basis(middle, spec.basis) @ coefficients, constants.flip(0)
    retention = memory_retention(spec, decay, 6)
    fidelity = 1 - (recalled - written).square().mean(dim=1) / written.square().mean(dim=1)
    # 20,000 independent columns: a standard error of a few times 1 / sqrt(20,000) on every average of squares.
    assert (retention.fidelity_A - fidelity).abs().max() < 0.05
    assert (retention.gain_A - (recalled * written).mean(dim=1)).abs().max() < 0.05
    assert (retention.cosine_A - torch.cosine_similarity(recalled, written, dim=1)).abs().max() < 0.05


def test_edges_share_the_line() -> None:
    assert torch.allclose(segment_edges("uniform", 4), torch.tensor([[3, 4], [2, 3], [1, 2], [0, 1]]).double() / 4)
    wanted = torch.tensor([[0.5, 1], [0.25, 0.5], [0, 0.25]], dtype=torch.float64)
    assert torch.equal(segment_edges(0.5, 3), wanted)


def test_a_wide_reading_density_recalls_less_of_an_old_segment() -> None:
    spec = RegressionSpec(GaussianBasis(64, (0.01, 0.05)), 32, 64)
    sharp, blurred = (memory_retention(spec, 0.75, 8, read_variance=variance) for variance in (0.0, 1e-2))
    assert blurred.fidelity_A[5] < sharp.fidelity_A[5]


def test_one_segment_is_read_back() -> None:
    spec = RegressionSpec(GaussianBasis(64, (0.01, 0.05)), 128, 64)
    assert memory_retention(spec, 0.75, 1).fidelity_A[0] > 0.99


def test_kept_stops_at_the_first_gap() -> None:
    retention = memory_retention(RegressionSpec(GaussianBasis(64, (0.01, 0.05)), 32, 64), 0.75, 4)
    assert retention._replace(fidelity_A=torch.tensor([1.0, 0.9, 0.2, 1.0])).kept() == 2


def test_the_default_device_does_not_matter() -> None:
    spec = RegressionSpec(GaussianBasis(16, (0.05,)), 16, 32)
    with torch.device("meta"):
        there = memory_retention(spec, 0.75, 3).gain_A, reading_weights(spec, 0.75, 3, mu=0.5, variance=0.1)
    here = memory_retention(spec, 0.75, 3).gain_A, reading_weights(spec, 0.75, 3, mu=0.5, variance=0.1)
    assert all(map(torch.equal, there, here))


def test_impossible_probes_are_named() -> None:
    spec = RegressionSpec(GaussianBasis(8, (0.1,)), 4, 4)
    with pytest.raises(ValueError, match="num_segments must be at least 1, got 0"):
        memory_retention(spec, 0.5, 0)
    with pytest.raises(ValueError, match="tau must lie strictly between"):
        memory_retention(spec, 1.0, 1)


@pytest.mark.parametrize("num_basis", [64, 256])
def test_the_table_of_weights_is_what_the_function_gives(num_basis: int) -> None:
    text = resources.files("hf_longmem.ops.continuous").joinpath("README.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith(f"| {num_basis}, ")]
    rows = [row for row in rows if len(row) == 6]
    assert len(rows) == 2
    for sizes, widths, *spreads, kept in rows:
        basis, length, samples = (int(size) for size in sizes.split(", "))
        spec = RegressionSpec(GaussianBasis(basis, tuple(float(w) for w in widths.split(", "))), length, samples)
        weights = reading_weights(spec, 0.75, 7, mu=0.5, variance=math.log(2))
        relative = weights.std(dim=1, correction=0) / weights.mean(dim=1)
        for age, spread in zip((0, 3, 6), spreads, strict=True):
            assert relative[age].item() == pytest.approx(float(spread), rel=0.02, abs=0.006)
        assert memory_retention(spec, 0.75, 24).kept() == int(kept)


@pytest.mark.parametrize("decay", [0.6, "uniform"])
def test_weights_are_those_of_single_tokens_written_and_read(decay: Any) -> None:
    spec = RegressionSpec(GaussianBasis(24, (0.02, 0.06)), 8, 24)
    tokens = torch.eye(5 * 8, dtype=torch.float64).view(5, 8, -1)
    coefficients = None
    for n, segment in enumerate(tokens):
        tau = n / (n + 1) if decay == "uniform" and n else 0.6
        coefficients = naive.write_memory(coefficients, segment, spec, tau)
    assert coefficients is not None
    mu, variance = torch.tensor(0.7, dtype=torch.float64), torch.tensor(0.09, dtype=torch.float64)
    read = naive.expected_basis(mu, variance, spec.basis) @ coefficients
    weights = reading_weights(spec, decay, 5, mu=0.7, variance=0.09)
    torch.testing.assert_close(weights.flip(0).flatten(), read)


def test_weights_need_a_segment_and_a_decay_that_exists() -> None:
    spec = RegressionSpec(GaussianBasis(8, (0.1,)), 8, 16)
    with pytest.raises(ValueError, match="num_segments must be at least 1"):
        reading_weights(spec, 0.75, 0, mu=0.5, variance=0.1)
    with pytest.raises(ValueError, match="tau"):
        reading_weights(spec, 1.5, 2, mu=0.5, variance=0.1)
