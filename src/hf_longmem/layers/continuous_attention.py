"""Multi-head attention over the continuous long-term memory."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from hf_longmem.layers.plain_linear import is_plain
from hf_longmem.ops.continuous import (
    MemoryState,
    RegressionSpec,
    WriteMaps,
    convolution_gate,
    empty_memory,
    gaussian_kl,
    read_context,
    read_density,
    read_density_of_inputs,
    record_attention,
    select_write_maps,
    sticky_positions,
    sticky_samples,
    summarise_coefficients,
    uniform_write_maps,
    write_maps,
    write_memory,
)
from hf_longmem.ops.continuous.memory import Draw

# Up to so many, forming the queries is as little work as doing without.
_FEW_QUERIES = 4


class MemoryProjection(NamedTuple):
    """A memory as the attention heads see it; it changes only when the memory does.

    keys_BH2D: ``w_mu K`` and ``w_sigma K`` [B, H, 2, D].
    v_BHND: ``V = B W_V`` [B, H, N, D].
    written_B: which rows hold anything, bool [B].
    """

    keys_BH2D: Tensor
    v_BHND: Tensor
    written_B: Tensor


class ContinuousAttention(nn.Module):
    """Write segments into a continuous memory, and read it with one Gaussian density for each query and head.

    The module holds parameters only: a memory is given to it and given back.

    Args:
        hidden_size, num_heads, head_dim: E, H and D.
        spec: basis and regression of the memory.
        decay: the share tau of the line that the past keeps at a write, or ``"uniform"``.
        uniform_segments: after so many segments a uniform decay stays as it is; default, as many as there are centres.
        sticky: sample the past where it was attended to.
        draw: how, ``"inverse_cdf"`` or ``"multinomial"`` (from torch's default generator).
        num_bins: K, bins of the histogram of attention.
        variance_floor: smallest sigma^2.
        prior_std: sigma_0 of the regulariser.
        gate: weaken what is written by a learned convolution.
        zero_init: start the output projection at zero, so that adding the memory changes nothing at first.

    Source: Martins et al. 2021 (arXiv 2109.00301), section 3.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        spec: RegressionSpec,
        decay: float | Literal["uniform"] = 0.75,
        uniform_segments: int | None = None,
        sticky: bool = False,
        draw: Draw = "inverse_cdf",
        num_bins: int = 128,
        variance_floor: float = 1e-4,
        prior_std: float = 0.05,
        gate: bool = False,
        zero_init: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.spec = spec
        self.decay = decay
        self.uniform_segments = uniform_segments or spec.basis.num_basis // len(spec.basis.widths)
        self.sticky = sticky
        self.draw = draw
        self.num_bins = num_bins
        self.variance_floor = variance_floor
        self.prior_std = prior_std
        self.zero_init = zero_init
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.density_heads = nn.Parameter(torch.empty(2, spec.basis.num_basis))
        self.gate = nn.Conv1d(hidden_size, hidden_size, 3, padding=1) if gate else None
        bound = spec.basis.num_basis**-0.5
        nn.init.uniform_(self.density_heads, -bound, bound)
        if zero_init:
            nn.init.zeros_(self.o_proj.weight)

    def empty(self, batch_size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> MemoryState:
        """Make a memory that holds nothing, float32 (or float64)."""
        num_basis, width = self.spec.basis.num_basis, self.q_proj.in_features
        return empty_memory(batch_size, num_basis, width, num_bins=self.num_bins, dtype=dtype, device=device)

    def write(self, memory: MemoryState, x_BLE: Tensor, write_B: Tensor | None = None) -> MemoryState:
        """Append a whole segment ``[B, L, E]`` to the memory of the rows ``write_B`` (default all)."""
        if self.gate is not None:
            x_BLE = convolution_gate(x_BLE, self.gate.weight, self.gate.bias)
        samples_BMN = None
        if self.sticky:
            positions_BM = sticky_positions(memory.histogram_BK, self.spec.num_samples, draw=self.draw)
            samples_BMN = sticky_samples(positions_BM, self.spec.basis)
        return write_memory(memory, x_BLE, self._maps(memory), write_B=write_B, samples_BMN=samples_BMN)

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in: of a parameter that no quantisation of linear layers touches."""
        return self.density_heads.dtype

    def unused(self) -> Tensor:
        """Give a zero that depends on the parameters which only a write uses, so that each call gives them a gradient.

        Without one, data-parallel training would wait for it.
        """
        zero = self.density_heads.new_zeros(())
        return zero if self.gate is None else sum((p.sum() * 0 for p in self.gate.parameters()), zero)

    def project(self, memory: MemoryState) -> MemoryProjection:
        """Project a memory to keys and values, to be read until the next write."""
        coefficients_BNE = memory.coefficients_BNE
        summary_B2E = summarise_coefficients(coefficients_BNE, self.density_heads)
        keys_BH2D = self._split_heads(self.k_proj(summary_B2E.to(self.dtype)))
        v_BHND = self._split_heads(self.v_proj(coefficients_BNE.to(self.dtype)))
        return MemoryProjection(keys_BH2D, v_BHND, memory.segments_B > 0)

    def forward(
        self,
        hidden_states: Tensor,
        projection: MemoryProjection,
        memory: MemoryState,
        query_mask: Tensor | None = None,
    ) -> tuple[Tensor, MemoryState, Tensor]:
        """Read.

        Args:
            hidden_states: the queries' inputs ``[B, T, E]``.
            projection: what is read.
            memory: what it was projected from; sticky memories record in it where attention went.
            query_mask: bool ``[B, T]``, true for real tokens.

        Returns:
            ``[B, T, E]``, zeros in rows that never wrote; the memory with the attention recorded; each token's
            regulariser ``[B, T]``, the mean over heads, 0 for padding and in rows that never wrote.
        """
        keys_BH2D, v_BHND, written_B = projection
        if hidden_states.shape[1] > _FEW_QUERIES and is_plain(self.q_proj):
            weight_HDE = self.q_proj.weight.unflatten(0, (self.num_heads, self.head_dim))
            mu_BHT, variance_BHT = read_density_of_inputs(
                hidden_states, weight_HDE, keys_BH2D, variance_floor=self.variance_floor
            )
        else:
            q_BHTD = self._split_heads(self.q_proj(hidden_states))
            mu_BHT, variance_BHT = read_density(q_BHTD, keys_BH2D, variance_floor=self.variance_floor)
        context_BHTD = read_context(mu_BHT, variance_BHT, v_BHND, self.spec.basis, written_B=written_B)
        if self.sticky:
            memory = record_attention(memory, mu_BHT, variance_BHT, query_mask_BT=query_mask)
        counted_BT = projection.written_B[:, None].expand(hidden_states.shape[:2])
        if query_mask is not None:
            counted_BT = counted_BT & query_mask
        divergence_BT = gaussian_kl(variance_BHT, self.prior_std).mean(dim=1)
        divergence_BT = torch.where(counted_BT, divergence_BT, torch.zeros_like(divergence_BT))
        out_BTE = self.o_proj(context_BHTD.to(self.dtype).transpose(1, 2).flatten(2))
        return out_BTE, memory, divergence_BT

    def _maps(self, memory: MemoryState) -> WriteMaps:
        place = {"device": memory.coefficients_BNE.device, "dtype": memory.coefficients_BNE.dtype}
        if self.decay == "uniform":
            table = uniform_write_maps(self.spec, self.uniform_segments, sticky=self.sticky, **place)
            return select_write_maps(table, memory.segments_B)
        return write_maps(self.spec, self.decay, sticky=self.sticky, **place)

    def _split_heads(self, x_BTE: Tensor) -> Tensor:
        return x_BTE.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
