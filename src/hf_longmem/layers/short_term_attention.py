"""Multi-head attention of new tokens to those of a window before them and to each other."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from hf_longmem.layers.positions import rotary_angles, rotate
from hf_longmem.ops.relative import relative_scores, relative_scores_of_last, sinusoids


class ShortTermAttention(nn.Module):
    """Attend over given keys, whose places in the window, and nothing else, are their positions.

    Keys are kept without positions and get them at every use, counted within the window: no number grows with the
    length of a document.

    Args:
        hidden_size, num_heads, head_dim: E, H and D.
        positions: ``"rotary"``, or ``"relative"`` as in Transformer-XL.
        theta: base of their frequencies.
        dropout: of the attention weights.

    Source: Dai et al. 2019 (arXiv 1901.02860), section 3; Su et al. 2021 for rotary positions.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        positions: Literal["rotary", "relative"] = "rotary",
        theta: float = 10000.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.positions = positions
        self.theta = theta
        self.dropout = dropout
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        if positions == "relative":
            self.r_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
            self.content_bias = nn.Parameter(torch.zeros(num_heads, head_dim))
            self.position_bias = nn.Parameter(torch.zeros(num_heads, head_dim))

    def keys_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Project ``[B, S, E]`` to keys without positions and values, each ``[B, S, H D]``."""
        return self.k_proj(hidden_states), self.v_proj(hidden_states)

    def forward(
        self, hidden_states: Tensor, keys: Tensor, values: Tensor, places: Tensor, first: int, mask: Tensor
    ) -> Tensor:
        """Attend.

        Args:
            hidden_states: the new tokens ``[B, T, E]``.
            keys, values: those of the window, the new tokens among them ``[B, S, H D]``.
            places: where the new tokens stand in the window, integers ``[B or 1, T]``; with one row, they are the last
                of the keys.
            first: place of the first key.
            mask: bool ``[B or 1, T, S]``, which keys each query sees; at least one.

        Returns:
            ``[B, T, E]``.
        """
        q_BHTD = self._split_heads(self.q_proj(hidden_states))
        k_BHSD, v_BHSD = self._split_heads(keys).to(q_BHTD.dtype), self._split_heads(values).to(q_BHTD.dtype)
        bias = mask[:, None]
        key_places = torch.arange(first, first + k_BHSD.shape[2], device=places.device)
        if self.positions == "relative":
            hidden = torch.where(bias, 0.0, float("-inf")).to(q_BHTD.dtype)
            bias = self._distance_scores(q_BHTD, places, key_places) + hidden
            q_BHTD = q_BHTD + self.content_bias[:, None].to(q_BHTD.dtype)
        else:
            q_BHTD = rotate(q_BHTD, rotary_angles(places, self.head_dim, self.theta))
            k_BHSD = rotate(k_BHSD, rotary_angles(key_places[None], self.head_dim, self.theta))
        dropout = self.dropout if self.training else 0.0
        out_BHTD = nn.functional.scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD, attn_mask=bias, dropout_p=dropout)
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(2))

    def _distance_scores(self, q_BHTD: Tensor, places: Tensor, key_places: Tensor) -> Tensor:
        # Only the distances that occur are encoded; the furthest is that of the last place to the first key.
        encoded = sinusoids(len(key_places), self.r_proj.in_features, theta=self.theta, device=q_BHTD.device)
        r_HSD = self._split_heads(self.r_proj(encoded.to(q_BHTD.dtype))[None])[0]
        q_BHTD = (q_BHTD + self.position_bias[:, None].to(q_BHTD.dtype)) * self.head_dim**-0.5
        if len(places) == 1:
            return relative_scores_of_last(q_BHTD, r_HSD)
        return relative_scores(q_BHTD, r_HSD, places[:, :, None] - key_places)

    def _split_heads(self, x_BTE: Tensor) -> Tensor:
        return x_BTE.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
