"""The position-wise feed-forward part, computed in chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from hf_longmem.ops.chunking import apply_in_chunks


class FeedForward(nn.Module):
    """``down(act(dropout(up(x))))``, at most ``chunk_size`` tokens at a time.

    Args:
        hidden_size: width E.
        inner_size: width between the two projections.
        activation: elementwise function.
        dropout: probability, applied before the activation as in the Reformer of Trax and transformers.
        chunk_size: tokens per chunk, 0 for all at once; any length works.

    Source: Kitaev et al. 2020, section "Reversible Transformer", chunking.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        *,
        activation: Callable[[Tensor], Tensor],
        dropout: float = 0.0,
        chunk_size: int = 0,
    ) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, inner_size)
        self.down_proj = nn.Linear(inner_size, hidden_size)
        self.act_fn = activation
        self.dropout = dropout
        self.chunk_size = chunk_size

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[B, T, E]`` to ``[B, T, E]``."""
        return apply_in_chunks(self._forward_chunk, self.chunk_size, 1, hidden_states)

    def _forward_chunk(self, hidden_states: Tensor) -> Tensor:
        inner = nn.functional.dropout(self.up_proj(hidden_states), self.dropout, self.training)
        return self.down_proj(self.act_fn(inner))
