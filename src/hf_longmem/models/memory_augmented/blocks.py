"""What the model is given to read in each step: a block of the tokens before a segment and the segment so far.

Blocks end together: row b's tokens stand at the right, whatever their number, with padding before them. So a cache of
the model's own can go on from one, and the distance of two tokens is that of their places, as sliding windows need.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_longmem.models.segments import Cut, Move, cut_segments, move_window, taken_tokens


class Block(NamedTuple):
    """One step of the segment loop.

    write: whether any row's last segment is full and is written first; ``write_B`` says which, None for all.
    window_move, pending_move: how the window of tokens and the inputs to be written go on, after the write.
    start, length, tokens_BT, real_BT: which of the call's tokens are new, see `TakesTokens`.
    places_BT: positions of the new tokens, ``[B, T]``, ordered as the block's last places are.
    follows: whether the new tokens could go on from a cache of the block before.
    index_BS: which places of the window make the block, None for the stretch ``first .. stop``.
    positions_BS: their positions, from 0 in every block.
    mask_BS: which are real; None for all.
    front_BT: where among the last places each row's new tokens are, None for in order.
    holds: whether any row has written anything.
    """

    write: bool
    write_B: Tensor | None
    window_move: Move
    pending_move: Move
    start: int
    length: int
    tokens_BT: Tensor | None
    real_BT: Tensor | None
    places_BT: Tensor
    follows: bool
    index_BS: Tensor | None
    first: int
    stop: int
    positions_BS: Tensor
    mask_BS: Tensor | None
    front_BT: Tensor | None
    holds: bool

    @property
    def counted_BT(self) -> Tensor | None:
        """Which of the last places hold new tokens, None for all."""
        return None if self.real_BT is None else self.real_BT.flip(1)


def plan_blocks(
    seen: list[int],
    counts: list[int],
    segment_length: int,
    window: int,
    widths: tuple[int, int],
    device: torch.device,
) -> Iterator[Block]:
    """Plan the blocks of a call.

    Args:
        seen: how many real tokens each row has read.
        counts: how many it is given now; they come first among the call's tokens.
        segment_length: L.
        window: W.
        widths: places of the window and of the inputs to be written, as they are.
        device: where the plan's tensors are to live.

    Yields:
        At least one block.
    """
    old_window, old_pending = widths
    for cut in cut_segments(seen, counts, segment_length):
        window_move = move_window(cut, segment_length, window, old_window, device)
        pending_move = move_window(cut, segment_length, 0, old_pending, device)
        yield _plan(cut, counts, window, window_move, pending_move, device)
        old_window, old_pending = window_move.width, pending_move.width


def _plan(
    cut: Cut, counts: list[int], window: int, window_move: Move, pending_move: Move, device: torch.device
) -> Block:
    rows = range(len(counts))
    before = [min(window, cut.seen[b] - cut.offsets[b]) for b in rows]
    sizes = [before[b] + cut.offsets[b] + cut.takes[b] for b in rows]
    ends = [window + cut.offsets[b] + cut.takes[b] for b in rows]
    width, most = max(*sizes, 1), cut.most
    place_S = torch.arange(width)
    size_B1, end_B1 = torch.tensor(sizes)[:, None], torch.tensor(ends)[:, None]
    positions_BS = (place_S - (width - size_B1)).clamp(min=0)
    alike = len({*zip(sizes, ends, strict=True)}) == 1
    # Where no row has read anything and no window precedes a segment, the block is one place of padding.
    first = max(ends[0] - width, 0)
    index_BS = mask_BS = None
    if not alike:
        index_BS = (end_B1 - width + place_S).clamp(min=0).to(device)
    if min(sizes) < width:
        mask_BS = (place_S >= width - size_B1).to(device)
    tokens_BT, real_BT = taken_tokens(cut, counts, device)
    front_BT = None
    if real_BT is not None:
        lacking_B1 = most - torch.tensor(cut.takes)[:, None]
        front_BT = (torch.arange(most) + lacking_B1).clamp(max=most - 1).to(device)
    return Block(
        write=any(cut.full),
        write_B=None if all(cut.full) else torch.tensor(cut.full).to(device),
        window_move=window_move,
        pending_move=pending_move,
        start=cut.read[0],
        length=most,
        tokens_BT=tokens_BT,
        real_BT=real_BT,
        places_BT=positions_BS[:, width - most :].to(device),
        follows=real_BT is None and not any(cut.full),
        index_BS=index_BS,
        first=first,
        stop=first + width,
        positions_BS=positions_BS.to(device),
        mask_BS=mask_BS,
        front_BT=front_BT,
        holds=cut.holds,
    )


__all__ = ["Block", "plan_blocks"]
