"""Multi-head attention over a window of neighbouring tokens."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from hf_longmem.layers.attention_cache import AttentionCache, past_reach
from hf_longmem.layers.positions import rotate
from hf_longmem.ops.local import local_attention
from hf_longmem.ops.local.naive import local_attention_weights


class LocalAttention(nn.Module):
    """Project to queries, keys and values, attend within a window, project back.

    Args:
        hidden_size, num_heads, head_dim: E, H and D.
        rule, chunk_length, chunks_before, chunks_after, causal: as in :func:`hf_longmem.ops.local.local_attention`.
        dropout: of the attention weights.

    Source: Kitaev et al. 2020, the local layers of the published models.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        rule: Literal["sliding", "chunk"] = "sliding",
        chunk_length: int,
        chunks_before: int = 1,
        chunks_after: int = 0,
        causal: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.dropout = dropout
        self.reach: dict[str, Any] = {
            "rule": rule,
            "chunk_length": chunk_length,
            "chunks_before": chunks_before,
            "chunks_after": chunks_after,
            "causal": causal,
        }
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        *,
        num_hashes: int | None = None,
        hash_seed: int | None = None,
        output_attentions: bool = False,
        cache: AttentionCache | None = None,
        document_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: ``[B, T, E]``.
            attention_mask: bool ``[B, T]``, true for real tokens.
            rotary: cosines and sines of the positions.
            num_hashes, hash_seed: unused, so that both kinds of attention are called alike.
            output_attentions: compute by the dense twin, O(T^2), and return its weights.
            cache: attends with these tokens to those it remembers, in place of the operator.
            document_ids: ``[B, T]``, of documents packed in a row, which do not see each other; not with a cache.

        Returns:
            ``[B, T, E]``, and weights ``[B, H, T, T]`` (rows of real tokens sum to 1) or None.
        """
        q_BHTD = self._split_heads(self.q_proj(hidden_states))
        k_BHTD = self._split_heads(self.k_proj(hidden_states))
        v_BHTD = self._split_heads(self.v_proj(hidden_states))
        if rotary is not None:
            q_BHTD, k_BHTD = rotate(q_BHTD, rotary), rotate(k_BHTD, rotary)
        dropout = self.dropout if self.training else 0.0
        real: dict[str, Any] = {"attention_mask": attention_mask, "document_ids": document_ids}
        weights_BHTT = None
        if cache is not None:
            out_BHTD = cache.attend(q_BHTD, k_BHTD, v_BHTD, attention_mask, **past_reach(self.reach))
        elif output_attentions:
            weights_BHTT = local_attention_weights(q_BHTD, k_BHTD, **real, **self.reach)
            out_BHTD = nn.functional.dropout(weights_BHTT, dropout) @ v_BHTD
        else:
            out_BHTD = local_attention(q_BHTD, k_BHTD, v_BHTD, **real, dropout=dropout, **self.reach)
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(2)), weights_BHTT

    def _split_heads(self, x_BTE: Tensor) -> Tensor:
        return x_BTE.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
