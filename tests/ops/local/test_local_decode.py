"""Windowed attention in pieces equals windowed attention over the whole sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longmem.ops.local import decode, local_attention


def in_pieces(q, k, v, cuts, masks=None, **reach):
    state = decode.empty_state(k, **reach)
    outs = []
    for n, (start, stop) in enumerate(zip([0, *cuts], [*cuts, q.shape[2]], strict=True)):
        part = slice(start, stop)
        mask = None if masks is None else masks[n]
        out, state = decode.extend(state, q[:, :, part], k[:, :, part], v[:, :, part], attention_mask=mask, **reach)
        outs.append(out)
    return torch.cat(outs, dim=2), state


@settings(max_examples=50, deadline=None)
@given(
    length=st.integers(1, 150),
    cuts=st.lists(st.integers(1, 149), max_size=6),
    rule=st.sampled_from(["sliding", "chunk"]),
    chunk_length=st.integers(1, 20),
    before=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_any_pieces_equal_the_whole(length, cuts, rule, chunk_length, before, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, length, 8, dtype=torch.float64, generator=generator) for _ in "qkv")
    reach = {"rule": rule, "chunk_length": chunk_length, "chunks_before": before}
    pieces, _ = in_pieces(q, k, v, sorted({cut for cut in cuts if cut < length}), **reach)
    torch.testing.assert_close(pieces, local_attention(q, k, v, **reach), atol=1e-10, rtol=0)


@pytest.mark.parametrize("rule", ["sliding", "chunk"])
def test_padding_between_pieces_is_not_remembered(rule):
    q, k, v = (torch.randn(2, 2, 60, 8, dtype=torch.float64) for _ in "qkv")
    reach = {"rule": rule, "chunk_length": 8, "chunks_before": 1}
    cuts = [20, 21, 45]
    masks = [torch.ones(2, n, dtype=torch.bool) for n in (20, 1, 24, 15)]
    masks[0][0, 13:] = False
    masks[1][1] = False
    masks[2][0, 20:] = False
    pieces, state = in_pieces(q, k, v, cuts, masks, **reach)
    mask = torch.cat(masks, dim=1)
    for row in range(2):
        real = mask[row]
        alone = local_attention(*(x[row : row + 1, :, real] for x in (q, k, v)), **reach)
        torch.testing.assert_close(pieces[row : row + 1, :, real], alone, atol=1e-10, rtol=0)
    assert state.seen_B.tolist() == mask.sum(1).tolist()


def test_memory_does_not_grow():
    q = torch.randn(1, 2, 500, 8)
    _, state = in_pieces(q, q, q, [100, 300], rule="sliding", chunk_length=8, chunks_before=2)
    assert state.k_BHWD.shape == (1, 2, 16, 8)
