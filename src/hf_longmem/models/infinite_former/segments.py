"""What each step of the infinity-former's segment loop does, and where the window of its queries lies.

A window holds, for each row, the ``W`` tokens before its segment and then the segment's own so far. Place c of it is
token ``c - W`` counted from the segment's start: the same in every row, however many tokens a row has read. What stands
outside a row's own tokens is never attended to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_longmem.models.segments import (
    Move,
    append,
    cut_segments,
    join_tokens,
    move_window,
    steps_of_all,
    take_tokens,
    taken_tokens,
    token_order,
)


class Step(NamedTuple):
    """What one step of the segment loop does.

    write: whether any row's last segment is full and is written first; ``write_B`` says which, None for all.
    move: how the window goes on, after the write.
    tokens_BT: which of the call's tokens, None for the stretch ``start .. start + length`` in every row.
    real_BT: which of them are a row's own, None for all.
    places_BT: where they stand in the window, ``[B or 1, T]``.
    first: place of the first key that any query sees.
    mask_BTS: which keys from there on each query sees, ``[B or 1, T, S]``.
    holds: whether any row's memory holds anything when it is read.
    """

    write: bool
    write_B: Tensor | None
    move: Move
    start: int
    length: int
    tokens_BT: Tensor | None
    real_BT: Tensor | None
    places_BT: Tensor
    first: int
    mask_BTS: Tensor
    holds: bool


def plan_steps(
    seen: list[int],
    counts: list[int],
    segment_length: int,
    window: int,
    old_width: int,
    device: torch.device,
    *,
    at_least: int = 1,
) -> Iterator[Step]:
    """Plan the steps of a call, see `cut_segments`.

    Args:
        seen: how many real tokens each row has read.
        counts: how many it is given now; they come first among the call's tokens.
        segment_length: L.
        window: W.
        old_width: places of the window as it is.
        device: where the plan's tensors are to live.
        at_least: how many steps.

    Yields:
        At least one step; none has more than L tokens a row.
    """
    last = max(*counts, 1) - 1
    sights: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
    for cut in cut_segments(seen, counts, segment_length, at_least=at_least):
        move = move_window(cut, segment_length, window, old_width, device)
        tokens_BT, real_BT = taken_tokens(cut, counts, device)
        before = [min(window, total - offset) for total, offset in zip(cut.seen, cut.offsets, strict=True)]
        first = window - max(before)
        # From the second segment on they repeat, and a call may have thousands.
        sight = tuple(cut.offsets), tuple(before), cut.most, move.width
        if sight not in sights:
            sights[sight] = _sight(cut.offsets, before, window, cut.most, first, move.width, device)
        places_BT, mask_BTS = sights[sight]
        if real_BT is not None:
            # What a padding token computes is thrown away; it only has to be finite.
            mask_BTS = mask_BTS | ~real_BT[:, :, None]
        write_B = None if all(cut.full) else torch.tensor(cut.full).to(device)
        yield Step(
            write=any(cut.full),
            write_B=write_B,
            move=move,
            # A step that reads nothing, after all others, is given a token to throw away.
            start=min(cut.read[0], last),
            length=cut.most,
            tokens_BT=tokens_BT,
            real_BT=real_BT,
            places_BT=places_BT,
            first=first,
            mask_BTS=mask_BTS,
            holds=cut.holds,
        )
        old_width = move.width


def _sight(
    offsets: list[int], before: list[int], window: int, most: int, first: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Places of the new tokens ``[B or 1, T]``, and which keys from ``first`` on each sees ``[B or 1, T, S]``."""
    if len(set(zip(offsets, before, strict=True))) == 1:
        offsets, before = offsets[:1], before[:1]
    places_BT = window + torch.tensor(offsets)[:, None] + torch.arange(most)
    oldest_B11 = window - torch.tensor(before)[:, None, None]
    key_S = torch.arange(first, width)
    mask_BTS = (key_S >= oldest_B11) & (key_S <= places_BT[:, :, None])
    return places_BT.to(device), mask_BTS.to(device)


__all__ = ["Move", "Step", "append", "join_tokens", "plan_steps", "steps_of_all", "take_tokens", "token_order"]
