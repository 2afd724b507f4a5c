"""Which slots meet in which block, and who may see whom: the two candidate rules of LSH attention, tile by tile.

A slot is a token of one row and head: ``slot = (row * H + head) * T + position``. Slot S stands for "before
everything", slot S + 1 for "after everything"; they fill blocks at the ends and are seen by nobody.

The masks are computed with arithmetic instead of comparisons: for whole numbers z, ``min(z, 0) * bias_unit`` is 0 where
z >= 0 and forbidding where z < 0, and ``bias_unit`` is a factor of the matrix product that follows. On a CPU this is
several times as fast as ``torch.where`` on boolean masks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_longmem.ops._blocks import FORBIDDEN, LONELY

# Scores computed at once: on a CPU a tile should stay in the second-level cache, an accelerator wants larger ones.
SCORES_PER_TILE_CPU = 2**19
SCORES_PER_TILE = 2**25
QUERIES_PER_BLOCK = 32
# Up to so many keys a CPU's float32 product adds one after the other, so that zeros between them change no bit.
KEYS_IN_ORDER_CPU = 160


@dataclasses.dataclass(frozen=True)
class Tile:
    """``blocks`` blocks of ``queries`` against ``keys`` slots; block x begins at row ``x * step`` of the gathered keys.

    Where ``step < keys`` the blocks overlap, and views of the gathered rows serve as keys without a copy.
    """

    round: int
    query_slots: Tensor
    key_slots: Tensor
    blocks: int
    queries: int
    keys: int
    step: int
    first_query: int

    def key_view(self, rows: Tensor, first: int = 0, count: int | None = None) -> Tensor:
        """Rows ``first`` to ``first + count`` (all by default) of each block, ``[blocks, count, width]``, no copy."""
        stride, width = rows.stride(0), rows.shape[1]
        return rows.as_strided(
            (self.blocks, self.keys if count is None else count, width),
            (self.step * stride, stride, 1),
            rows.storage_offset() + first * stride,
        )

    def query_view(self, rows: Tensor) -> Tensor:
        """The rows of each block that are its queries, ``[blocks, queries, width]``, no copy."""
        return self.key_view(rows, self.first_query, self.queries)

    def sum_keys(self, rows: Tensor, grad_XMD: Tensor) -> None:
        """Fill the gathered rows with the sum of what the blocks found for them."""
        self.key_view(rows, 0, self.step).copy_(grad_XMD[:, : self.step])
        rows[self.blocks * self.step :] = 0.0
        for first in range(self.step, self.keys, self.step):
            self.key_view(rows, first, self.step).add_(grad_XMD[:, first : first + self.step])


class BucketLayout:
    """Same bucket, and at most ``before`` places earlier (``after`` later) in the order (bucket, position).

    All rows and heads are one sequence: other buckets are masked anyway, so other rows are too. The code ``u`` of a
    slot in a round is its place in that sequence, plus a gap larger than the window at every change of bucket:
    ``j`` is a candidate of ``i`` if and only if ``-after <= u_i - u_j <= before``.

    A later token shifts all that follows it in the sequence, and may so move a token's keys within their block. Where a
    product might then add them in another order, each bucket begins with a block of its own (``aligned``): where in a
    block a token stands depends only on its place in the bucket, on earlier tokens that is.
    """

    bias_unit = -FORBIDDEN

    def __init__(
        self,
        order_BHRT: Tensor,
        buckets_BHRT: Tensor,
        mask_BT: Tensor | None,
        before: int,
        after: int,
        *,
        once: bool,
        dtype: torch.dtype,
    ) -> None:
        batch, heads, rounds, length = order_BHRT.shape
        device = order_BHRT.device
        self.slots = batch * heads * length
        self.rounds, self.once, self.both_ways = rounds, once, after > 0
        self.before, self.after = before, after
        # An interval with a whole centre lets |u - centre| <= half test membership; the token itself may be in or out.
        self.low = -after if after else before % 2
        self.scale = 1 + (before + self.low) % 2

        self.queries = min(QUERIES_PER_BLOCK, max(8, before + after))
        pad_before = -(-before // self.queries) * self.queries
        pad_after = -(-after // self.queries) * self.queries
        self.keys = pad_before + self.queries + pad_after
        self.first_query = pad_before
        self.tile_blocks = blocks_per_tile(self.queries * self.keys, device)

        if mask_BT is not None:
            buckets_BHRT = buckets_BHRT.masked_fill(~mask_BT.bool()[:, None, None, :], -1)
        changes_BHRT = torch.ones_like(order_BHRT, dtype=torch.bool)
        sorted_BHRT = buckets_BHRT.gather(-1, order_BHRT)
        torch.ne(sorted_BHRT[..., 1:], sorted_BHRT[..., :-1], out=changes_BHRT[..., 1:])
        gap = max(before, after) + 1
        largest = self.scale * self.slots * (gap + 1)
        whole, far = (torch.int32, 2**30) if largest < 2**30 else (torch.int64, 2**62)
        row_offset_BH11 = (torch.arange(batch * heads, device=device) * length).view(batch, heads, 1, 1)
        order_RS = (order_BHRT + row_offset_BH11).permute(2, 0, 1, 3).reshape(rounds, self.slots)
        changes_RS = changes_BHRT.permute(2, 0, 1, 3).reshape(rounds, self.slots)
        codes_RS = torch.cumsum(changes_RS, dim=-1, dtype=whole).mul_(gap)
        codes_RS.add_(torch.arange(self.slots, dtype=whole, device=device)).mul_(self.scale)
        if device.type == "cpu" and codes_RS.numel():
            # The bound counts a change of bucket at every token; to look at the largest code is free on a CPU only.
            largest = int(codes_RS[:, -1].max())
        self.codes_RS = torch.full((rounds, self.slots + 2), far, dtype=whole, device=device)
        self.codes_RS[:, self.slots] = -far
        self.codes_RS.scatter_(1, order_RS, codes_RS)
        if largest < 2**24:
            # Whole numbers up to 2^24 are exact in float32, and then need not be converted tile by tile.
            self.codes_RS = self.codes_RS.float()
        in_order = device.type == "cpu" and dtype == torch.float32 and self.keys <= KEYS_IN_ORDER_CPU
        place_RS = None if in_order else self._aligned_places(changes_RS)
        self.blocks = -(-(self.slots if place_RS is None else int(place_RS.max()) + 1) // self.queries)
        width = pad_before + self.blocks * self.queries + pad_after
        self.sequence_RX = order_RS.new_full((rounds, width), self.slots)
        if place_RS is None:
            self.sequence_RX[:, pad_before : pad_before + self.slots] = order_RS
            self.sequence_RX[:, pad_before + self.slots :] = self.slots + 1
        else:
            self.sequence_RX.scatter_(1, place_RS + pad_before, order_RS)
        self.band_QM = self._band(device)

    def _aligned_places(self, changes_RS: Tensor) -> Tensor:
        """Where each slot stands if every bucket begins with a block."""
        place_S = torch.arange(self.slots, device=changes_RS.device)
        first_RS = torch.where(changes_RS, place_S, 0).cummax(dim=1).values
        gap_RS = torch.zeros_like(first_RS)
        gap_RS[:, 1:] = torch.where(changes_RS[:, 1:], (first_RS[:, :-1] - place_S[1:]) % self.queries, 0)
        return place_S + gap_RS.cumsum(dim=1)

    def _band(self, device: torch.device) -> Tensor:
        ahead_QM = (
            torch.arange(self.queries, device=device)[:, None]
            + self.first_query
            - torch.arange(self.keys, device=device)[None, :]
        )
        seen_QM = (ahead_QM >= -self.after) & (ahead_QM <= self.before)
        band_QM = torch.where(seen_QM, 0.0, -1.0)
        return band_QM.masked_fill(ahead_QM == 0, LONELY / self.bias_unit)

    def tiles(self) -> Iterator[Tile]:
        for round_ in range(self.rounds):
            for first in range(0, self.blocks, self.tile_blocks):
                blocks = min(self.tile_blocks, self.blocks - first)
                key_slots = self.sequence_RX[
                    round_, first * self.queries : (first + blocks - 1) * self.queries + self.keys
                ]
                yield Tile(
                    round=round_,
                    query_slots=key_slots[self.first_query : self.first_query + blocks * self.queries],
                    key_slots=key_slots,
                    blocks=blocks,
                    queries=self.queries,
                    keys=self.keys,
                    step=self.queries,
                    first_query=self.first_query,
                )

    def bias(self, tile: Tile, dtype: torch.dtype) -> Tensor:
        """What to add to the scores of a tile, ``[blocks, queries, keys]`` in units of ``bias_unit``."""
        first = 0 if self.once else tile.round
        codes_RY = self.codes_RS[first : tile.round + 1].index_select(1, tile.key_slots)
        codes_RXM = codes_RY.as_strided(
            (codes_RY.shape[0], tile.blocks, 1, tile.keys), (codes_RY.stride(0), tile.step, 1, 1)
        )
        codes_RXQ = codes_RXM[:, :, 0, self.first_query : self.first_query + tile.queries].unsqueeze(-1)
        window = self.scale * max(self.before, self.after)
        if self.both_ways:
            margin_XQM = window - _distance(codes_RXQ[-1], codes_RXM[-1], dtype)
        else:
            margin_XQM = (codes_RXM[-1] - (codes_RXQ[-1] - window)).to(dtype)
        if codes_RY.shape[0] > 1:
            # Keep the first round that offers a key: the others must be outside the window of every earlier round.
            middle = (self.low + self.before) * self.scale // 2
            half = (self.before - self.low) * self.scale // 2
            nearest_XQM = _distance(codes_RXQ[0] - middle, codes_RXM[0], dtype)
            for codes_XQ1, codes_X1M in zip(codes_RXQ[1:-1] - middle, codes_RXM[1:-1], strict=True):
                torch.minimum(nearest_XQM, _distance(codes_XQ1, codes_X1M, dtype), out=nearest_XQM)
            torch.minimum(margin_XQM, nearest_XQM.sub_(half + 1), out=margin_XQM)
        return torch.minimum(margin_XQM, self.band_QM.to(dtype), out=margin_XQM)


class ChunkLayout:
    """Everything in the own and the neighbouring chunks of the order (bucket, position), as in Trax and transformers.

    With ``once`` every round stands alone and a key counts in the first round that offers it. Without, the rounds of a
    row and head form a ring: the first chunk of a round has the last chunk of the round before as its neighbour.
    Chunks may hold the end of one document and the beginning of another, which do not see each other.
    """

    bias_unit = -LONELY

    def __init__(
        self,
        order_BHRT: Tensor,
        mask_BT: Tensor | None,
        documents_BT: Tensor | None,
        chunk_length: int,
        before: int,
        after: int,
        *,
        causal: bool,
        once: bool,
    ) -> None:
        batch, heads, rounds, length = order_BHRT.shape
        device = order_BHRT.device
        self.slots = batch * heads * length
        if not once and length <= chunk_length:
            # transformers attends to everything, without hashing, when one chunk holds it.
            before = after = 0
        self.rounds, self.causal, self.once = rounds, causal, once
        self.before, self.after, self.queries = before, after, chunk_length
        self.keys = (before + 1 + after) * chunk_length
        self.first_query = before * chunk_length
        self.tile_blocks = blocks_per_tile(self.queries * self.keys, device)
        self.chunks = -(-length // chunk_length)
        self.lines = batch * heads

        row_offset_BH11 = (torch.arange(self.lines, device=device) * length).view(batch, heads, 1, 1)
        slots_BHRT = order_BHRT + row_offset_BH11
        padded_BHRX = torch.nn.functional.pad(
            slots_BHRT, (0, self.chunks * chunk_length - length), value=self.slots + 1
        )
        chunks_ZC = padded_BHRX.reshape(-1, chunk_length)
        self.nothing = chunks_ZC.shape[0]
        self.chunks_ZC = torch.cat([chunks_ZC, chunks_ZC.new_full((1, chunk_length), self.slots + 1)])
        positions_BT = torch.arange(length, dtype=torch.int32, device=device).expand(batch, length)
        unseen = torch.iinfo(torch.int32).max // 2
        if mask_BT is not None:
            positions_BT = positions_BT.masked_fill(~mask_BT.bool(), unseen)
        self.positions_S = torch.full((self.slots + 2,), unseen, dtype=torch.int32, device=device)
        self.positions_S[: self.slots] = positions_BT[:, None].expand(batch, heads, length).reshape(-1)
        self.unseen = unseen
        self.documents_S: Tensor | None = None
        if documents_BT is not None:
            documents_BHT = documents_BT.int()[:, None].expand(batch, heads, length)
            self.documents_S = torch.nn.functional.pad(documents_BHT.reshape(-1), (0, 2))
        if once and rounds > 1:
            chunk_T = torch.arange(length, dtype=torch.int32, device=device) // chunk_length
            self.chunk_of_RS = torch.full((rounds, self.slots + 2), unseen // 4, dtype=torch.int32, device=device)
            self.chunk_of_RS.scatter_(
                1,
                slots_BHRT.permute(2, 0, 1, 3).reshape(rounds, self.slots),
                chunk_T.repeat(self.lines).expand(rounds, -1),
            )

    def tiles(self) -> Iterator[Tile]:
        device = self.chunks_ZC.device
        shifts = torch.arange(-self.before, self.after + 1, device=device)
        for round_ in range(self.rounds):
            for first in range(0, self.lines * self.chunks, self.tile_blocks):
                blocks = min(self.tile_blocks, self.lines * self.chunks - first)
                block_X = torch.arange(first, first + blocks, device=device)
                line_X1 = (block_X // self.chunks * self.rounds * self.chunks)[:, None]
                neighbour_XN = (block_X % self.chunks)[:, None] + shifts
                if self.once:
                    outside_XN = (neighbour_XN < 0) | (neighbour_XN >= self.chunks)
                    chunk_XN = (line_X1 + round_ * self.chunks + neighbour_XN).masked_fill(outside_XN, self.nothing)
                else:
                    chunk_XN = line_X1 + (round_ * self.chunks + neighbour_XN) % (self.rounds * self.chunks)
                yield Tile(
                    round=round_,
                    query_slots=self.chunks_ZC[chunk_XN[:, self.before]].flatten(),
                    key_slots=self.chunks_ZC[chunk_XN].flatten(),
                    blocks=blocks,
                    queries=self.queries,
                    keys=self.keys,
                    step=self.keys,
                    first_query=self.first_query,
                )

    def bias(self, tile: Tile, dtype: torch.dtype) -> Tensor:
        """What to add to the scores of a tile, ``[blocks, queries, keys]`` in units of ``bias_unit``."""
        own = slice(tile.first_query, tile.first_query + tile.queries)
        positions_XM = self.positions_S[tile.key_slots].view(tile.blocks, tile.keys)
        ahead_XQM = positions_XM[:, own, None] - positions_XM[:, None, :]
        # -1 where the token meets itself, -2 (or -1 and the penalty below) where it must not look, 0 elsewhere.
        steps_XQM = ahead_XQM.clamp_(-1, 1).sub_(1) if self.causal else ahead_XQM.abs().clamp_(max=1).sub_(1)
        bias_XQM = steps_XQM.to(dtype)
        if not self.causal:
            bias_XQM.sub_((positions_XM == self.unseen).to(dtype).mul_(2)[:, None, :])
        if self.documents_S is not None:
            documents_XM = self.documents_S[tile.key_slots].view(tile.blocks, tile.keys)
            bias_XQM.sub_((documents_XM[:, own, None] != documents_XM[:, None, :]).to(dtype).mul_(2))
        if self.once and tile.round:
            chunks_RXM = 2 * self.chunk_of_RS[: tile.round, tile.key_slots].view(-1, tile.blocks, tile.keys)
            middle, half = self.before - self.after, self.before + self.after
            for chunks_XM in chunks_RXM:
                margin_XQM = _distance(chunks_XM[:, own, None] - middle, chunks_XM[:, None, :], dtype).sub_(half + 1)
                bias_XQM.add_(margin_XQM.clamp_(-1, 0), alpha=2)
        return bias_XQM


def _distance(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``|a - b|`` of whole numbers as ``dtype``, without the second temporary of the in-place ``abs_``."""
    difference = (a - b).to(dtype)
    return torch.abs(difference, out=difference)


Layout = BucketLayout | ChunkLayout


def candidate_layout(
    order_BHRT: Tensor,
    buckets_BHRT: Tensor,
    mask_BT: Tensor | None,
    documents_BT: Tensor | None,
    chunk_length: int,
    before: int,
    after: int,
    causal: bool,
    candidates: str,
    merge: str,
    dtype: torch.dtype,
) -> Layout:
    """Choose the layout of a candidate rule; the arguments are those of ``lsh_attention``, checked there, and the type
    in which products are taken."""
    once, length = merge == "union", order_BHRT.shape[-1]
    # Places beyond the input hold nothing: without them a window wider than a short input costs no more than it.
    if candidates == "bucket":
        before, after = min(chunk_length * before, length), min(chunk_length * after, length)
        return BucketLayout(order_BHRT, buckets_BHRT, mask_BT, before, after, once=once, dtype=dtype)
    chunk_length = min(chunk_length, length)
    return ChunkLayout(order_BHRT, mask_BT, documents_BT, chunk_length, before, after, causal=causal, once=once)


def blocks_per_tile(scores_per_block: int, device: torch.device) -> int:
    budget = SCORES_PER_TILE_CPU if device.type == "cpu" else SCORES_PER_TILE
    return max(1, budget // scores_per_block)
