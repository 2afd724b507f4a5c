"""Reading the continuous memory: one Gaussian density a query, in closed form, and its regulariser."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_longmem._errors import complaint
from hf_longmem.ops.continuous.basis import GaussianBasis, basis_parameters, expected_basis, negligible_exponent

# Numbers in a table of queries and basis functions: a megabyte stays in a core's cache, and is not allocated anew.
_CPU_TILE = 2**18
_TILE = 2**24


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
    dtype = torch.promote_types(torch.promote_types(q_BHTD.dtype, keys_BH2D.dtype), torch.float32)
    with torch.autocast(q_BHTD.device.type, enabled=False):
        scores_BHT2 = q_BHTD.to(dtype) @ keys_BH2D.to(dtype).mT * q_BHTD.shape[-1] ** -0.5
    return _place(scores_BHT2, variance_floor)


def read_density_of_inputs(
    x_BTE: Tensor, weight_HDE: Tensor, keys_BH2D: Tensor, *, variance_floor: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """Place the densities of queries ``q = W_Q x`` without forming them: ``(W_Q x) . k = x . (W_Q^T k)``.

    Two vectors a head are projected in place of T: less work for more than two tokens.

    Args:
        x_BTE: inputs of the queries [B, T, E].
        weight_HDE: W_Q by heads [H, D, E].
        keys_BH2D: ``w_mu K`` and ``w_sigma K`` [B, H, 2, D].
        variance_floor: smallest sigma^2.

    Returns:
        what ``read_density`` gives: mu and sigma^2, each [B, H, T], at least float32.

    Raises:
        ValueError: a negative floor.
    """
    dtype = torch.promote_types(torch.promote_types(x_BTE.dtype, keys_BH2D.dtype), torch.float32)
    with torch.autocast(x_BTE.device.type, enabled=False):
        scorers_BH2E = keys_BH2D.to(dtype) @ weight_HDE.to(dtype) * weight_HDE.shape[1] ** -0.5
        scores_BTX = x_BTE.to(dtype) @ scorers_BH2E.flatten(1, 2).mT
    return _place(scores_BTX.unflatten(-1, (-1, 2)).transpose(1, 2), variance_floor)


def _place(scores_BHT2: Tensor, variance_floor: float) -> tuple[Tensor, Tensor]:
    if not variance_floor >= 0:
        raise ValueError(complaint("variance_floor must not be negative", variance_floor, "use 1e-4"))
    return torch.sigmoid(scores_BHT2[..., 0]), F.softplus(scores_BHT2[..., 1]).clamp(min=variance_floor)


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
    v_BHND = v_BHND.expand(*mu_BHT.shape[:2], -1, -1)
    if torch.is_grad_enabled() and (mu_BHT.requires_grad or variance_BHT.requires_grad or v_BHND.requires_grad):
        return _ReadValues.apply(mu_BHT, variance_BHT, v_BHND, basis)
    return _average(mu_BHT, variance_BHT, v_BHND, basis)


class _Width(NamedTuple):
    """The basis functions of one width, the values at them (X = B H), and two tables [x, t, n] to work in."""

    width: float
    centres_n: Tensor
    v_XnD: Tensor
    distance: Tensor
    shape: Tensor

    def fill(self, mu_xt: Tensor, variance_xt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute ``d = mu - m_j`` and ``e^(-d^2 / 2t)`` in the tables, and ``t = sigma^2 + s^2`` [x, t, 1]."""
        total_xt1 = variance_xt.unsqueeze(-1) + self.width**2
        size = (*mu_xt.shape, len(self.centres_n))
        distance_xtn, shape_xtn = (table[: math.prod(size)].view(size) for table in (self.distance, self.shape))
        torch.sub(mu_xt.unsqueeze(-1), self.centres_n, out=distance_xtn)
        torch.mul(distance_xtn, distance_xtn, out=shape_xtn)
        shape_xtn.mul_(-0.5 / total_xt1).clamp_(min=negligible_exponent(mu_xt.dtype)).exp_()
        return distance_xtn, shape_xtn, total_xt1


def _prepare(
    mu_BHT: Tensor, variance_BHT: Tensor, v_BHND: Tensor, basis: GaussianBasis
) -> tuple[Tensor, Tensor, list[_Width], list[tuple[slice, slice]]]:
    """Means and variances [X, T], the widths, and tiles of heads and queries: whole heads if their table fits one."""
    heads, tokens = mu_BHT.shape[:2].numel(), mu_BHT.shape[2]
    num_widths = len(basis.widths)
    most = -(-basis.num_basis // num_widths)
    tile = _CPU_TILE if mu_BHT.device.type == "cpu" else _TILE
    queries = max(1, min(tokens, tile // most))
    together = max(1, min(heads, tile // (queries * most)))
    tiles = [
        (slice(head, head + together), slice(query, query + queries))
        for head in range(0, heads, together)
        for query in range(0, tokens, queries)
    ]
    centres_N, _ = basis_parameters(basis, device=mu_BHT.device, dtype=mu_BHT.dtype)
    tables = mu_BHT.new_empty(2, together * queries * most)
    widths = [
        _Width(width, centres_N[k::num_widths], v_BHND[..., k::num_widths, :].flatten(0, 1).contiguous(), *tables)
        for k, width in enumerate(basis.widths)
    ]
    return mu_BHT.flatten(0, 1), variance_BHT.flatten(0, 1), widths, tiles


@torch.no_grad()
def _average(mu_BHT: Tensor, variance_BHT: Tensor, v_BHND: Tensor, basis: GaussianBasis) -> Tensor:
    """Read some queries at a time, in tables that stay in the processor's cache: no [T, N] is ever held."""
    mu_XT, variance_XT, widths, tiles = _prepare(mu_BHT, variance_BHT, v_BHND, basis)
    context_XTD = mu_BHT.new_empty(*mu_XT.shape, v_BHND.shape[-1])
    with torch.autocast(mu_BHT.device.type, enabled=False):
        for x, t in tiles:
            for k, one in enumerate(widths):
                _, shape_xtn, total_xt1 = one.fill(mu_XT[x, t], variance_XT[x, t])
                sums_xtD = shape_xtn.to(v_BHND.dtype) @ one.v_XnD[x]
                part_xtD = sums_xtD * torch.rsqrt(2 * math.pi * total_xt1)
                if k == 0:
                    context_XTD[x, t] = part_xtD
                else:
                    context_XTD[x, t] += part_xtD
    return context_XTD.unflatten(0, mu_BHT.shape[:2])


class _ReadValues(torch.autograd.Function):
    """Reading whose backward pass computes its tables anew, and makes no sum of large terms that cancel.

    With ``d_j = mu - m_j``, ``t = sigma^2 + s_j^2``, ``r_j = n e^(-d_j^2 / 2t)`` and ``p_j = r_j V_j . g`` for the
    context's gradient g: ``dL/dmu = -sum p_j d_j / t`` and ``dL/dsigma^2 = sum p_j (d_j^2 / t - 1) / 2t``.
    """

    @staticmethod
    def forward(ctx: Any, mu_BHT: Tensor, variance_BHT: Tensor, v_BHND: Tensor, basis: GaussianBasis) -> Tensor:
        ctx.basis = basis
        ctx.save_for_backward(mu_BHT, variance_BHT, v_BHND)
        return _average(mu_BHT, variance_BHT, v_BHND, basis)

    @staticmethod
    def backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        mu_BHT, variance_BHT, v_BHND = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *_average_backward(mu_BHT, variance_BHT, v_BHND, grad_BHTD, ctx.basis), None
        # Asked for a graph of the gradient, this is plain autograd.
        # Views, since one argument may have been made of another, by a graph that is not this function's.
        mu_BHT, variance_BHT, v_BHND = given = [part.view_as(part) for part in ctx.saved_tensors]
        inputs = [part for part, needed in zip(given, ctx.needs_input_grad, strict=False) if needed]
        context_BHTD = _differentiable_average(mu_BHT, variance_BHT, v_BHND, ctx.basis)
        found = iter(torch.autograd.grad(context_BHTD, inputs, grad_BHTD, create_graph=True))
        return *(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), None


def _average_backward(
    mu_BHT: Tensor, variance_BHT: Tensor, v_BHND: Tensor, grad_BHTD: Tensor, basis: GaussianBasis
) -> tuple[Tensor, Tensor, Tensor]:
    mu_XT, variance_XT, widths, tiles = _prepare(mu_BHT, variance_BHT, v_BHND, basis)
    grad_XTD = grad_BHTD.flatten(0, 1)
    grad_mu_XT, grad_variance_XT = torch.zeros_like(mu_XT), torch.zeros_like(mu_XT)
    grads_XnD = [torch.zeros_like(one.v_XnD, dtype=mu_BHT.dtype) for one in widths]
    with torch.autocast(mu_BHT.device.type, enabled=False):
        for x, t in tiles:
            for one, grad_XnD in zip(widths, grads_XnD, strict=True):
                distance_xtn, shape_xtn, total_xt1 = one.fill(mu_XT[x, t], variance_XT[x, t])
                scaled_xtD = (grad_XTD[x, t] * torch.rsqrt(2 * math.pi * total_xt1)).to(v_BHND.dtype)
                grad_XnD[x] += shape_xtn.to(v_BHND.dtype).mT @ scaled_xtD
                p_xtn = shape_xtn.mul_(scaled_xtD @ one.v_XnD[x].mT)
                total_xt, sum_xt = total_xt1.squeeze(-1), p_xtn.sum(dim=-1)
                grad_mu_XT[x, t] -= p_xtn.mul_(distance_xtn).sum(dim=-1) / total_xt
                spread_xt = p_xtn.mul_(distance_xtn).sum(dim=-1) / total_xt
                grad_variance_XT[x, t] += (spread_xt - sum_xt) / (2 * total_xt)
    grad_v_BHND = torch.empty_like(v_BHND)
    for k, grad_XnD in enumerate(grads_XnD):
        grad_v_BHND[..., k :: len(widths), :] = grad_XnD.unflatten(0, mu_BHT.shape[:2])
    return grad_mu_XT.view_as(mu_BHT), grad_variance_XT.view_as(mu_BHT), grad_v_BHND


def _differentiable_average(mu_BHT: Tensor, variance_BHT: Tensor, v_BHND: Tensor, basis: GaussianBasis) -> Tensor:
    r_BHTN = expected_basis(mu_BHT, variance_BHT, *basis_parameters(basis, device=mu_BHT.device, dtype=mu_BHT.dtype))
    return (r_BHTN.to(v_BHND.dtype) @ v_BHND).to(mu_BHT.dtype)


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
    mu_BHT, variance_BHT = read_density(q_BHTD, keys_BH2D, variance_floor=variance_floor)
    context_BHTD = read_context(mu_BHT, variance_BHT, v_BHND, basis, written_B=written_B)
    return MemoryRead(context_BHTD.to(q_BHTD.dtype), mu_BHT, variance_BHT)


def read_context(
    mu_BHT: Tensor, variance_BHT: Tensor, v_BHND: Tensor, basis: GaussianBasis, *, written_B: Tensor | None = None
) -> Tensor:
    """Read with densities already placed: ``read_values``, and exact zeros in rows that hold nothing.

    Args:
        mu_BHT, variance_BHT: the densities [B, H, T].
        v_BHND: V = B W_V [B, H, N, D].
        basis: the memory's N basis functions.
        written_B: which rows hold anything (bool [B], default all).

    Returns:
        [B, H, T, D] in the type of mu.

    Raises:
        ValueError: N of V and of the basis differ.
    """
    if v_BHND.shape[-2] != basis.num_basis:
        rule = f"V must have one row for each of the {basis.num_basis} basis functions"
        raise ValueError(complaint(rule, v_BHND.shape[-2], "project the memory's own coefficients"))
    context_BHTD = read_values(mu_BHT, variance_BHT, v_BHND, basis)
    if written_B is not None:
        context_BHTD = torch.where(written_B[:, None, None, None], context_BHTD, 0.0)
    return context_BHTD


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
