"""The Gaussian basis of the continuous memory, and its expectation under a Gaussian density."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_longmem._errors import complaint


@dataclass(frozen=True)
class GaussianBasis:
    """``N`` Gaussian densities on [0, 1]: ``psi_j(t) = N(t; m_j, s_j^2)``.

    Function j has width ``widths[j % W]``, for W widths; the functions that share a width have evenly spaced centres,
    the first at 0 and the last at 1 (a lone one sits at 1/2). For N a multiple of W that is the authors' order
    (m_0, s_0), (m_0, s_1), ..., (m_1, s_0), ...; any other N works as well.

    The value is hashable: equal bases share what was computed for them.

    Args:
        num_basis: N, at least the number of widths.
        widths: standard deviations s, in units of the memory's length.

    Raises:
        ValueError: no width, a width that is not a positive finite number, fewer functions than widths.

    Source: Martins et al. 2021 (arXiv 2109.00301), section 2.2.

    >>> GaussianBasis(4, (0.05, 0.1)).centres
    (0.0, 0.0, 1.0, 1.0)
    """

    num_basis: int
    widths: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(float(width) for width in self.widths))
        if not self.widths:
            raise ValueError(complaint("a Gaussian basis needs at least one width", self.widths, "use (0.01, 0.05)"))
        for width in self.widths:
            if not (math.isfinite(width) and width > 0):
                fix = "use a fraction of the memory's length such as 0.01"
                raise ValueError(complaint("every basis width must be positive and finite", width, fix))
        if not isinstance(self.num_basis, int) or self.num_basis < len(self.widths):
            rule = f"num_basis must be a whole number of at least {len(self.widths)}, one for each width"
            raise ValueError(complaint(rule, self.num_basis, "use more basis functions or fewer widths"))

    @property
    def centres(self) -> tuple[float, ...]:
        """The centres m_j, in the order of the basis functions."""
        num_widths = len(self.widths)
        centres = []
        for j in range(self.num_basis):
            row, offset = divmod(j, num_widths)
            same_width = (self.num_basis - offset + num_widths - 1) // num_widths
            centres.append(row / (same_width - 1) if same_width > 1 else 0.5)
        return tuple(centres)


@functools.lru_cache(maxsize=32)
def _basis_parameters(basis: GaussianBasis, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # A tensor born under inference mode could never be used for training later, and this one is shared.
    with torch.inference_mode(False):
        widths = [basis.widths[j % len(basis.widths)] for j in range(basis.num_basis)]
        centres_N = torch.tensor(basis.centres, dtype=torch.float64, device="cpu")
        widths_N = torch.tensor(widths, dtype=torch.float64, device="cpu")
        return centres_N.to(device=device, dtype=dtype), widths_N.to(device=device, dtype=dtype)


@torch.compiler.assume_constant_result
def basis_parameters(
    basis: GaussianBasis, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Give the centres ``m_j`` and widths ``s_j`` as tensors, the same ones to every caller: do not write into them.

    Args:
        basis: the basis.
        device: where the tensors are to live; moved there once.
        dtype: floating type; computed in float64 and rounded once.

    Returns:
        centres [N] and widths [N].
    """
    return _basis_parameters(basis, torch.device(device), dtype)


def evaluate_basis(positions: Tensor, centres_N: Tensor, widths_N: Tensor) -> Tensor:
    """Evaluate ``psi_j(t) = exp(-(t - m_j)^2 / (2 s_j^2)) / (s_j sqrt(2 pi))``.

    Args:
        positions: t, any shape [...]; usually in [0, 1], anything is allowed.
        centres_N: m [N].
        widths_N: s [N].

    Returns:
        psi [..., N] in the promoted type of the arguments; never less than ``e^-40`` of a function's peak (float64:
        ``e^-300``), see ``negligible_exponent``.
    """
    psi = positions.unsqueeze(-1) - centres_N
    # In place, which autograd sees through: allocating so large a table anew at each step costs more than the step.
    psi = psi.div_(widths_N).square_().mul_(-0.5).clamp_(min=negligible_exponent(psi.dtype)).exp_()
    return psi / (widths_N * math.sqrt(2 * math.pi))


def negligible_exponent(dtype: torch.dtype) -> float:
    """Give an exponent z below which e^z counts for nothing beside 1, and above which no product of it is subnormal.

    Arithmetic on subnormal numbers is up to a hundred times slower, and a narrow Gaussian's tail is full of them.
    """
    return -300.0 if dtype == torch.float64 else -40.0


def expected_basis(mu: Tensor, variance: Tensor, centres_N: Tensor, widths_N: Tensor) -> Tensor:
    """Integrate the basis against N(mu, sigma^2): ``r_j = E[psi_j(t)] = N(mu; m_j, sigma^2 + s_j^2)``.

    Two Gaussians convolve into one, so the integral is closed, and plain autograd through it keeps its digits in
    float32 however small sigma is.

    Args:
        mu: mean of the density [...].
        variance: sigma^2 [...], at least 0, in units of the memory's length squared.
        centres_N: m [N].
        widths_N: s [N].

    Returns:
        r [..., N], at least float32.

    Source: Martins et al. 2021 (arXiv 2109.00301), section 2.2.
    """
    mu, variance = _at_least_float32(mu), _at_least_float32(variance)
    total = variance.unsqueeze(-1) + widths_N.square()
    distance = mu.unsqueeze(-1) - centres_N
    return torch.exp(-0.5 * distance.square() / total) * torch.rsqrt(2 * math.pi * total)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
