"""Ridge regression from tokens to coefficients, solved once for each setting and shared by every layer."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from hf_longmem._errors import complaint
from hf_longmem.ops.continuous.basis import GaussianBasis, basis_parameters, evaluate_basis

Placement = Literal["centre", "right_edge"]


@dataclass(frozen=True)
class RegressionSpec:
    """All that fixes the regression of a write, but for how far it contracts.

    Args:
        basis: the basis functions.
        segment_length: L, tokens written at once, at least 1.
        num_samples: M, at how many points the past is sampled when it is contracted, at least 1.
        ridge: lambda, positive.
        placement: where in its bin a sample of a later write sits. ``"centre"``: at (i - 1/2) / count, as the first
            write does. ``"right_edge"``: at i / count, as the authors' code does.
        padding: also ask the signal to be zero at points outside [0, 1], as the authors' code does. It costs
            accuracy where it matters most, at the newest tokens; see README.md.

    Raises:
        ValueError: a setting outside the ranges above.
    """

    basis: GaussianBasis
    segment_length: int
    num_samples: int
    ridge: float = 1.0
    placement: Placement = "centre"
    padding: bool = False

    def __post_init__(self) -> None:
        for name in ("segment_length", "num_samples"):
            count = getattr(self, name)
            if not isinstance(count, int) or count < 1:
                raise ValueError(complaint(f"{name} must be a whole number of at least 1", count, "use 256, say"))
        _check_ridge(self.ridge)
        if self.placement not in get_args(Placement):
            rule = f"placement must be one of {get_args(Placement)}"
            raise ValueError(complaint(rule, repr(self.placement), "use 'centre'"))


class WriteMaps(NamedTuple):
    """The linear maps of a write; a leading axis of ``new`` and ``carry``, if any, holds one map a row.

    A first write is ``B = first^T X``, a later one ``B' = carry S + new^T X``: S is the old B itself and carry the
    contraction A [N, N]; or, when ``sticky``, S is the old signal at M positions of each row's own choice and carry
    is their regression [N, M].
    """

    first_LN: Tensor
    new_LN: Tensor
    carry: Tensor
    sticky: bool


def bin_positions(count: int, placement: Placement = "centre") -> Tensor:
    """Place one point in each of ``count`` equal bins of [0, 1], in float64.

    >>> bin_positions(2), bin_positions(2, "right_edge")
    (tensor([0.2500, 0.7500], dtype=torch.float64), tensor([0.5000, 1.0000], dtype=torch.float64))
    """
    offset = 0.5 if placement == "centre" else 0.0
    return (torch.arange(1, count + 1, dtype=torch.float64, device="cpu") - offset) / count


def first_positions(spec: RegressionSpec) -> tuple[Tensor, Tensor]:
    """Place the tokens of a first write, at the centres of L bins, and its padding.

    Returns:
        positions [L] and padding positions [P] in float64; P = 2 floor(L / 2) bin centres beside [0, 1], or 0.
    """
    length = spec.segment_length
    beside = length // 2 if spec.padding else 0
    outside = [i for i in range(1 - beside, length + beside + 1) if not 1 <= i <= length]
    padding = (torch.tensor(outside, dtype=torch.float64, device="cpu") - 0.5) / length
    return bin_positions(length), padding


def later_positions(spec: RegressionSpec, tau: float) -> tuple[Tensor, Tensor]:
    """Place the M samples of the past in [0, tau] and the L new tokens in (tau, 1], and their padding.

    Returns:
        positions [M + L], the past first, and padding positions [P] in float64.
    """
    _check_tau(tau)
    past = tau * bin_positions(spec.num_samples, spec.placement)
    new = tau + (1 - tau) * bin_positions(spec.segment_length, spec.placement)
    if not spec.padding:
        return torch.cat([past, new]), past[:0]
    shift = 1 / (2 * spec.segment_length + spec.num_samples)
    count = 2 * (spec.num_samples + spec.segment_length)
    line = torch.linspace(-0.5 + shift, 1.5 - shift, count, dtype=torch.float64, device="cpu")
    return torch.cat([past, new]), line[(line < 0) | (line > 1)]


def ridge_regression(design_PN: Tensor, ridge: float) -> Tensor:
    """Solve ``G = F (F^T F + lambda I)^-1``, so that ``B = G^T X`` minimises ``|F B - X|^2 + lambda |B|^2``.

    Args:
        design_PN: F [P, N], the basis functions at the positions of the P targets.
        ridge: lambda, positive.

    Returns:
        G [P, N] in float64. In float32 the same inverse is 1 to 3 % off at the published sizes.

    Raises:
        ValueError: lambda is not positive, or so small that F^T F + lambda I is singular to float64.

    Source: Martins et al. 2021 (arXiv 2109.00301), section 2.2; F here is the transpose of theirs.
    """
    _check_ridge(ridge)
    design_PN = design_PN.double()
    gram_NN = design_PN.T @ design_PN
    gram_NN.diagonal().add_(ridge)
    factor_NN, failed = torch.linalg.cholesky_ex(gram_NN)
    if failed:
        raise ValueError(complaint("F^T F + ridge I must be positive definite in float64", ridge, "use a larger ridge"))
    return torch.cholesky_solve(design_PN.T, factor_NN).T.contiguous()


@functools.lru_cache(maxsize=8)
def solve_write_maps(spec: RegressionSpec, tau: float, sticky: bool = False) -> WriteMaps:
    """Solve the maps of a write in float64, once for each (L, M, tau, basis, lambda).

    The contraction reads the old signal at M points and regresses what it reads onto [0, tau]: ``A = G_past^T Psi``.

    Args:
        spec: the regression.
        tau: what the past shrinks to, in (0, 1).
        sticky: leave out Psi, for positions that differ by row.

    Returns:
        first [L, N], new [L, N], carry [N, N] (sticky: [N, M]); float64 on the CPU. Shared: do not write into them.

    Raises:
        ValueError: tau outside (0, 1).

    Source: Martins et al. 2021 (arXiv 2109.00301), section 3.2.
    """
    # The result outlives whoever asks first, who may be in inference mode, under autocast or on another default device.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        centres_N, widths_N = basis_parameters(spec.basis, dtype=torch.float64)

        def regress(positions: Tensor, padding: Tensor) -> Tensor:
            design_PN = evaluate_basis(torch.cat([positions, padding]), centres_N, widths_N)
            return ridge_regression(design_PN, spec.ridge)[: len(positions)]

        first_LN = regress(*first_positions(spec))
        past_MN, new_LN = regress(*later_positions(spec, tau)).split([spec.num_samples, spec.segment_length])
        carry = past_MN.T
        if not sticky:
            carry = carry @ evaluate_basis(bin_positions(spec.num_samples, spec.placement), centres_N, widths_N)
        return WriteMaps(first_LN.contiguous(), new_LN.contiguous(), carry.contiguous(), sticky)


@functools.lru_cache(maxsize=16)
def _write_maps(spec: RegressionSpec, tau: float, sticky: bool, device: torch.device, dtype: torch.dtype) -> WriteMaps:
    with torch.inference_mode(False), torch.no_grad():
        return _cast(solve_write_maps(spec, tau, sticky), device, dtype)


@torch.compiler.assume_constant_result
def write_maps(
    spec: RegressionSpec,
    tau: float,
    *,
    sticky: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> WriteMaps:
    """Give the maps of a write that contracts by a fixed ``tau``, solved in float64, rounded once, cached by value.

    Under ``torch.compile`` the result is a constant of the graph.

    Args:
        spec: the regression.
        tau: what the past shrinks to, in (0, 1); ``decay_tau`` gives it for ``"uniform"`` when the count is known.
        sticky: for positions that differ by row.
        device: where the maps are to live.
        dtype: floating type of the memory.

    Returns:
        first [L, N], new [L, N], carry [N, N] (sticky: [N, M]). They are shared: do not write into them.

    Raises:
        ValueError: tau outside (0, 1).
    """
    return _write_maps(spec, float(tau), sticky, torch.device(device), dtype)


def contraction_radius(spec: RegressionSpec, tau: float, positions_M: Tensor | None = None) -> float:
    """Give the spectral radius of the contraction A: the memory stays bounded for ever if it is below 1.

    Too few samples, or widths too narrow for the distance between samples, and each contraction amplifies what lies
    between the samples: at N = 64, widths (0.01, 0.05) and tau 0.9 the radius is 0.91 for M = 64 and 1.26 for M = 32.

    Args:
        spec: the regression.
        tau: what the past shrinks to, in (0, 1); for uniform decay, that of the table's last entry.
        positions_M: where each write samples the past [M], if sticky memories always did so at the same places; default
            evenly.

    Raises:
        ValueError: tau outside (0, 1), or widths so narrow that nothing of the past is found between samples.
    """
    if positions_M is None:
        carry_NN = solve_write_maps(spec, tau).carry
    else:
        parameters = basis_parameters(spec.basis, dtype=torch.float64)
        samples_MN = evaluate_basis(positions_M.to("cpu", torch.float64), *parameters)
        carry_NN = solve_write_maps(spec, tau, True).carry @ samples_MN
    try:
        return torch.linalg.eigvals(carry_NN).abs().max().item()
    except torch.linalg.LinAlgError as error:
        rule = "basis functions must be wide enough for samples of the past to meet them"
        raise ValueError(complaint(rule, f"widths {spec.basis.widths}", "use wider ones")) from error


def decay_tau(decay: float | Literal["uniform"], segments: int) -> float:
    """Give the share of the line that ``segments`` segments keep when one more is written.

    A fixed tau leaves a segment of age a with ``(1 - tau) tau^a`` of the line; ``"uniform"``, ``tau = n / (n + 1)``,
    leaves every segment with the same share.

    >>> decay_tau("uniform", 3), decay_tau(0.5, 3)
    (0.75, 0.5)
    """
    if decay == "uniform":
        if segments < 1:
            raise ValueError(complaint("a contraction needs at least 1 segment", segments, "use the first write"))
        return segments / (segments + 1)
    if isinstance(decay, str):
        raise ValueError(complaint("decay must be 'uniform' or a number in (0, 1)", repr(decay), "use 'uniform'"))
    _check_tau(decay)
    return float(decay)


@functools.lru_cache(maxsize=4)
def _uniform_write_maps(
    spec: RegressionSpec, max_segments: int, sticky: bool, device: torch.device, dtype: torch.dtype
) -> WriteMaps:
    with torch.inference_mode(False), torch.no_grad():
        # Rounded one by one and past the cache: in float64 a long table would take twice its size while it is built.
        solve = solve_write_maps.__wrapped__
        cpu = torch.device("cpu")
        maps = [_cast(solve(spec, decay_tau("uniform", n), sticky), cpu, dtype) for n in range(1, max_segments + 1)]
        new = torch.stack([entry.new_LN for entry in maps])
        carry = torch.stack([entry.carry for entry in maps])
        return _cast(WriteMaps(maps[0].first_LN, new, carry, sticky), device, dtype)


@torch.compiler.assume_constant_result
def uniform_write_maps(
    spec: RegressionSpec,
    max_segments: int,
    *,
    sticky: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> WriteMaps:
    """Give the table of maps for uniform decay, ``tau = n / (n + 1)`` for n = 1 ... max_segments segments before.

    A longer document goes on with the last entry, which forgets exponentially with a time constant of max_segments.
    One segment among as many as there are centres already has no more than one centre to itself, so a longer table
    than N / W (W widths) buys nothing. Its size is ``max_segments * N * (L + N)`` numbers (``L + M`` when sticky).

    Args:
        spec: the regression.
        max_segments: length of the table, at least 1.
        sticky: for positions that differ by row.
        device: where the maps are to live.
        dtype: floating type of the memory.

    Returns:
        first [L, N], new [n, L, N], carry [n, N, N] (sticky: [n, N, M]). They are shared: do not write into them.

    Raises:
        ValueError: max_segments below 1.
    """
    if not isinstance(max_segments, int) or max_segments < 1:
        fix = f"use {max(1, spec.basis.num_basis // len(spec.basis.widths))}, the number of centres"
        raise ValueError(complaint("max_segments must be a whole number of at least 1", max_segments, fix))
    return _uniform_write_maps(spec, max_segments, sticky, torch.device(device), dtype)


def select_write_maps(table: WriteMaps, segments_B: Tensor) -> WriteMaps:
    """Pick each row's maps from the table by the number of segments it has written, without a host synchronisation.

    Args:
        table: from ``uniform_write_maps``.
        segments_B: whole numbers [B]; 0 picks the first entry, which a first write does not use.

    Returns:
        first [L, N], new [B, L, N], carry [B, N, N] (sticky: [B, N, M]).
    """
    index_B = (segments_B.long() - 1).clamp(0, table.new_LN.shape[0] - 1)
    return WriteMaps(table.first_LN, table.new_LN[index_B], table.carry[index_B], table.sticky)


def _cast(maps: WriteMaps, device: torch.device, dtype: torch.dtype) -> WriteMaps:
    first, new, carry = (part.to(device=device, dtype=dtype) for part in (maps.first_LN, maps.new_LN, maps.carry))
    return WriteMaps(first, new, carry, maps.sticky)


def _check_tau(tau: float) -> None:
    if not 0 < tau < 1:
        raise ValueError(complaint("tau must lie strictly between 0 and 1", tau, "use 0.75, say"))


def _check_ridge(ridge: float) -> None:
    if not (math.isfinite(ridge) and ridge > 0):
        raise ValueError(complaint("ridge must be positive and finite", ridge, "use 0.5 or 1.0"))
