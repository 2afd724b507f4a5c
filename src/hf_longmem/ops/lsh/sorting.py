"""Order tokens by (bucket, position), padding last."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Candidates = Literal["bucket", "chunk"]
Merge = Literal["union", "sum"]


def sort_by_bucket(buckets_BHRT: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Positions of the tokens in the order (bucket, position) of each round; padding comes last.

    Sorts the integer keys ``bucket * T + position``, which makes any sort a stable one.

    Args:
        buckets_BHRT: bucket of each token ``[B, H, R, T]``, integer, not negative.
        attention_mask: ``[B, T]``, true (or 1) where a token is real; None when all are.

    Returns:
        ``order_BHRT``, int64: ``order[..., n]`` is the position of the n-th token.

    >>> sort_by_bucket(torch.tensor([[[[1, 0, 1, 0]]]]))
    tensor([[[[1, 3, 0, 2]]]])
    """
    length = buckets_BHRT.shape[-1]
    position_T = torch.arange(length, device=buckets_BHRT.device)
    keys_BHRT = buckets_BHRT.long() * length + position_T
    if attention_mask is not None:
        last = torch.iinfo(torch.int64).max - length
        keys_BHRT = torch.where(attention_mask.bool()[:, None, None, :], keys_BHRT, last + position_T)
    return torch.sort(keys_BHRT, dim=-1).indices


def document_buckets(buckets_BHRT: Tensor, numbers_BT: Tensor) -> Tensor:
    """Keep the documents of a row apart: ``b + K n``, int64, for bucket b of document n and K above every bucket.

    >>> document_buckets(torch.tensor([[[[1, 0, 1, 0]]]]), torch.tensor([[0, 0, 1, 1]]))
    tensor([[[[1, 0, 3, 2]]]])
    """
    if buckets_BHRT.numel() == 0:
        return buckets_BHRT.long()
    count = buckets_BHRT.amax().long() + 1
    return buckets_BHRT + (count * numbers_BT)[:, None, None, :]


def pad_tokens(
    x_BHTD: Tensor, buckets_BHRT: Tensor, attention_mask: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Append ``count`` tokens of padding to vectors and buckets, and to the mask, which is made where there is none."""
    if attention_mask is None:
        attention_mask = torch.ones(x_BHTD.shape[0], x_BHTD.shape[2], dtype=torch.bool, device=x_BHTD.device)
    x_BHTD = torch.nn.functional.pad(x_BHTD, (0, 0, 0, count))
    return (
        x_BHTD,
        torch.nn.functional.pad(buckets_BHRT, (0, count)),
        torch.nn.functional.pad(attention_mask, (0, count)),
    )
