"""Attention in pieces, token by token or mixed, equals attention over the whole sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longmem.ops.lsh import decode, draw_rotations, hash_vectors, lsh_attention

ROUNDS, BUCKETS = 3, [2, 4]


def draw(length, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    qk, v = (torch.randn(batch, 2, length, 8, dtype=torch.float64, generator=generator) for _ in "qv")
    return qk, v, hash_vectors(qk, draw_rotations(2, 8, ROUNDS, BUCKETS, generator=generator), BUCKETS)


def in_pieces(qk, v, buckets, cuts, mask=None, **reach):
    state = decode.empty_state(qk, ROUNDS, BUCKETS, reach["chunk_length"] * reach.get("chunks_before", 1))
    outs = []
    for start, stop in zip([0, *cuts], [*cuts, qk.shape[2]], strict=True):
        part = slice(start, stop)
        out, state = decode.extend(
            state,
            qk[:, :, part],
            v[:, :, part],
            buckets[..., part],
            attention_mask=None if mask is None else mask[:, part],
            **reach,
        )
        outs.append(out)
    return torch.cat(outs, dim=2), state


@settings(max_examples=50, deadline=None)
@given(
    length=st.integers(1, 90),
    cuts=st.lists(st.integers(1, 89), max_size=8),
    chunk_length=st.integers(1, 20),
    before=st.integers(0, 2),
    merge=st.sampled_from(["union", "sum"]),
    padded=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_pieces_equal_the_whole(length, cuts, chunk_length, before, merge, padded, seed):
    qk, v, buckets = draw(length, seed=seed)
    cuts = sorted({cut for cut in cuts if cut < length})
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(seed)) > 0.3 if padded else None
    reach = {"chunk_length": chunk_length, "chunks_before": before, "merge": merge}
    whole = lsh_attention(qk, v, buckets, attention_mask=mask, **reach)
    pieces, state = in_pieces(qk, v, buckets, cuts, mask, **reach)
    torch.testing.assert_close(pieces, whole, atol=1e-10, rtol=0)
    assert state.length == length
    assert state.seen_B.tolist() == ([length] * 2 if mask is None else mask.sum(1).tolist())


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 257])
def test_token_by_token_equals_the_whole(length):
    qk, v, buckets = draw(length, batch=1)
    pieces, _ = in_pieces(qk, v, buckets, list(range(1, length)), chunk_length=8)
    torch.testing.assert_close(pieces, lsh_attention(qk, v, buckets, chunk_length=8), atol=1e-10, rtol=0)


def test_the_chunk_rule_sees_the_past_as_it_was_computed():
    qk, v, buckets = draw(50)
    pieces, _ = in_pieces(qk, v, buckets, [30, 31, 40], chunk_length=8, candidates="chunk", merge="sum")
    for start, stop in ((0, 30), (30, 31), (31, 40), (40, 50)):
        so_far = lsh_attention(
            qk[:, :, :stop], v[:, :, :stop], buckets[..., :stop], chunk_length=8, candidates="chunk", merge="sum"
        )
        torch.testing.assert_close(pieces[:, :, start:stop], so_far[:, :, start:], atol=1e-10, rtol=0)


def test_rows_may_be_reordered_between_steps():
    qk, v, buckets = draw(40)
    order = torch.tensor([1, 1, 0])
    _, state = in_pieces(qk[:, :, :30], v[:, :, :30], buckets[..., :30], [7, 8], chunk_length=4)
    state = state.map_rows(lambda tensor: tensor[order])
    out, _ = decode.extend(state, qk[order, :, 30:], v[order, :, 30:], buckets[order][..., 30:], chunk_length=4)
    whole = lsh_attention(qk, v, buckets, chunk_length=4)[order, :, 30:]
    torch.testing.assert_close(out, whole, atol=1e-10, rtol=0)


def test_a_step_touches_as_much_memory_early_as_late():
    qk, v, buckets = draw(2000, batch=1)

    def largest_gather(past):
        _, state = in_pieces(qk[:, :, :past], v[:, :, :past], buckets[..., :past], [], chunk_length=8)
        now = slice(past, past + 1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            decode._step(state, qk[:, :, now], v[:, :, now], buckets[..., past], state.seen_B, None, 8, "union")
        return sorted((event.key, event.count) for event in profile.key_averages()), state

    early, _ = largest_gather(100)
    late, _ = largest_gather(1500)
    assert early == late


def test_the_rings_hold_the_last_tokens_of_each_bucket():
    qk, v, buckets = draw(60, batch=1)
    _, state = in_pieces(qk, v, buckets, [20, 21, 22, 50], chunk_length=4)
    rings = state.ring_BHRX.unflatten(-1, (8, 4))
    for head in range(2):
        for round_ in range(ROUNDS):
            for bucket in range(8):
                members = (buckets[0, head, round_] == bucket).nonzero().flatten().tolist()
                assert state.filled_BHRK[0, head, round_, bucket] == len(members)
                kept = rings[0, head, round_, bucket].tolist()
                assert sorted(kept[: len(members)] if len(members) < 4 else kept) == members[-4:]


def test_steps_in_float16_take_lengths_whose_squares_overflow():
    qk, v, buckets = draw(40)
    qk, v = (100 * qk).half(), v.half()
    out, _ = in_pieces(qk, v, buckets, list(range(1, 40)), chunk_length=8)
    expected = lsh_attention(qk.float(), v.float(), buckets, chunk_length=8)
    torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)
