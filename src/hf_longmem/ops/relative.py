"""Transformer-XL's relative positions: what a query's distance to a key adds to their score."""

from __future__ import annotations

import torch
from torch import Tensor


def sinusoids(num_distances: int, width: int, *, theta: float = 10000.0, device: torch.device | None = None) -> Tensor:
    """Encode distances 0 .. n - 1: sines, then cosines, of ``d * theta^(-2i/E)``.

    Args:
        num_distances: n.
        width: E, even.
        theta: base of the frequencies.
        device: where the result is to live.

    Returns:
        float32 ``[n, E]``.

    Source: Dai et al. 2019 (arXiv 1901.02860), section 3.3.

    >>> sinusoids(2, 2)[1]
    tensor([0.8415, 0.5403])
    """
    pairs = torch.arange(0, width, 2, dtype=torch.float64, device=device)
    distances = torch.arange(num_distances, dtype=torch.float64, device=device)
    angles = distances[:, None] * theta ** (-pairs / width)
    return torch.cat((angles.sin(), angles.cos()), dim=-1).float()


def relative_scores(q_BHTD: Tensor, r_HSD: Tensor, distance_XTS: Tensor) -> Tensor:
    """Score distances, ``q_i . r_(distance(i, j))``, the terms (b) and (d) of a Transformer-XL score.

    Args:
        q_BHTD: queries plus the head's bias v, not scaled.
        r_HSD: projected encodings of the distances 0 .. S - 1 [H, S, D].
        distance_XTS: from query to key, integers [B or 1, T, keys]; those outside 0 .. S - 1 (keys that must be
            hidden anyway) are taken for the nearest one inside.

    Returns:
        [B, H, T, keys].

    Source: Dai et al. 2019 (arXiv 1901.02860), section 3.3 and appendix B.
    """
    scores_BHTS = q_BHTD @ r_HSD.mT
    index = distance_XTS.clamp(0, r_HSD.shape[1] - 1)[:, None].expand(*scores_BHTS.shape[:3], -1)
    return scores_BHTS.gather(-1, index)


def relative_scores_of_last(q_BHTD: Tensor, r_HSD: Tensor) -> Tensor:
    """Score distances where the queries are the last T of S keys: ``q_t . r_(S - T + t - s)``, nothing gathered.

    From one query to the next all distances grow by one. So with the encodings in falling order, and one more of them
    than keys, a query's scores end where the next one's begin, and the result is one stretch of memory.

    Args:
        q_BHTD: queries plus the head's bias v, not scaled.
        r_HSD: projected encodings of the distances 0 .. S - 1 [H, S, D].

    Returns:
        [B, H, T, S]; for a query and the keys after it, which must be hidden anyway, finite numbers without meaning.

    Source: Dai et al. 2019 (arXiv 1901.02860), appendix B.
    """
    num_queries, num_keys = q_BHTD.shape[2], r_HSD.shape[1]
    falling_HXD = torch.nn.functional.pad(r_HSD.flip(1), (0, 0, 0, 1))
    scores_BHX = (q_BHTD @ falling_HXD.mT).flatten(2)
    first = num_queries - 1
    return scores_BHX[..., first : first + num_queries * num_keys].unflatten(-1, (num_queries, num_keys))
