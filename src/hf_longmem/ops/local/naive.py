"""Windowed attention, dense and readable: what the fast operator is compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_longmem.ops.local.window import Rule, check_arguments, numbered_documents

__all__ = ["local_attention", "local_attention_weights"]


def visible_keys(
    length: int, *, rule: Rule, chunk_length: int, chunks_before: int, chunks_after: int, causal: bool
) -> Tensor:
    """Which key j (column) the query i (row) may see, by position alone: ``[T, T]`` bool."""
    position = torch.arange(length)
    query, key = position.unsqueeze(1), position.unsqueeze(0)
    if rule == "sliding":
        visible = (query - key <= chunk_length * chunks_before) & (key - query <= chunk_length * chunks_after)
    else:
        chunk = position // chunk_length
        chunks_back = chunk.unsqueeze(1) - chunk.unsqueeze(0)
        visible = (chunks_back <= chunks_before) & (-chunks_back <= chunks_after)
    if causal:
        # Under "sliding" with chunks_after = 0 this changes nothing; under "chunk" it hides the rest of the own chunk.
        visible = visible & (key <= query)
    return visible


def local_attention_weights(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    *,
    rule: Rule = "sliding",
    chunk_length: int,
    chunks_before: int = 1,
    chunks_after: int = 0,
    causal: bool = True,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> Tensor:
    """``softmax_j(q_i . k_j / sqrt(D))`` over the visible keys, ``[B, H, T, T]``; a row that sees no key is all zeros.

    Args: as :func:`hf_longmem.ops.local.local_attention`.
    """
    check_arguments(q_BHTD, k_BHTD, k_BHTD, rule, chunk_length, chunks_before, chunks_after, attention_mask, 0.0)
    visible_B1TT = visible_keys(
        q_BHTD.size(2),
        rule=rule,
        chunk_length=chunk_length,
        chunks_before=chunks_before,
        chunks_after=chunks_after,
        causal=causal,
    ).to(q_BHTD.device)[None, None]
    if attention_mask is not None:
        visible_B1TT = visible_B1TT & attention_mask[:, None, None, :]
    documents_BT = numbered_documents(document_ids, attention_mask, q_BHTD)
    if documents_BT is not None:
        visible_B1TT = visible_B1TT & (documents_BT[:, None, :, None] == documents_BT[:, None, None, :])
    scores_BHTT = q_BHTD @ k_BHTD.transpose(-1, -2) / math.sqrt(q_BHTD.size(-1))
    scores_BHTT = scores_BHTT.masked_fill(~visible_B1TT, torch.finfo(scores_BHTT.dtype).min)
    return scores_BHTT.softmax(-1).masked_fill(~visible_B1TT, 0.0)


def local_attention(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    *,
    rule: Rule = "sliding",
    chunk_length: int,
    chunks_before: int = 1,
    chunks_after: int = 0,
    causal: bool = True,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """``out_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j`` over the visible keys, in O(T^2) memory.

    Args: as :func:`hf_longmem.ops.local.local_attention`.
    """
    check_arguments(q_BHTD, k_BHTD, v_BHTD, rule, chunk_length, chunks_before, chunks_after, attention_mask, dropout)
    weights_BHTT = local_attention_weights(
        q_BHTD,
        k_BHTD,
        rule=rule,
        chunk_length=chunk_length,
        chunks_before=chunks_before,
        chunks_after=chunks_after,
        causal=causal,
        attention_mask=attention_mask,
        document_ids=document_ids,
    )
    return torch.dropout(weights_BHTT, dropout, train=True) @ v_BHTD
