"""Dense, readable twin of the LSH attention operator: every rule is written as a ``T x T`` mask.

Time and memory are O(R T^2); it exists to be compared with, and to show attention maps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_longmem.ops.documents import document_numbers
from hf_longmem.ops.lsh.sorting import Candidates, Merge, document_buckets, pad_tokens, sort_by_bucket

KEY_NORM_EPSILON = 1e-6


def unit_keys(qk_BHTD: Tensor) -> Tensor:
    """Keys of shared-QK attention: ``k_j = qk_j / sqrt(|qk_j|^2 + D 1e-6)``, unit length up to the epsilon.

    Args:
        qk_BHTD: shared queries and keys, floating, any number of leading axes before D.

    Source: Kitaev et al. 2020, section 2 ("shared-QK"); the epsilon is that of transformers' RMS norm.
    """
    head_dim = qk_BHTD.shape[-1]
    return qk_BHTD * torch.rsqrt(qk_BHTD.square().sum(-1, keepdim=True) + head_dim * KEY_NORM_EPSILON)


def candidate_counts(
    buckets_BHRT: Tensor,
    *,
    chunk_length: int,
    chunks_before: int,
    chunks_after: int,
    causal: bool,
    candidates: Candidates,
    merge: Merge,
    attention_mask: Tensor | None,
    numbers_BT: Tensor | None = None,
) -> Tensor:
    """How often round r offers key j to query i, ``[B, H, R, T, T]`` int, without the token itself.

    Under ``"bucket"`` it is 0 or 1. Under ``"chunk"`` with ``"sum"`` the rounds form one ring, as in Trax and
    transformers: the first chunk of a round looks back into the last chunk of the round before, so that a key can
    be offered twice. ``numbers_BT`` numbers the documents of each row from 0.
    """
    if numbers_BT is not None:
        buckets_BHRT = document_buckets(buckets_BHRT, numbers_BT)
    batch, heads, rounds, length = buckets_BHRT.shape
    device = buckets_BHRT.device
    real_BT = attention_mask.bool() if attention_mask is not None else torch.ones(batch, length, device=device).bool()
    order_BHRT = sort_by_bucket(buckets_BHRT, attention_mask)
    rank_BHRT = torch.argsort(order_BHRT, dim=-1)
    if candidates == "bucket":
        ahead_BHRTT = rank_BHRT[..., :, None] - rank_BHRT[..., None, :]
        same_BHRTT = buckets_BHRT[..., :, None] == buckets_BHRT[..., None, :]
        near = (ahead_BHRTT <= chunk_length * chunks_before) & (ahead_BHRTT >= -chunk_length * chunks_after)
        counts_BHRTT = (same_BHRTT & near).int()
    elif merge == "sum" and length <= chunk_length:
        # One chunk holds everything: transformers then attends without hashing, which is one round of one chunk.
        counts_BHRTT = torch.ones(batch, heads, rounds, length, length, dtype=torch.int, device=device)
    else:
        chunks = -(-length // chunk_length)
        chunk_BHRT = rank_BHRT // chunk_length
        counts_BHRTT = torch.zeros(batch, heads, rounds, length, length, dtype=torch.int, device=device)
        for shift in range(-chunks_after, chunks_before + 1):
            if merge == "union":
                counts_BHRTT += (chunk_BHRT[..., :, None] - chunk_BHRT[..., None, :] == shift).int()
                continue
            ring_BHRT = chunk_BHRT + torch.arange(rounds, device=device)[:, None] * chunks
            looked_at_BHRT = (ring_BHRT - shift) % (rounds * chunks)
            for other in range(rounds):
                counts_BHRTT += (looked_at_BHRT[..., :, None] == ring_BHRT[:, :, other, None, None, :]).int()
    index = torch.arange(length, device=device)
    allowed_TT = index[:, None] > index[None, :] if causal else index[:, None] != index[None, :]
    allowed_BTT = allowed_TT & real_BT[:, None, :] & real_BT[:, :, None]
    if numbers_BT is not None:
        allowed_BTT &= numbers_BT[:, :, None] == numbers_BT[:, None, :]
    return counts_BHRTT * allowed_BTT[:, None, None].int()


def lsh_attention_weights(
    qk_BHTD: Tensor,
    buckets_BHRT: Tensor,
    *,
    chunk_length: int,
    chunks_before: int = 1,
    chunks_after: int = 0,
    causal: bool = True,
    candidates: Candidates = "bucket",
    merge: Merge = "union",
    pad_beyond: int = 0,
    pad_to_multiple_of: int = 1,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Dense attention weights ``softmax_j(q_i . k_j + log n_ij)``, each row summing to 1.

    ``n_ij`` is 1 if any round offers key j to query i under ``"union"``, and the number of offers under ``"sum"``.
    A token that is offered nothing attends to itself with weight 1.

    Args:
        qk_BHTD: shared queries and keys ``[B, H, T, D]``, floating.
        buckets_BHRT: bucket of each token in each round ``[B, H, R, T]``, integer.
        chunk_length, chunks_before, chunks_after, causal, candidates, merge, pad_beyond, pad_to_multiple_of,
            attention_mask, document_ids: as in :func:`hf_longmem.ops.lsh.lsh_attention`.

    Returns:
        ``[B, H, T, T]``.

    Source: Kitaev et al. 2020, equations 2 to 6.
    """
    numbers_BT = None if document_ids is None else document_numbers(document_ids, attention_mask)
    length = qk_BHTD.shape[2]
    if length > pad_beyond and length % pad_to_multiple_of:
        padding = -length % pad_to_multiple_of
        qk_BHTD, buckets_BHRT, attention_mask = pad_tokens(qk_BHTD, buckets_BHRT, attention_mask, padding)
        numbers_BT = None if numbers_BT is None else torch.nn.functional.pad(numbers_BT, (0, padding))
    counts_BHRTT = candidate_counts(
        buckets_BHRT,
        chunk_length=chunk_length,
        chunks_before=chunks_before,
        chunks_after=chunks_after,
        causal=causal,
        candidates=candidates,
        merge=merge,
        attention_mask=attention_mask,
        numbers_BT=numbers_BT,
    )
    offers_BHTT = counts_BHRTT.sum(dim=2)
    if merge == "union":
        offers_BHTT = offers_BHTT.clamp(max=1)
    scores_BHTT = qk_BHTD @ unit_keys(qk_BHTD).transpose(-1, -2)
    alone_BHT1 = (offers_BHTT == 0).all(dim=-1, keepdim=True)
    itself_TT = torch.eye(qk_BHTD.shape[2], dtype=torch.bool, device=qk_BHTD.device)
    offers_BHTT = torch.where(alone_BHT1 & itself_TT, 1, offers_BHTT)
    log_offers_BHTT = torch.log(offers_BHTT.to(scores_BHTT.dtype))
    return torch.softmax(scores_BHTT + log_offers_BHTT, dim=-1)[..., :length, :length]


def lsh_attention(
    qk_BHTD: Tensor,
    v_BHTD: Tensor,
    buckets_BHRT: Tensor,
    *,
    chunk_length: int,
    chunks_before: int = 1,
    chunks_after: int = 0,
    causal: bool = True,
    candidates: Candidates = "bucket",
    merge: Merge = "union",
    pad_beyond: int = 0,
    pad_to_multiple_of: int = 1,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Output of the dense weights of :func:`lsh_attention_weights`: ``o_i = sum_j w_ij v_j``, ``[B, H, T, D]``."""
    weights_BHTT = lsh_attention_weights(
        qk_BHTD,
        buckets_BHRT,
        chunk_length=chunk_length,
        chunks_before=chunks_before,
        chunks_after=chunks_after,
        causal=causal,
        candidates=candidates,
        merge=merge,
        pad_beyond=pad_beyond,
        pad_to_multiple_of=pad_to_multiple_of,
        attention_mask=attention_mask,
        document_ids=document_ids,
    )
    return weights_BHTT @ v_BHTD
