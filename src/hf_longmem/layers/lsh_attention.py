"""Multi-head attention with shared queries and keys, restricted by angular hashing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_longmem.layers.attention_cache import AttentionCache, past_reach
from hf_longmem.layers.positions import rotate
from hf_longmem.ops.lsh import draw_rotations, hash_vectors, lsh_attention, seeded_rotations
from hf_longmem.ops.lsh.naive import lsh_attention_weights
from hf_longmem.ops.lsh.sorting import Candidates, Merge


class LSHAttention(nn.Module):
    """Project to shared queries/keys and values, hash, attend to what shares a bucket, project back.

    Training draws fresh rotations from torch's default generator in every call; evaluation, and a call with
    ``hash_seed`` or a cache, uses those that the seed and the layer's index determine.

    Args:
        hidden_size, num_heads, head_dim: E, H and D.
        layer_idx: index of the layer, so that layers of one seed hash differently.
        num_hashes, num_buckets: R, and K or its even factors.
        hash_seed: seed of evaluation's rotations, from 0 to 2^63 - 1.
        chunk_length, chunks_before, chunks_after, causal, candidates, merge, pad_beyond, pad_to_multiple_of: as in
            :func:`hf_longmem.ops.lsh.lsh_attention`.
        dropout: of the attention weights.

    Source: Kitaev et al. 2020, section 2.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        layer_idx: int,
        num_hashes: int,
        num_buckets: int | Sequence[int],
        hash_seed: int = 0,
        chunk_length: int,
        chunks_before: int = 1,
        chunks_after: int = 0,
        causal: bool = True,
        candidates: Candidates = "bucket",
        merge: Merge = "union",
        pad_beyond: int = 0,
        pad_to_multiple_of: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_hashes = num_hashes
        self.num_buckets = num_buckets
        self.hash_seed = hash_seed
        self.dropout = dropout
        self.reach: dict[str, Any] = {
            "chunk_length": chunk_length,
            "chunks_before": chunks_before,
            "chunks_after": chunks_after,
            "causal": causal,
            "candidates": candidates,
            "merge": merge,
            "pad_beyond": pad_beyond,
            "pad_to_multiple_of": pad_to_multiple_of,
        }
        self.qk_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
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
            rotary: cosines and sines of the positions. They turn vectors before hashing: the pairs to find are
                those whose turned vectors agree, because these get the large weights.
            num_hashes: rounds of this call instead of the layer's own.
            hash_seed: seed of this call's rotations, in training too.
            output_attentions: compute by the dense twin, O(T^2), and return its weights.
            cache: attends with these tokens to those it remembers, in place of the operator.
            document_ids: ``[B, T]``, of documents packed in a row, which do not see each other; not with a cache.

        Returns:
            ``[B, T, E]``, and weights ``[B, H, T, T]`` (rows sum to 1) or None.
        """
        qk_BHTD = self._split_heads(self.qk_proj(hidden_states))
        v_BHTD = self._split_heads(self.v_proj(hidden_states))
        if rotary is not None:
            qk_BHTD = rotate(qk_BHTD, rotary)
        # What a cache remembers was hashed in earlier calls.
        fresh = self.training and hash_seed is None and cache is None
        buckets_BHRT = hash_vectors(qk_BHTD, self._rotations(qk_BHTD, num_hashes, hash_seed, fresh), self.num_buckets)
        dropout = self.dropout if self.training else 0.0
        real: dict[str, Any] = {"attention_mask": attention_mask, "document_ids": document_ids}
        weights_BHTT = None
        if cache is not None:
            rounds, seed = buckets_BHRT.shape[2], self.hash_seed if hash_seed is None else hash_seed
            out_BHTD = cache.attend(
                qk_BHTD,
                v_BHTD,
                buckets_BHRT,
                attention_mask,
                hashing=(rounds, seed),
                num_buckets=self.num_buckets,
                **past_reach(self.reach),
            )
        elif output_attentions:
            weights_BHTT = lsh_attention_weights(qk_BHTD, buckets_BHRT, **real, **self.reach)
            # A token that sees only itself keeps its value, whatever the dropout.
            lonely_BHT1 = weights_BHTT.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) != 0
            dropped_BHTT = torch.where(lonely_BHT1, weights_BHTT, nn.functional.dropout(weights_BHTT, dropout))
            out_BHTD = dropped_BHTT @ v_BHTD
        else:
            out_BHTD = lsh_attention(qk_BHTD, v_BHTD, buckets_BHRT, **real, dropout=dropout, **self.reach)
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(2)), weights_BHTT

    def _split_heads(self, x_BTE: Tensor) -> Tensor:
        return x_BTE.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _rotations(self, qk_BHTD: Tensor, num_hashes: int | None, hash_seed: int | None, fresh: bool) -> Tensor:
        sizes = (self.num_heads, self.head_dim, num_hashes or self.num_hashes, self.num_buckets)
        dtype = torch.promote_types(qk_BHTD.dtype, torch.float32)
        if fresh:
            return draw_rotations(*sizes, device=qk_BHTD.device, dtype=dtype)
        seed = self.hash_seed if hash_seed is None else hash_seed
        return seeded_rotations(seed, self.layer_idx, *sizes, device=qk_BHTD.device, dtype=dtype)
