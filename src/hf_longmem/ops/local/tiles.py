"""How a sequence is cut for windowed attention: tiles of query blocks, and the keys that each block may see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_longmem.ops._blocks import FORBIDDEN

# Queries per block under "sliding", and the least number under "chunk"; any value gives the same results. Fewer waste
# fewer scores on keys outside the window, more make larger products: 32 was best or near it for windows of 64 to 256.
QUERY_BLOCK = 32

# Scores per tile: on a CPU what stays in a core's cache, elsewhere what keeps the device busy.
TILE_SCORES = {"cpu": 2**18, "other": 2**26}


class Plan(NamedTuple):
    """How a sequence is cut: blocks of ``queries``, each with the keys from ``before`` it to ``after`` it."""

    chunk_length: int
    queries: int
    before: int
    after: int
    blocks: int  # of a tile
    heads: int  # of a tile


class Tile(NamedTuple):
    """Blocks of one batch row: ``blocks`` of them from token ``start``, in heads ``[head, head_stop)``."""

    row: int
    head: int
    head_stop: int
    start: int
    blocks: int
    bias_XQM: Tensor


def plan_blocks(
    shape: torch.Size,
    rule: str,
    chunk_length: int,
    chunks_before: int,
    chunks_after: int,
    causal: bool,
    device: torch.device,
) -> Plan:
    """Cut a sequence of inputs of this shape ``[B, H, T, D]`` for `local_attention` with these arguments."""
    _, num_heads, length, _ = shape
    # A chunk longer than the input holds all of it, and costs no more than it.
    chunk_length = min(chunk_length, max(length, 1))
    # Under "chunk" a block is a whole number of chunks, so that every block sees keys from the same offsets.
    unit = chunk_length if rule == "chunk" else 1
    longest = _round_up(max(length, 1), unit)
    queries = min(_round_up(QUERY_BLOCK, unit), longest)
    before = min(chunk_length * chunks_before, longest)
    after = 0 if causal else min(chunk_length * chunks_after, longest)
    total_blocks = -(-length // queries)
    budget = TILE_SCORES["cpu" if device.type == "cpu" else "other"] // (queries * (before + queries + after))
    blocks = max(1, min(budget, total_blocks))
    return Plan(chunk_length, queries, before, after, blocks, max(1, min(num_heads, budget // blocks)))


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def block_bias(plan: Plan, rule: str, chunks_before: int, chunks_after: int, causal: bool) -> Tensor:
    """0 where a block's query may see its key, FORBIDDEN elsewhere: ``[1, Q, M]``, by position only."""
    chunk_length = plan.chunk_length
    query = torch.arange(plan.queries).unsqueeze(1)
    key = torch.arange(-plan.before, plan.queries + plan.after).unsqueeze(0)
    if rule == "sliding":
        visible = (query - key <= chunk_length * chunks_before) & (key - query <= chunk_length * chunks_after)
    else:
        chunks_back = query.div(chunk_length, rounding_mode="floor") - key.div(chunk_length, rounding_mode="floor")
        visible = (chunks_back <= chunks_before) & (chunks_back >= -chunks_after)
    if causal:
        visible &= key <= query
    bias_QM = torch.zeros(visible.shape, dtype=torch.float32)
    return bias_QM.masked_fill_(~visible, FORBIDDEN).unsqueeze(0)


def tiles(
    plan: Plan, shape: torch.Size, bias_1QM: Tensor, attention_mask: Tensor | None, documents_BT: Tensor | None
) -> Iterator[Tile]:
    """Every tile, in one fixed order: dropout's draws in backward must follow those of forward."""
    num_rows, num_heads, length, _ = shape
    for row in range(num_rows):
        for start in range(0, length, plan.blocks * plan.queries):
            blocks = min(plan.blocks, -(-(length - start) // plan.queries))
            bias_XQM = _tile_bias(
                plan, start, blocks, length, bias_1QM, None if attention_mask is None else attention_mask[row]
            )
            if documents_BT is not None:
                bias_XQM = _keep_apart(bias_XQM, plan, start, blocks, documents_BT[row])
            for head in range(0, num_heads, plan.heads):
                head_stop = min(head + plan.heads, num_heads)
                shared = bias_XQM.size(0) == 1 or head_stop - head == 1
                bias = bias_XQM if shared else bias_XQM.repeat(head_stop - head, 1, 1)
                yield Tile(row, head, head_stop, start, blocks, bias)


def _tile_bias(plan: Plan, start: int, blocks: int, length: int, bias_1QM: Tensor, mask_T: Tensor | None) -> Tensor:
    """The bias of the tile's blocks with padding and places outside the sequence forbidden, one for all if none are."""
    low, high = start - plan.before, start + blocks * plan.queries + plan.after
    inside = low >= 0 and high <= length
    if mask_T is None and inside:
        return bias_1QM
    real_T = torch.ones(length, dtype=torch.bool, device=bias_1QM.device) if mask_T is None else mask_T
    real = F.pad(real_T[max(low, 0) : min(high, length)], (max(-low, 0), max(high - length, 0)))
    # On the CPU looking costs less than masking; elsewhere it would wait for the device.
    if real.device.type == "cpu" and real.all():
        return bias_1QM
    real_XM = real.unfold(0, plan.before + plan.queries + plan.after, plan.queries)
    return bias_1QM.expand(blocks, -1, -1).masked_fill(~real_XM.unsqueeze(1), FORBIDDEN)


def _keep_apart(bias_XQM: Tensor, plan: Plan, start: int, blocks: int, documents_T: Tensor) -> Tensor:
    """The bias of the tile's blocks with other documents than the query's forbidden too."""
    low, high = start - plan.before, start + blocks * plan.queries + plan.after
    near_T = documents_T[max(low, 0) : min(high, len(documents_T))]
    if near_T.device.type == "cpu" and near_T[0] == near_T[-1]:
        return bias_XQM
    # Places outside the sequence are forbidden already.
    near_T = F.pad(near_T, (max(-low, 0), max(high - len(documents_T), 0)))
    documents_XM = near_T.unfold(0, plan.before + plan.queries + plan.after, plan.queries)
    own_XQ = documents_XM[:, plan.before : plan.before + plan.queries]
    other_XQM = own_XQ.unsqueeze(2) != documents_XM.unsqueeze(1)
    return bias_XQM.expand(blocks, -1, -1).masked_fill(other_XQM, FORBIDDEN)


def stretch(x_BHTD: Tensor, tile: Tile, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Tokens ``[low, high)`` of a tile's heads, ``[heads, high - low, D]``, zeros outside; a view where possible."""
    length = x_BHTD.size(2)
    rows = x_BHTD[tile.row, tile.head : tile.head_stop, max(low, 0) : min(high, length)].to(dtype)
    if low < 0 or high > length:
        rows = F.pad(rows, (0, 0, max(-low, 0), max(high - length, 0)))
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def queries_of(x_BHTD: Tensor, plan: Plan, tile: Tile, dtype: torch.dtype) -> Tensor:
    """Each block's queries, ``[heads * blocks, Q, D]``."""
    rows = stretch(x_BHTD, tile, tile.start, tile.start + tile.blocks * plan.queries, dtype)
    return rows.unflatten(1, (tile.blocks, plan.queries)).flatten(0, 1)


def keys_of(x_BHTD: Tensor, plan: Plan, tile: Tile, dtype: torch.dtype) -> Tensor:
    """Each block's keys, ``[heads * blocks, M, D]``."""
    low, high = tile.start - plan.before, tile.start + tile.blocks * plan.queries + plan.after
    return overlapping(stretch(x_BHTD, tile, low, high, dtype), plan)


def overlapping(rows_hSD: Tensor, plan: Plan) -> Tensor:
    """Each block's keys out of the tile's: ``[heads * blocks, M, D]``; for one head a view in which blocks overlap."""
    span = plan.before + plan.queries + plan.after
    return rows_hSD.unfold(1, span, plan.queries).transpose(-1, -2).flatten(0, 1)


def add_overlapping(total_BHTD: Tensor, grad_XMD: Tensor, plan: Plan, tile: Tile) -> None:
    """Transpose of :func:`keys_of`: add each block's gradient to the tokens that it came from."""
    heads, span, step = tile.head_stop - tile.head, grad_XMD.size(1), plan.queries
    grad_hXMD = grad_XMD.unflatten(0, (heads, tile.blocks))
    sum_hSD = grad_XMD.new_zeros(
        heads, tile.blocks * step + _round_up(plan.before + plan.after, step), grad_XMD.size(2)
    )
    for offset in range(0, span, step):
        width = min(step, span - offset)
        place = sum_hSD[:, offset : offset + tile.blocks * step].unflatten(1, (tile.blocks, step))
        place[:, :, :width] += grad_hXMD[:, :, offset : offset + width]
    low = tile.start - plan.before
    first, last = max(low, 0), min(tile.start + tile.blocks * step + plan.after, total_BHTD.size(2))
    total_BHTD[tile.row, tile.head : tile.head_stop, first:last] += sum_hSD[:, first - low : last - low]
