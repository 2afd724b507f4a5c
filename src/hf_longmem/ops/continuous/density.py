"""Reading the continuous memory: one Gaussian density a query, in closed form, and its regulariser."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_longmem._errors import complaint
from hf_longmem.ops.continuous.basis import GaussianBasis, basis_parameters, negligible_exponent


class MemoryRead(NamedTuple):
    """What a read gives: the context, and the density that each query read with."""

    context_BHTD: Tensor
    mu_BHT: Tensor
    variance_BHT: Tensor


def summarise_coefficients(coefficients_BNE: Tensor, heads_2N: Tensor) -> Tensor:
    """Contract the coefficients with the two density heads: ``[w_mu; w_sigma] B``.

    The scores ``w . (K q / sqrt(D))`` with ``K = B W_K`` equal ``((w B) W_K) . q / sqrt(D)``, so that W_K projects two
    vectors in place of N, and no [T, N] matrix of scores is built.

    Args:
        coefficients_BNE: B [B, N, E].
        heads_2N: w_mu and w_sigma [2, N], shared by the attention heads.

    Returns:
        [B, 2, E] in the type of the coefficients.
    """
    with torch.autocast(coefficients_BNE.device.type, enabled=False):
        return heads_2N.to(coefficients_BNE.dtype) @ coefficients_BNE


def read_density(q_BHTD: Tensor, keys_BH2D: Tensor, *, variance_floor: float = 1e-4) -> tuple[Tensor, Tensor]:
    """Place each query's density: ``mu = sigmoid(w_mu . s)``, ``sigma^2 = max(softplus(w_sigma . s), floor)``.

    The scores are ``s = K q / sqrt(D)``.

    Args:
        q_BHTD: queries, not scaled [B, H, T, D].
        keys_BH2D: ``w_mu K`` and ``w_sigma K`` [B, H, 2, D], the projection of ``summarise_coefficients``.
        variance_floor: smallest sigma^2, at least 0, in units of the memory's length squared; the authors use 1e-4,
            and 1e-6 for sorting.

    Returns:
        mu and sigma^2, each [B, H, T], at least float32.

    Raises:
        ValueError: a negative floor.

    Source: Martins et al. 2021 (arXiv 2109.00301), section 3.1.
    """
    if not variance_floor >= 0:
        raise ValueError(complaint("variance_floor must not be negative", variance_floor, "use 1e-4"))
    dtype = torch.promote_types(torch.promote_types(q_BHTD.dtype, keys_BH2D.dtype), torch.float32)
    with torch.autocast(q_BHTD.device.type, enabled=False):
        scores_BHT2 = q_BHTD.to(dtype) @ keys_BH2D.to(dtype).mT * q_BHTD.shape[-1] ** -0.5
    mu_BHT = torch.sigmoid(scores_BHT2[..., 0])
    variance_BHT = F.softplus(scores_BHT2[..., 1]).clamp(min=variance_floor)
    return mu_BHT, variance_BHT


def read_values(mu_BHT: Tensor, variance_BHT: Tensor, v_BHND: Tensor, basis: GaussianBasis) -> Tensor:
    """Average the values under the densities: ``sum_j r_j V_j``, ``r_j = N(mu; m_j, sigma^2 + s_j^2)``.

    The normaliser of r is one number a query and width, so it multiplies the finished sums, and one table of distances
    serves every width: half the work of ``expected_basis(...) @ V``, and no large r in half precision.

    Args:
        mu_BHT: means [B, H, T], at least float32.
        variance_BHT: sigma^2 [B, H, T], at least float32.
        v_BHND: V [B, H, N, D], any floating type, in which the products are taken.
        basis: the N basis functions.

    Returns:
        [B, H, T, D] in the type of mu.

    Source: Martins et al. 2021 (arXiv 2109.00301), section 2.2.
    """
    if torch.is_grad_enabled() and (mu_BHT.requires_grad or variance_BHT.requires_grad or v_BHND.requires_grad):
        return _ReadValues.apply(mu_BHT, variance_BHT, v_BHND, basis)
    return _read_values(mu_BHT, variance_BHT, v_BHND, basis)


def _read_values(
    mu_BHT: Tensor, variance_BHT: Tensor, v_BHND: Tensor, basis: GaussianBasis, kept: list[Tensor] | None = None
) -> Tensor:
    """Average the values; ``kept`` takes what a backward pass needs: of each width the shape of r, and the sums."""
    context_BHTD = mu_BHT.new_zeros(())
    with torch.autocast(mu_BHT.device.type, enabled=False):
        for distance_BHTn, v_BHnD, width in _widths(mu_BHT, v_BHND, basis):
            total_BHT1 = variance_BHT.unsqueeze(-1) + width**2
            # In place: a fresh table of this size costs more than what is computed in it.
            exponent_BHTn = distance_BHTn.square().mul_(-0.5 / total_BHT1)
            shape_BHTn = exponent_BHTn.clamp_(min=negligible_exponent(mu_BHT.dtype)).exp_().to(v_BHND.dtype)
            sums_BHTD = shape_BHTn @ v_BHnD
            context_BHTD = context_BHTD + sums_BHTD * torch.rsqrt(2 * math.pi * total_BHT1)
            if kept is not None:
                kept += [shape_BHTn, sums_BHTD]
    return context_BHTD


def _widths(mu_BHT: Tensor, v_BHND: Tensor, basis: GaussianBasis) -> Iterator[tuple[Tensor, Tensor, float]]:
    """For each width of the basis: distances from the means to its n centres [B, H, T, n], its values, the width."""
    num_widths = len(basis.widths)
    centres_N, _ = basis_parameters(basis, device=mu_BHT.device, dtype=mu_BHT.dtype)
    for k, width in enumerate(basis.widths):
        if k == 0 or basis.num_basis % num_widths:  # otherwise every width has the same centres
            distance_BHTn = mu_BHT.unsqueeze(-1) - centres_N[k::num_widths]
        yield distance_BHTn, v_BHND[..., k::num_widths, :], width


class _ReadValues(torch.autograd.Function):
    """Reading, with a backward pass that keeps one table [B, H, T, N] and makes no sum of large terms that cancel.

    With ``r = n e^z``, ``n = (2 pi t)^-1/2``, ``z = -d^2 / 2t``, ``d = mu - m_j`` and ``t = sigma^2 + s_j^2``, and
    ``p_j = (n g . V_j) e^z_j`` for the context's gradient g: ``dL/dmu = -sum p_j d_j / t`` and
    ``dL/dsigma^2 = sum p_j d_j^2 / 2t^2 - n g . (sum e^z_j V_j) / 2t``.
    """

    @staticmethod
    def forward(ctx: Any, mu_BHT: Tensor, variance_BHT: Tensor, v_BHND: Tensor, basis: GaussianBasis) -> Tensor:
        kept: list[Tensor] = []
        context_BHTD = _read_values(mu_BHT, variance_BHT, v_BHND, basis, kept)
        ctx.basis = basis
        ctx.save_for_backward(mu_BHT, variance_BHT, v_BHND, *kept)
        return context_BHTD

    @staticmethod
    def backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        mu_BHT, variance_BHT, v_BHND, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            # Asked for a graph of the gradient, this is plain autograd.
            given = (mu_BHT, variance_BHT, v_BHND)
            inputs = [part for part, needed in zip(given, ctx.needs_input_grad, strict=False) if needed]
            found = iter(torch.autograd.grad(_read_values(*given, ctx.basis), inputs, grad_BHTD, create_graph=True))
            return *(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), None
        grad_mu_BHT, grad_variance_BHT = torch.zeros_like(mu_BHT), torch.zeros_like(variance_BHT)
        grad_v_BHND = torch.empty_like(v_BHND)
        num_widths = len(ctx.basis.widths)
        for k, (distance_BHTn, v_BHnD, width) in enumerate(_widths(mu_BHT, v_BHND, ctx.basis)):
            shape_BHTn, sums_BHTD = kept[2 * k], kept[2 * k + 1]
            total_BHT = variance_BHT + width**2
            scaled_BHTD = grad_BHTD * torch.rsqrt(2 * math.pi * total_BHT).unsqueeze(-1)
            narrow_BHTD = scaled_BHTD.to(v_BHND.dtype)
            grad_v_BHND[..., k::num_widths, :] = shape_BHTn.mT @ narrow_BHTD
            p_BHTn = (narrow_BHTD @ v_BHnD.mT).mul_(shape_BHTn).to(mu_BHT.dtype).mul_(distance_BHTn)
            grad_mu_BHT -= p_BHTn.sum(dim=-1) / total_BHT
            spread_BHT = p_BHTn.mul_(distance_BHTn).sum(dim=-1) / total_BHT
            grad_variance_BHT += (spread_BHT - (scaled_BHTD * sums_BHTD).sum(dim=-1)) / (2 * total_BHT)
        return grad_mu_BHT, grad_variance_BHT, grad_v_BHND, None


def read_memory(
    q_BHTD: Tensor,
    keys_BH2D: Tensor,
    v_BHND: Tensor,
    basis: GaussianBasis,
    *,
    variance_floor: float = 1e-4,
    written_B: Tensor | None = None,
) -> MemoryRead:
    """Read the memory: each query's density, and the expected value ``E[V(t)]`` under it.

    Args:
        q_BHTD: queries, not scaled [B, H, T, D].
        keys_BH2D: ``w_mu K`` and ``w_sigma K`` [B, H, 2, D]; see ``summarise_coefficients``.
        v_BHND: V = B W_V [B, H, N, D].
        basis: the memory's N basis functions.
        variance_floor: smallest sigma^2.
        written_B: which rows hold anything (bool [B]); the others read exact zeros, whatever biases made of V.

    Returns:
        context [B, H, T, D] in the type of q, and the densities in at least float32.

    Raises:
        ValueError: N of V and of the basis differ, or a negative floor.

    Source: Martins et al. 2021 (arXiv 2109.00301), sections 2.2 and 3.1.
    """
    if v_BHND.shape[-2] != basis.num_basis:
        rule = f"V must have one row for each of the {basis.num_basis} basis functions"
        raise ValueError(complaint(rule, v_BHND.shape[-2], "project the memory's own coefficients"))
    mu_BHT, variance_BHT = read_density(q_BHTD, keys_BH2D, variance_floor=variance_floor)
    context_BHTD = read_values(mu_BHT, variance_BHT, v_BHND, basis).to(q_BHTD.dtype)
    if written_B is not None:
        context_BHTD = torch.where(written_B[:, None, None, None], context_BHTD, 0.0)
    return MemoryRead(context_BHTD, mu_BHT, variance_BHT)


def gaussian_kl(
    variance: Tensor, prior_std: float, *, mu: Tensor | None = None, prior_mu: float | None = None
) -> Tensor:
    """Regularise widths: ``KL = 1/2 (sigma^2/sigma_0^2 - log(sigma^2/sigma_0^2) - 1)``.

    With means, the full divergence: ``(mu - mu_0)^2 / (2 sigma_0^2)`` more.

    Args:
        variance: sigma^2, positive, any shape [...].
        prior_std: sigma_0, positive.
        mu: means [...]; leave out, with prior_mu, to let densities sit anywhere at no cost.
        prior_mu: mu_0.

    Returns:
        KL(N(mu, sigma^2) || N(mu_0, sigma_0^2)) [...].

    Raises:
        ValueError: sigma_0 is not positive, or only one of mu and mu_0 is given.

    Source: Martins et al. 2021 (arXiv 2109.00301), section 3.1.
    """
    if not (math.isfinite(prior_std) and prior_std > 0):
        raise ValueError(complaint("prior_std must be positive and finite", prior_std, "use 0.05"))
    if (mu is None) != (prior_mu is None):
        raise ValueError(complaint("mu and prior_mu go together", "only one of them", "give both or neither"))
    ratio = variance / prior_std**2
    divergence = 0.5 * (ratio - torch.log(ratio) - 1)
    if mu is not None and prior_mu is not None:
        divergence = divergence + (mu - prior_mu).square() / (2 * prior_std**2)
    return divergence
