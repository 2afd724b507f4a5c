"""Angular locality-sensitive hashing by random rotations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_longmem._errors import complaint

HASHED_AT_ONCE = 2**21


def bucket_factors(num_buckets: int | Sequence[int]) -> tuple[int, ...]:
    """Check a number of buckets and give its factors, each even and at least 2.

    Args:
        num_buckets: K, or its factors ``(K1, K2, ...)``.

    Raises:
        ValueError: a factor is odd or below 2.

    >>> bucket_factors(64), bucket_factors([8, 16])
    ((64,), (8, 16))
    """
    factors = (num_buckets,) if isinstance(num_buckets, int) else tuple(num_buckets)
    if not factors:
        raise ValueError(complaint("num_buckets must have at least one factor", "none", "give an even number"))
    for factor in factors:
        if factor < 2:
            raise ValueError(complaint("num_buckets must be at least 2", factor, "use 2 or a larger even number"))
        if factor % 2:
            raise ValueError(complaint("num_buckets must be even", factor, f"use {max(factor - 1, 2)} or {factor + 1}"))
    return factors


def draw_rotations(
    num_heads: int,
    head_dim: int,
    num_hashes: int,
    num_buckets: int | Sequence[int],
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw the random rotations of every hash round, ``Rot ~ N(0, 1)``.

    Rounds are drawn one after the other, so that the first R rounds of a larger draw are those of a smaller one.

    Args:
        num_heads, head_dim, num_hashes: H, D and R.
        num_buckets: K, or its factors.
        generator: source of randomness; None uses torch's default one (it is advanced, never reseeded).
        device, dtype: of the result.

    Returns:
        ``rotations_HDRF`` with F half the sum of the bucket factors.

    Source: Andoni et al. 2015 (arXiv 1509.02897); Kitaev et al. 2020, section 2.
    """
    columns = sum(bucket_factors(num_buckets)) // 2
    shape = num_heads, head_dim, columns
    rounds = [torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(num_hashes)]
    return torch.stack(rounds, dim=2)


@torch.library.custom_op("hf_longmem::seeded_rotations", mutates_args=())
def _seeded_rotations(
    seed: int, layer: int, num_heads: int, head_dim: int, num_hashes: int, num_buckets: Sequence[int]
) -> Tensor:
    # A large odd stride keeps the layers' streams of one seed, and of neighbouring seeds, apart.
    generator = torch.Generator("cpu").manual_seed((seed + layer * 0x9E3779B97F4A7C15) % 2**63)
    rotations_HDRF = draw_rotations(num_heads, head_dim, num_hashes, num_buckets, generator=generator, device="cpu")
    return rotations_HDRF.contiguous()


@_seeded_rotations.register_fake
def _(seed: int, layer: int, num_heads: int, head_dim: int, num_hashes: int, num_buckets: Sequence[int]) -> Tensor:
    columns = sum(num_buckets) // 2
    return torch.empty(num_heads, head_dim, num_hashes, columns, device="cpu", dtype=torch.float32)


def seeded_rotations(
    seed: int,
    layer: int,
    num_heads: int,
    head_dim: int,
    num_hashes: int,
    num_buckets: int | Sequence[int],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Rotations that depend on nothing but ``seed``, ``layer`` and the sizes; the same on every device.

    Args:
        seed: any integer from 0 to 2^63 - 1.
        layer: index of the layer, so that layers do not share rotations.
        num_heads, head_dim, num_hashes, num_buckets, device, dtype: as in :func:`draw_rotations`.

    Returns:
        ``rotations_HDRF``. torch's default generator is not touched. Traceable by torch.compile and torch.export.
    """
    factors = list(bucket_factors(num_buckets))
    rotations = _seeded_rotations(seed, layer, num_heads, head_dim, num_hashes, factors)
    return rotations.to(device=device, dtype=dtype)


@torch.no_grad()
def hash_vectors(qk_BHTD: Tensor, rotations_HDRF: Tensor, num_buckets: int | Sequence[int]) -> Tensor:
    """Bucket of every vector in every round, ``h(x) = argmax [x Rot ; -x Rot]``, factor by factor.

    With factors ``(K1, K2)`` the bucket is ``h1 + K1 h2``: K1 + K2 columns do the work of K1 K2.

    Args:
        qk_BHTD: vectors ``[B, H, T, D]``, floating; hashed in float32 (float64 stays).
        rotations_HDRF: from :func:`draw_rotations` with the same heads, width and buckets.
        num_buckets: K, or its factors.

    Returns:
        ``buckets_BHRT``, int32, in ``[0, K)``. No gradient.

    Raises:
        ValueError: the rotations do not fit the vectors or the buckets.

    Source: Kitaev et al. 2020, section 2, "Locality sensitive hashing".
    """
    factors = bucket_factors(num_buckets)
    batch, heads, length, head_dim = qk_BHTD.shape
    expected = (heads, head_dim, rotations_HDRF.shape[2], sum(factors) // 2)
    if tuple(rotations_HDRF.shape) != expected:
        raise ValueError(
            complaint(
                f"rotations must be [heads, head_dim, num_hashes, half the buckets] = {expected}",
                tuple(rotations_HDRF.shape),
                "draw them with draw_rotations for these sizes",
            )
        )
    dtype = torch.float64 if qk_BHTD.dtype == torch.float64 else torch.float32
    rounds = rotations_HDRF.shape[2]
    widths = [factor // 2 for factor in factors]
    buckets_BHRT = torch.zeros(batch, heads, rounds, length, dtype=torch.int32, device=qk_BHTD.device)
    # Pieces of T keep the rotated vectors, and the passes over them, in cache.
    piece = max(1, HASHED_AT_ONCE // max(1, batch * heads * rounds * sum(widths)))
    with torch.autocast(qk_BHTD.device.type, enabled=False):
        rotations_HXD = rotations_HDRF.to(dtype).flatten(2).transpose(1, 2)
        for start in range(0, length, piece):
            qk_BHDT = qk_BHTD[:, :, start : start + piece].to(dtype).transpose(-1, -2)
            rotated_BHRFT = torch.matmul(rotations_HXD, qk_BHDT).unflatten(2, (rounds, -1))
            stride = 1
            for factor, part_BHRFT in zip(factors, rotated_BHRFT.split(widths, dim=-2), strict=True):
                buckets_BHRT[..., start : start + piece].add_(_signed_argmax(part_BHRFT), alpha=stride)
                stride *= factor
    return buckets_BHRT


def _signed_argmax(rotated_FT: Tensor) -> Tensor:
    """``argmax [y ; -y]`` over the axis before the last, first index on ties, int32.

    Written as reductions over a leading axis, which vectorise over tokens; ``argmax`` along short rows does not.
    """
    columns = rotated_FT.shape[-2]
    bits = next(bits for bits in (torch.int8, torch.int16, torch.int32) if 2 * columns <= torch.iinfo(bits).max)
    top_1T = torch.maximum(rotated_FT.amax(-2, keepdim=True), rotated_FT.amin(-2, keepdim=True).neg())
    falling_F1 = torch.arange(2 * columns, 0, -1, dtype=bits, device=rotated_FT.device)[:, None]
    up_T = ((rotated_FT == top_1T) * falling_F1[:columns]).amax(-2)
    down_T = ((rotated_FT == -top_1T) * falling_F1[columns:]).amax(-2)
    # What is not a number equals no maximum: it goes into the last bucket, not into one that does not exist.
    return 2 * columns - torch.maximum(up_T, down_T).clamp_(min=1).int()
