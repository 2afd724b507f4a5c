"""The state of the continuous memory, and the pure functions that take one state to the next."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_longmem._errors import complaint
from hf_longmem.ops.continuous.basis import GaussianBasis, basis_parameters, evaluate_basis
from hf_longmem.ops.continuous.regression import WriteMaps

Draw = Literal["inverse_cdf", "multinomial"]
BinPoint = Literal["centre", "left_edge"]


class MemoryState(NamedTuple):
    """The memory of one layer; axis 0 of every tensor is the batch, so rows can be selected, repeated and reordered.

    coefficients_BNE: B [B, N, E], float32 (or float64), whatever the compute type; zeros in a row that never wrote.
    segments_B: how many segments each row has written, int64 [B].
    histogram_BK: where attention went since the row's last write, in K equal bins of [0, 1], not normalised.
    """

    coefficients_BNE: Tensor
    segments_B: Tensor
    histogram_BK: Tensor


def empty_memory(
    batch_size: int,
    num_basis: int,
    width: int,
    *,
    num_bins: int = 128,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> MemoryState:
    """Make a memory that holds nothing: ``B = 0``.

    Args:
        batch_size: rows.
        num_basis: N.
        width: E, numbers a token.
        num_bins: K, bins of the histogram of attention.
        dtype: float32 or float64.
        device: where the memory lives.

    Raises:
        ValueError: a type of less than 32 bits, in which contracting a thousand times over loses the past.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            complaint("memory must be float32 or float64", dtype, "use torch.float32 for any compute type")
        )
    return MemoryState(
        torch.zeros(batch_size, num_basis, width, dtype=dtype, device=device),
        torch.zeros(batch_size, dtype=torch.int64, device=device),
        torch.zeros(batch_size, num_bins, dtype=dtype, device=device),
    )


def reset_memory(state: MemoryState, reset_B: Tensor) -> MemoryState:
    """Make the chosen rows as new, bit for bit, and leave the others as they are.

    Args:
        state: the memory.
        reset_B: which rows, bool [B].

    Raises:
        ValueError: not one value for each row.
    """
    _check_rows("reset_B", reset_B, state)
    return MemoryState(*(_choose(reset_B, torch.zeros_like(part), part) for part in state))


def detach_memory(state: MemoryState) -> MemoryState:
    """Cut the memory from the graph that made it, the truncation of back-propagation through time."""
    return MemoryState(*(part.detach() for part in state))


def write_memory(
    state: MemoryState,
    x_BLE: Tensor,
    maps: WriteMaps,
    *,
    write_B: Tensor | None = None,
    samples_BMN: Tensor | None = None,
) -> MemoryState:
    """Append a segment: ``B' = A B + G_new^T X`` (a row's first write: ``B' = G_first^T X``).

    With samples, ``B' = G_past^T (Psi B) + G_new^T X``. Rows may have written different numbers of segments. Every row
    costs the same, however much it has read before.

    Args:
        state: the memory.
        x_BLE: X, the segment's vectors [B, L, E], any floating type; the memory stays in its own.
        maps: from ``write_maps``, or from ``select_write_maps`` for uniform decay.
        write_B: which rows write (bool [B], default all); the others keep their state bit for bit.
        samples_BMN: Psi, the basis at each row's sample positions [B, M, N] (sticky memories; see ``sticky_samples``).

    Returns:
        The next state; the histogram of a row that wrote starts anew, since its line has moved.

    Raises:
        ValueError: a shape that does not fit the maps or the memory, or samples without sticky maps (or the reverse).

    Source: Martins et al. 2021 (arXiv 2109.00301), sections 3.1 to 3.3.
    """
    _check_segment(state, x_BLE, maps)
    if maps.sticky != (samples_BMN is not None):
        received = (
            "maps solved with sticky=True and no samples" if maps.sticky else "samples and maps that are not sticky"
        )
        raise ValueError(complaint("samples_BMN and sticky maps go together", received, "give both or neither"))
    old_BNE = state.coefficients_BNE
    with torch.autocast(old_BNE.device.type, enabled=False):
        x_BLE = x_BLE.to(old_BNE.dtype)
        # An empty row holds zeros, so that contracting it adds nothing to its first write.
        regression_BLN = torch.where((state.segments_B == 0)[:, None, None], maps.first_LN, maps.new_LN)
        new_BNE = torch.baddbmm(_contract(old_BNE, maps.carry, samples_BMN), regression_BLN.mT, x_BLE)
    new = MemoryState(new_BNE, state.segments_B + 1, torch.zeros_like(state.histogram_BK))
    if write_B is None:
        return new
    _check_rows("write_B", write_B, state)
    return MemoryState(*(_choose(write_B, after, before) for after, before in zip(new, state, strict=True)))


def _contract(old_BNE: Tensor, carry: Tensor, samples_BMN: Tensor | None) -> Tensor:
    if samples_BMN is None:
        return carry @ old_BNE
    samples_BMN = samples_BMN.to(old_BNE.dtype)
    _, num_samples, num_basis = samples_BMN.shape
    width = old_BNE.shape[-1]
    # Both orders are exact; which is less work depends on how wide a token is.
    if num_basis * (num_samples + width) < 2 * num_samples * width:
        return (carry @ samples_BMN) @ old_BNE
    return carry @ (samples_BMN @ old_BNE)


@torch.no_grad()
def record_attention(
    state: MemoryState, mu_BHT: Tensor, variance_BHT: Tensor, *, query_mask_BT: Tensor | None = None
) -> MemoryState:
    """Add to the histogram how much of every query's density falls into each bin: ``sum_i Phi_i(b) - Phi_i(a)``.

    Args:
        state: the memory that was read.
        mu_BHT: means of the densities [B, H, T].
        variance_BHT: sigma^2 [B, H, T], positive.
        query_mask_BT: which queries count (bool [B, T], default all).

    Source: Martins et al. 2021 (arXiv 2109.00301), section 3.3.
    """
    histogram_BK = state.histogram_BK
    edges = torch.linspace(0, 1, histogram_BK.shape[-1] + 1, dtype=histogram_BK.dtype, device=histogram_BK.device)
    mu_BHT1, std_BHT1 = mu_BHT.to(edges.dtype).unsqueeze(-1), variance_BHT.to(edges.dtype).sqrt().unsqueeze(-1)
    # In place: a query has one number an edge, and the memory that each step would allocate costs more than its work.
    below = (edges - mu_BHT1).div_(std_BHT1 * math.sqrt(2)).erf_()
    if query_mask_BT is not None:
        below.masked_fill_(~query_mask_BT[:, None, :, None], 0.0)
    histogram_BK = histogram_BK + 0.5 * below.sum(dim=(1, 2)).diff(dim=-1)
    return MemoryState(state.coefficients_BNE, state.segments_B, histogram_BK)


@torch.no_grad()
def sticky_positions(
    histogram_BK: Tensor,
    num_samples: int,
    *,
    draw: Draw = "inverse_cdf",
    generator: torch.Generator | None = None,
    point: BinPoint = "centre",
) -> Tensor:
    """Choose where to sample the past, denser where attention went: ``t_i = CDF^-1((i - 1/2) / M)``.

    Row b depends on row b of the histogram alone when the draw is ``"inverse_cdf"``. A row whose histogram is empty
    is sampled evenly.

    Args:
        histogram_BK: mass in K equal bins of [0, 1], not normalised [B, K].
        num_samples: M, at least 1.
        draw: ``"inverse_cdf"``, deterministic and linear within a bin, or ``"multinomial"``, M independent draws.
        generator: for multinomial draws; None is torch's default one.
        point: where in its bin a multinomial draw sits; the authors use the left edge.

    Returns:
        positions [B, M], rising, in the type of the histogram.

    Raises:
        ValueError: M below 1, or an unknown draw or point.

    Source: Martins et al. 2021 (arXiv 2109.00301), section 3.3.
    """
    if num_samples < 1:
        raise ValueError(complaint("num_samples must be at least 1", num_samples, "use 256, say"))
    for name, value, known in (("draw", draw, get_args(Draw)), ("point", point, get_args(BinPoint))):
        if value not in known:
            raise ValueError(complaint(f"{name} must be one of {known}", repr(value), f"use {known[0]!r}"))
    num_bins = histogram_BK.shape[-1]
    total_B1 = histogram_BK.sum(dim=-1, keepdim=True)
    flat_BK = torch.full_like(histogram_BK, 1 / num_bins)
    mass_BK = torch.where(total_B1 > 0, histogram_BK / total_B1.clamp(min=torch.finfo(total_B1.dtype).tiny), flat_BK)
    if draw == "multinomial":
        bins_BM = torch.multinomial(mass_BK, num_samples, replacement=True, generator=generator).sort(dim=-1).values
        return (bins_BM.to(mass_BK.dtype) + (0.5 if point == "centre" else 0.0)) / num_bins
    upper_BK = mass_BK.cumsum(dim=-1)
    level_M = (torch.arange(num_samples, dtype=mass_BK.dtype, device=mass_BK.device) + 0.5) / num_samples
    # Scaled by the last sum, so that rounding in the cumulative sum cannot push a level past the last bin.
    level_BM = (level_M * upper_BK[:, -1:]).contiguous()
    bins_BM = torch.searchsorted(upper_BK, level_BM, right=True).clamp(max=num_bins - 1)
    here_BM = mass_BK.gather(-1, bins_BM)
    into_BM = level_BM - (upper_BK.gather(-1, bins_BM) - here_BM)
    fraction_BM = (into_BM / here_BM.clamp(min=torch.finfo(here_BM.dtype).tiny)).clamp(0, 1)
    return (bins_BM + fraction_BM) / num_bins


def sticky_samples(positions_BM: Tensor, basis: GaussianBasis) -> Tensor:
    """Evaluate the basis at each row's sample positions, ready for ``write_memory``: Psi [B, M, N]."""
    parameters = basis_parameters(basis, device=positions_BM.device, dtype=positions_BM.dtype)
    return evaluate_basis(positions_BM, *parameters)


def convolution_gate(x_BLE: Tensor, weight_EE3: Tensor, bias_E: Tensor | None) -> Tensor:
    """Weaken what is written by a learned gate over neighbouring tokens: ``x * sigmoid(conv_3(x))``.

    Beyond the ends of the segment the convolution sees zeros.

    Args:
        x_BLE: the segment's vectors [B, L, E].
        weight_EE3: convolution weights [E, E, 3].
        bias_E: convolution bias [E], or none.

    Returns:
        [B, L, E].
    """
    return x_BLE * torch.sigmoid(F.conv1d(x_BLE.mT, weight_EE3, bias_E, padding=1).mT)


def _choose(rows_B: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(rows_B.view(-1, *[1] * (yes.dim() - 1)), yes, no)


def _check_rows(name: str, rows_B: Tensor, state: MemoryState) -> None:
    batch_size = state.segments_B.shape[0]
    if rows_B.dtype != torch.bool or rows_B.shape != (batch_size,):
        rule = f"{name} must hold one bool for each of the {batch_size} rows of the memory"
        raise ValueError(complaint(rule, f"{rows_B.dtype} {tuple(rows_B.shape)}", f"use a bool tensor [{batch_size}]"))


def _check_segment(state: MemoryState, x_BLE: Tensor, maps: WriteMaps) -> None:
    batch_size, num_basis, width = state.coefficients_BNE.shape
    length, maps_basis = maps.first_LN.shape
    if maps_basis != num_basis:
        fix = "use the maps of the basis that the memory was made with"
        raise ValueError(complaint(f"the maps must be for the memory's {num_basis} basis functions", maps_basis, fix))
    if x_BLE.shape != (batch_size, length, width):
        rule = f"a segment must have shape {(batch_size, length, width)}"
        fix = "write whole segments, as wide as the memory, one for each row (write_B picks the rows)"
        raise ValueError(complaint(rule, tuple(x_BLE.shape), fix))
