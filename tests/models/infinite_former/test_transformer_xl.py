"""Without long-term memory and with relative positions the model is a Transformer-XL, written out naively here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

Make = Callable[..., Any]


def encode(distance: int, width: int) -> Tensor:
    angles = [distance * 10000.0 ** (-2 * i / width) for i in range(width // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def attend(attention: Any, x: Tensor, mems: Tensor) -> Tensor:
    """One row, one head after the other, one query after the other: equation 10 of Dai et al. 2019."""
    heads, width = attention.num_heads, attention.head_dim
    both = torch.cat((mems, x))
    q, k, v = attention.q_proj(x), attention.k_proj(both), attention.v_proj(both)
    rows = []
    for i in range(len(x)):
        parts = []
        for h in range(heads):
            own = slice(h * width, (h + 1) * width)
            u, w = attention.content_bias[h], attention.position_bias[h]
            seen = range(len(mems) + i + 1)
            r = [attention.r_proj(encode(len(mems) + i - j, x.shape[-1]))[own] for j in seen]
            scores = [(q[i, own] + u) @ k[j, own] + (q[i, own] + w) @ r[j] for j in seen]
            weights = torch.softmax(torch.stack(scores) / math.sqrt(width), dim=0)
            parts.append(sum(weights[j] * v[j, own] for j in seen))
        rows.append(torch.cat(parts))
    return attention.o_proj(torch.stack(rows))


def transformer_xl(model: Any, ids: Tensor, length: int, window: int) -> Tensor:
    """Logits of one document; the memories of a segment are constants to the next one."""
    base, logits = model.model, []
    mems = [torch.zeros(0, model.config.hidden_size, dtype=torch.float64) for _ in base.layers]
    for segment in ids.split(length):
        x = base.embed_tokens(segment)
        for index, layer in enumerate(base.layers):
            kept = torch.cat((mems[index], x.detach()))[-window:] if window else mems[index]
            normed, past = layer.input_layernorm(x), layer.input_layernorm(mems[index]).detach()
            x = x + attend(layer.self_attn, normed, past)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            mems[index] = kept
        logits.append(model.lm_head(base.norm(x)))
    return torch.cat(logits)


@pytest.mark.parametrize("window", [0, 3, 5, 8])
def test_logits_and_gradients_equal_a_naive_transformer_xl(causal_lm: Make, tokens: Make, window: int) -> None:
    options = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "memory_layers": ()}
    sizes = {"segment_length": 5, "short_term_window": window, "position_embedding_type": "relative"}
    model = causal_lm(**options, **sizes).double()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.content_bias.normal_()
            layer.self_attn.position_bias.normal_()
    ids = tokens(2, 18)
    ours = model(ids).logits
    theirs = torch.stack([transformer_xl(model, row, 5, window) for row in ids])
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    weights = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(0))
    parameters = list(model.parameters())
    for one, other in zip(
        torch.autograd.grad((ours * weights).sum(), parameters),
        torch.autograd.grad((theirs * weights).sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
