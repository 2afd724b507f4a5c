"""How well what was written some segments ago can still be read, and how evenly."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hf_longmem._errors import complaint
from hf_longmem.ops.continuous.basis import basis_parameters, expected_basis
from hf_longmem.ops.continuous.regression import RegressionSpec, decay_tau, solve_write_maps


class Retention(NamedTuple):
    """What a read at the middle of a segment's stretch of the line gives back; index a is the segment's age.

    gain_A: how much of the segment's own vector comes back, 1 when all of it does.
    fidelity_A: ``1 - E|read - written|^2 / |written|^2`` for independent vectors, 1 for an exact read, 0 for one
        no better than reading nothing.
    cosine_A: the read's part along the written vector, ``gain / sqrt(sum of all squared gains)``.
    """

    gain_A: Tensor
    fidelity_A: Tensor
    cosine_A: Tensor

    def kept(self, fidelity: float = 0.75) -> int:
        """Count the newest segments, without a gap, that are read with at least this fidelity."""
        return int((self.fidelity_A >= fidelity).long().cumprod(dim=0).sum())


def segment_edges(decay: float | Literal["uniform"], num_segments: int) -> Tensor:
    """Give the stretches of [0, 1] that the segments hold, newest first: float64 [A, 2]."""
    low, high = [], []
    top = 1.0
    for written in range(num_segments - 1, -1, -1):
        bottom = top * decay_tau(decay, written) if written else 0.0
        low.append(bottom)
        high.append(top)
        top = bottom
    return torch.tensor([low, high], dtype=torch.float64, device="cpu").T


def memory_retention(
    spec: RegressionSpec, decay: float | Literal["uniform"], num_segments: int, *, read_variance: float = 0.0
) -> Retention:
    """Write segments of constant vectors, read each where it now lies: how long does the memory keep what it is told?

    Writing is linear, so that one unit vector a segment gives the response to any vectors at all. All in float64;
    positions are even (no sticky memories) and, under ``"uniform"``, tau is exact at any number of segments.

    Args:
        spec: the regression.
        decay: a fixed tau in (0, 1), or ``"uniform"``.
        num_segments: how many segments are written, at least 1; ages run from 0 to num_segments - 1.
        read_variance: sigma^2 of the reading density, 0 for a point.

    Returns:
        gain, fidelity and cosine for each age, float64.

    Raises:
        ValueError: no segment, or a decay that is neither ``"uniform"`` nor in (0, 1).

    >>> from hf_longmem.ops.continuous import GaussianBasis
    >>> spec = RegressionSpec(GaussianBasis(64, (0.01, 0.05)), segment_length=64, num_samples=64)
    >>> memory_retention(spec, 0.5, 12).kept(), memory_retention(spec, "uniform", 12).kept()
    (5, 12)
    """
    _check_probe(decay, num_segments)
    centres_N, widths_N = basis_parameters(spec.basis, dtype=torch.float64)
    response_NA = torch.zeros(spec.basis.num_basis, num_segments, dtype=torch.float64, device="cpu")
    for written in range(num_segments):
        carry_NN, regression_LN = _maps_of_write(spec, decay, written)
        response_NA = carry_NN @ response_NA
        response_NA[:, num_segments - 1 - written] = regression_LN.sum(dim=0)
    middle_A = segment_edges(decay, num_segments).mean(dim=1)
    read_AN = expected_basis(middle_A, torch.full_like(middle_A, read_variance), centres_N, widths_N)
    read_AA = read_AN @ response_NA
    gain_A, power_A = read_AA.diagonal().clone(), read_AA.square().sum(dim=1)
    fidelity_A = 1 - ((1 - gain_A).square() + power_A - gain_A.square())
    return Retention(gain_A, fidelity_A, gain_A / power_A.sqrt())


def reading_weights(
    spec: RegressionSpec, decay: float | Literal["uniform"], num_segments: int, *, mu: float, variance: float
) -> Tensor:
    """Tell how much each token counts in a read, ``E[x(t)] = sum_i w_i x_i`` for t ~ N(mu, sigma^2): writing is linear.

    Even weights are what counting and averaging need. With widths of several times the distance between centres a
    density as wide as the line weighs the tokens at its two ends many times the others, with both signs: it also
    reads beyond the ends, where nothing holds the signal.

    Args:
        spec: the regression.
        decay: a fixed tau in (0, 1), or ``"uniform"``.
        num_segments: how many segments are written, at least 1; ages run from 0 to num_segments - 1.
        mu, variance: mean and sigma^2 of the reading density, in units of the line and of its square.

    Returns:
        float64 [A, L], newest segment first, the tokens of each in their order.

    Raises:
        ValueError: no segment, or a decay that is neither ``"uniform"`` nor in (0, 1).

    >>> from hf_longmem.ops.continuous import GaussianBasis
    >>> def spread(*widths):
    ...     spec = RegressionSpec(GaussianBasis(64, widths), segment_length=128, num_samples=128)
    ...     newest = reading_weights(spec, 0.75, 7, mu=0.5, variance=0.69)[0]
    ...     return round((newest.std() / newest.mean()).item(), 1)
    >>> spread(0.01, 0.05), spread(0.008)
    (2.6, 0.3)
    """
    _check_probe(decay, num_segments)
    place, spread = torch.tensor([mu, variance], dtype=torch.float64, device="cpu")
    read_N = expected_basis(place, spread, *basis_parameters(spec.basis, dtype=torch.float64))
    weights = []
    for written in range(num_segments - 1, -1, -1):
        carry_NN, regression_LN = _maps_of_write(spec, decay, written)
        weights.append(regression_LN @ read_N)
        read_N = read_N @ carry_NN
    return torch.stack(weights)


def _check_probe(decay: float | Literal["uniform"], num_segments: int) -> None:
    if num_segments < 1:
        raise ValueError(complaint("num_segments must be at least 1", num_segments, "use 24, say"))
    decay_tau(decay, 1)


def _maps_of_write(spec: RegressionSpec, decay: float | Literal["uniform"], written: int) -> tuple[Tensor, Tensor]:
    """Give what a write after ``written`` others does to the memory and to its segment."""
    maps = solve_write_maps(spec, decay_tau(decay, max(written, 1)))
    return maps.carry, maps.new_LN if written else maps.first_LN
