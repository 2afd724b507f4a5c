"""Hashing and sorting: the argmax definition, reproducibility, and what must not be touched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longmem.ops.lsh import draw_rotations, hash_vectors, hashing, seeded_rotations, sort_by_bucket

SIZES = {"num_heads": 2, "head_dim": 8, "num_hashes": 3}


@settings(max_examples=25, deadline=None)
@given(
    factors=st.lists(st.sampled_from([2, 4, 6, 16]), min_size=1, max_size=3),
    length=st.integers(1, 70),
    seed=st.integers(0, 2**31),
)
def test_hash_is_the_argmax_over_signed_projections(factors, length, seed):
    generator = torch.Generator().manual_seed(seed)
    qk = torch.randn(2, 2, length, 8, generator=generator)
    rotations = draw_rotations(**SIZES, num_buckets=factors, generator=generator)
    expected, stride, column = 0, 1, 0
    for factor in factors:
        part = rotations[..., column : column + factor // 2]
        rotated = torch.einsum("bhtd,hdrf->bhrtf", qk, part)
        expected = expected + stride * torch.cat([rotated, -rotated], dim=-1).argmax(-1)
        stride, column = stride * factor, column + factor // 2
    buckets = hash_vectors(qk, rotations, factors)
    assert buckets.dtype == torch.int32
    assert torch.equal(buckets.long(), expected)


def test_hash_of_zero_vectors_is_the_first_bucket():
    rotations = draw_rotations(**SIZES, num_buckets=8)
    assert not hash_vectors(torch.zeros(1, 2, 5, 8), rotations, 8).any()


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (1, 2, 0, 8)])
def test_hash_of_nothing_is_nothing(shape):
    rotations = draw_rotations(**SIZES, num_buckets=4)
    assert hash_vectors(torch.zeros(shape), rotations, 4).shape == (shape[0], 2, 3, shape[2])


def test_hash_in_pieces_equals_hash_at_once(monkeypatch):
    qk = torch.randn(1, 2, 100, 8)
    rotations = draw_rotations(**SIZES, num_buckets=[4, 6])
    whole = hash_vectors(qk, rotations, [4, 6])
    monkeypatch.setattr(hashing, "HASHED_AT_ONCE", 200)
    assert torch.equal(hash_vectors(qk, rotations, [4, 6]), whole)


def test_more_rounds_begin_with_the_rounds_of_fewer():
    few = draw_rotations(2, 8, 2, 16, generator=torch.Generator().manual_seed(3))
    many = draw_rotations(2, 8, 5, 16, generator=torch.Generator().manual_seed(3))
    assert torch.equal(many[:, :, :2], few)
    assert torch.equal(seeded_rotations(1, 0, 2, 8, 5, 16)[:, :, :2], seeded_rotations(1, 0, 2, 8, 2, 16))


def test_seeded_rotations_depend_on_seed_and_layer_and_leave_the_default_generator_alone():
    before = torch.get_rng_state()
    first = seeded_rotations(5, 0, **SIZES, num_buckets=[4, 4])
    assert torch.equal(first, seeded_rotations(5, 0, **SIZES, num_buckets=[4, 4]))
    assert not torch.equal(first, seeded_rotations(5, 1, **SIZES, num_buckets=[4, 4]))
    assert not torch.equal(first, seeded_rotations(6, 0, **SIZES, num_buckets=[4, 4]))
    assert torch.equal(before, torch.get_rng_state())


def test_drawn_rotations_follow_manual_seed():
    torch.manual_seed(11)
    first = draw_rotations(**SIZES, num_buckets=4)
    second = draw_rotations(**SIZES, num_buckets=4)
    torch.manual_seed(11)
    assert torch.equal(first, draw_rotations(**SIZES, num_buckets=4))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("sizes", [(1, 3, 6), (3, 7, 10), (2, 8, 16)])
def test_the_first_rounds_of_any_size_do_not_depend_on_how_many_follow(sizes):
    heads, width, buckets = sizes
    few, many = (
        draw_rotations(heads, width, rounds, buckets, generator=torch.Generator().manual_seed(0)) for rounds in (1, 3)
    )
    assert torch.equal(many[:, :, :1], few)


def test_seeded_rotations_trace_in_the_type_asked_for_whatever_the_default():
    def rotate(x):
        return x @ seeded_rotations(0, 0, 1, 4, 1, 8, dtype=torch.float64)[0, :, 0]

    x = torch.randn(3, 4, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(torch.compile(rotate, backend="aot_eager", fullgraph=True)(x), rotate(x))
    finally:
        torch.set_default_dtype(torch.float32)


def test_seeded_rotations_are_traceable():
    torch.library.opcheck(hashing._seeded_rotations, (3, 1, 2, 8, 3, [4, 6]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_vectors_are_hashed_as_their_float32_values(dtype):
    qk = torch.randn(1, 2, 50, 8).to(dtype)
    rotations = draw_rotations(**SIZES, num_buckets=16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(hash_vectors(qk, rotations, 16), hash_vectors(qk.float(), rotations, 16))


@pytest.mark.parametrize(
    ("num_buckets", "message"),
    [
        (63, "num_buckets must be even, got 63; use 62 or 64"),
        ([4, 7], "num_buckets must be even, got 7; use 6 or 8"),
        (0, "num_buckets must be at least 2"),
        ([], "at least one factor"),
    ],
)
def test_impossible_buckets_are_refused(num_buckets, message):
    with pytest.raises(ValueError, match=message):
        draw_rotations(**SIZES, num_buckets=num_buckets)


def test_rotations_of_other_sizes_are_refused():
    with pytest.raises(ValueError, match="rotations must be"):
        hash_vectors(torch.randn(1, 2, 5, 8), draw_rotations(**SIZES, num_buckets=4), 6)


@settings(max_examples=25, deadline=None)
@given(length=st.integers(1, 40), buckets=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_order_is_by_bucket_then_position_with_padding_last(length, buckets, seed):
    generator = torch.Generator().manual_seed(seed)
    bucket_BHRT = torch.randint(buckets, (2, 2, 2, length), generator=generator, dtype=torch.int32)
    mask = torch.rand(2, length, generator=generator) > 0.3
    order = sort_by_bucket(bucket_BHRT, mask)
    for row, head, round_ in torch.cartesian_prod(*[torch.arange(2)] * 3).tolist():
        expected = sorted(
            range(length),
            key=lambda t: (not mask[row, t], bucket_BHRT[row, head, round_, t] if mask[row, t] else 0, t),
        )
        assert order[row, head, round_].tolist() == expected


def test_sorting_survives_bucket_times_length_beyond_int32():
    buckets = torch.tensor([2_000_000_000, 1, 2_000_000_000, 0], dtype=torch.int32).view(1, 1, 1, 4)
    assert sort_by_bucket(buckets).flatten().tolist() == [3, 1, 0, 2]


def test_what_is_not_a_number_has_a_bucket_that_exists():
    qk = torch.full((1, 2, 3, 8), torch.nan)
    for num_buckets in (2, 16, [4, 6]):
        buckets = hash_vectors(qk, draw_rotations(**SIZES, num_buckets=num_buckets), num_buckets)
        assert buckets.max() < torch.Size(num_buckets if isinstance(num_buckets, list) else [num_buckets]).numel()
