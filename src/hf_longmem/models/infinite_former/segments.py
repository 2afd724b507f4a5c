"""How a call's tokens are cut at the borders of segments, row by row, and where each one's window lies.

A window holds, for each row, the ``W`` tokens before its segment and then the segment's own so far. Place c of it is
token ``c - W`` counted from the segment's start: the same in every row, however many tokens a row has read. What stands
outside a row's own tokens is never attended to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Move(NamedTuple):
    """How a window becomes the next one: the kept stretch of it, then the new tokens.

    index_BS picks each row's places from the old window and the new tokens side by side; without it every row keeps
    the stretch ``start .. stop`` and appends.
    """

    start: int
    stop: int
    width: int
    index_BS: Tensor | None


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


def append(window_BSE: Tensor, new_BTE: Tensor, move: Move) -> Tensor:
    """Make the next window ``[B, move.width, E]`` out of the last one and the new tokens."""
    if move.index_BS is None:
        return torch.cat((window_BSE[:, move.start : move.stop], new_BTE), dim=1)[:, : move.width]
    both = torch.cat((window_BSE, new_BTE), dim=1)
    return both.gather(1, move.index_BS[..., None].expand(-1, -1, both.shape[-1]))


def plan_steps(
    seen: list[int], counts: list[int], segment_length: int, window: int, old_width: int, device: torch.device
) -> Iterator[Step]:
    """Cut new tokens at multiples of ``segment_length`` counted from each row's start.

    A full segment is written when the token after it arrives, which no result can tell from an earlier write; so the
    write is part of the graph of the step that first reads it.

    Args:
        seen: how many real tokens each row has read.
        counts: how many it is given now; they come first among the call's tokens.
        segment_length: L.
        window: W.
        old_width: places of the window as it is.
        device: where the plan's tensors are to live.

    Yields:
        At least one step; none has more than L tokens a row.
    """
    length, rows = segment_length, range(len(seen))
    read, total = [0] * len(seen), list(seen)
    while True:
        offsets = [(t - 1) % length + 1 if t else 0 for t in total]
        full = [offsets[b] == length and read[b] < counts[b] for b in rows]
        offsets = [0 if f else offset for f, offset in zip(full, offsets, strict=True)]
        takes = [min(length - offsets[b], counts[b] - read[b]) for b in rows]
        most = max(*takes, 1)
        width = window + max(1, *(offsets[b] + takes[b] for b in rows))
        alike = len({*zip(offsets, full, strict=True)}) == 1
        before = [min(window, total[b] - offsets[b]) for b in rows]

        index_BS = None
        if not alike:
            place = torch.arange(width)
            kept_B = torch.tensor([window + offset for offset in offsets])[:, None]
            shift_B = torch.tensor([length if f else 0 for f in full])[:, None]
            fresh_BS = old_width + (place - kept_B).clamp(0, most - 1)
            index_BS = torch.where(place < kept_B, place + shift_B, fresh_BS).to(device)
        shift = length if full[0] else 0
        move = Move(shift, shift + window + offsets[0], width, index_BS)

        tokens_BT = None
        if len(set(read)) > 1:
            tokens_BT = torch.tensor(read)[:, None] + torch.arange(most)
            tokens_BT = tokens_BT.clamp(max=max(counts) - 1).to(device)
        real_BT = None
        if min(takes) < most:
            real_BT = (torch.arange(most) < torch.tensor(takes)[:, None]).to(device)
        first = window - max(before)
        places_BT, mask_BTS = _sight(offsets, before, window, most, first, width, device)
        if real_BT is not None:
            # What a padding token computes is thrown away; it only has to be finite.
            mask_BTS = mask_BTS | ~real_BT[:, :, None]
        write_B = None if all(full) else torch.tensor(full).to(device)
        holds = any(total[b] > offsets[b] for b in rows)
        yield Step(any(full), write_B, move, read[0], most, tokens_BT, real_BT, places_BT, first, mask_BTS, holds)
        for b in rows:
            read[b] += takes[b]
            total[b] += takes[b]
        old_width = width
        if read == counts:
            return


def token_order(steps: list[Step], counts: list[int], num_tokens: int) -> Tensor | None:
    """Where, among the outputs of all steps side by side, each of the call's tokens is: ``[B, T]``, None for in order.

    Padding tokens get the place of a row's first token.
    """
    if all(step.tokens_BT is None and step.real_BT is None for step in steps) and set(counts) == {num_tokens}:
        return None
    order_BT = torch.zeros(len(counts), num_tokens, dtype=torch.long, device=steps[0].places_BT.device)
    done_B1 = torch.zeros(len(counts), 1, dtype=torch.long, device=order_BT.device)
    token_T = torch.arange(num_tokens, device=order_BT.device)
    base = 0
    for step in steps:
        taken_B1 = torch.full_like(done_B1, step.length)
        if step.real_BT is not None:
            taken_B1 = step.real_BT.sum(dim=1, keepdim=True)
        here_BT = (token_T >= done_B1) & (token_T < done_B1 + taken_B1)
        order_BT = torch.where(here_BT, token_T - done_B1 + base, order_BT)
        done_B1 = done_B1 + taken_B1
        base += step.length
    return order_BT


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
