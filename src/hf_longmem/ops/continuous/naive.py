"""The readable twin: integrals by quadrature, regressions by least squares, one row and one segment at a time.

Nothing is precomputed, cached or rearranged here; the tests hold the fast operators to these.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_longmem.ops.continuous.basis import GaussianBasis
from hf_longmem.ops.continuous.regression import RegressionSpec


def evaluate_basis(t: Tensor, basis: GaussianBasis) -> Tensor:
    """Evaluate every basis function at every point: psi [..., N]."""
    columns = []
    for j, centre in enumerate(basis.centres):
        width = basis.widths[j % len(basis.widths)]
        columns.append(torch.exp(-((t - centre) ** 2) / (2 * width**2)) / (width * math.sqrt(2 * math.pi)))
    return torch.stack(columns, dim=-1)


def expected_basis(mu: Tensor, variance: Tensor, basis: GaussianBasis, num_points: int = 4001) -> Tensor:
    """Integrate ``psi_j`` against N(mu, variance) on an even grid 12 standard deviations to either side: r [..., N].

    The sum converges faster than any power of the step as soon as the step is below the narrowest Gaussian involved.
    """
    z = torch.linspace(-12, 12, num_points, dtype=mu.dtype)
    weight = torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    t = mu[..., None] + variance[..., None].sqrt() * z
    return (weight[:, None] * evaluate_basis(t, basis)).sum(dim=-2)


def ridge_regression(positions: Tensor, targets: Tensor, basis: GaussianBasis, ridge: float) -> Tensor:
    """Fit coefficients to targets by least squares on the system with ``sqrt(lambda) I`` appended: B [N, E]."""
    design = evaluate_basis(positions, basis)
    penalty = math.sqrt(ridge) * torch.eye(basis.num_basis, dtype=design.dtype)
    system = torch.cat([design, penalty])
    wanted = torch.cat([targets, torch.zeros(basis.num_basis, targets.shape[-1], dtype=targets.dtype)])
    return torch.linalg.lstsq(system, wanted).solution


def write_memory(
    coefficients_NE: Tensor | None,
    x_LE: Tensor,
    spec: RegressionSpec,
    tau: float,
    sample_positions_M: Tensor | None = None,
) -> Tensor:
    """Write one segment of one row: sample the old signal, squeeze the samples into [0, tau], append, fit anew.

    Args:
        coefficients_NE: the row's memory [N, E]; None for a first write.
        x_LE: the segment [L, E].
        spec: the regression.
        tau: what the past shrinks to.
        sample_positions_M: where to sample the past [M]; None for evenly.

    Returns:
        The row's next coefficients [N, E].
    """
    dtype, length, num_samples = x_LE.dtype, spec.segment_length, spec.num_samples
    if coefficients_NE is None:
        positions = [(i - 0.5) / length for i in range(1, length + 1)]
        padding = [(i - 0.5) / length for i in range(1 - length // 2, 1)] if spec.padding else []
        padding += [1 - t for t in padding]
        targets = x_LE
    else:
        offset = 0.5 if spec.placement == "centre" else 0.0
        old = [(i - offset) / num_samples for i in range(1, num_samples + 1)]
        new = [(i - offset) / length for i in range(1, length + 1)]
        positions = [tau * t for t in old] + [tau + (1 - tau) * t for t in new]
        padding = []
        if spec.padding:
            count, shift = 2 * (num_samples + length), 1 / (2 * length + num_samples)
            line = [-0.5 + shift + (2 - 2 * shift) * i / (count - 1) for i in range(count)]
            padding = [t for t in line if t < 0 or t > 1]
        where = torch.tensor(old, dtype=dtype) if sample_positions_M is None else sample_positions_M
        targets = torch.cat([evaluate_basis(where, spec.basis) @ coefficients_NE, x_LE])
    targets = torch.cat([targets, torch.zeros(len(padding), x_LE.shape[-1], dtype=dtype)])
    return ridge_regression(torch.tensor(positions + padding, dtype=dtype), targets, spec.basis, spec.ridge)


def read_memory(
    q_BHTD: Tensor, k_BHND: Tensor, v_BHND: Tensor, heads_2N: Tensor, basis: GaussianBasis, *, variance_floor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Read by way of every query's scores against every basis function's key.

    Args:
        q_BHTD: queries, not scaled [B, H, T, D].
        k_BHND: keys K = B W_K [B, H, N, D].
        v_BHND: values V = B W_V [B, H, N, D].
        heads_2N: w_mu and w_sigma [2, N].
        basis: the basis.
        variance_floor: smallest sigma^2.

    Returns:
        context [B, H, T, D], mu [B, H, T], sigma^2 [B, H, T].
    """
    scores_BHTN = q_BHTD @ k_BHND.transpose(-1, -2) / math.sqrt(q_BHTD.shape[-1])
    mu_BHT = torch.sigmoid((scores_BHTN * heads_2N[0]).sum(dim=-1))
    variance_BHT = F.softplus((scores_BHTN * heads_2N[1]).sum(dim=-1)).clamp(min=variance_floor)
    r_BHTN = expected_basis(mu_BHT, variance_BHT, basis)
    return (r_BHTN[..., None] * v_BHND[:, :, None]).sum(dim=-2), mu_BHT, variance_BHT


def attention_histogram(mu: Tensor, variance: Tensor, num_bins: int, num_points: int = 101) -> Tensor:
    """Integrate the densities over each bin of [0, 1] by Simpson's rule and add them up: [K]."""
    mass = []
    for k in range(num_bins):
        t = torch.linspace(k / num_bins, (k + 1) / num_bins, num_points, dtype=mu.dtype)
        simpson = torch.ones(num_points, dtype=mu.dtype)
        simpson[1:-1:2], simpson[2:-1:2] = 4, 2
        density = torch.exp(-((t - mu[..., None]) ** 2) / (2 * variance[..., None]))
        density = density / torch.sqrt(2 * math.pi * variance[..., None])
        mass.append((density * simpson * (t[1] - t[0]) / 3).sum())
    return torch.stack(mass)


def sticky_positions(histogram: list[float], num_samples: int) -> list[float]:
    """Invert the cumulative histogram at (i - 1/2) / M, walking along its bins."""
    num_bins, total = len(histogram), sum(histogram)
    positions = []
    for i in range(num_samples):
        left = (i + 0.5) / num_samples * total
        for k, mass in enumerate(histogram):
            if left < mass:
                positions.append((k + left / mass) / num_bins)
                break
            left -= mass
    return positions
