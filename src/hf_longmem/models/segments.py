"""How a call's tokens are cut at the borders of segments, row by row, counted from each document's start."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Cut(NamedTuple):
    """What each row does in one step of a segment loop.

    seen: how many real tokens it has read before.
    read: how many of the call's tokens are among them.
    full: whether its last segment is full and is written first.
    offsets: how many tokens of its segment it has read, after that write.
    takes: how many more it reads now.
    """

    seen: list[int]
    read: list[int]
    full: list[bool]
    offsets: list[int]
    takes: list[int]

    @property
    def most(self) -> int:
        """Tokens of the longest row, at least 1."""
        return max(*self.takes, 1)

    @property
    def holds(self) -> bool:
        """Whether any row has written anything when it reads."""
        return any(seen > offset for seen, offset in zip(self.seen, self.offsets, strict=True))


class Move(NamedTuple):
    """How a window becomes the next one: the kept stretch of it, then the new tokens.

    index_BS picks each row's places from the old window and the new tokens side by side; without it every row keeps
    the stretch ``start .. stop`` and appends.
    """

    start: int
    stop: int
    width: int
    index_BS: Tensor | None


class TakesTokens(Protocol):
    """Which of a call's tokens a step takes.

    tokens_BT says which, None for the stretch ``start .. start + length`` in every row; real_BT which of them are a
    row's own, first ones first, None for all; places_BT where they stand.
    """

    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def tokens_BT(self) -> Tensor | None: ...
    @property
    def real_BT(self) -> Tensor | None: ...
    @property
    def places_BT(self) -> Tensor: ...


def cut_segments(seen: list[int], counts: list[int], segment_length: int, *, at_least: int = 1) -> Iterator[Cut]:
    """Cut new tokens at multiples of ``segment_length`` counted from each row's start.

    A full segment is written when the token after it arrives, which no result can tell from an earlier write; so the
    write is part of the graph of the step that first reads it.

    Args:
        seen: how many real tokens each row has read.
        counts: how many it is given now.
        segment_length: L.
        at_least: how many steps, 1 or more; those that are left over read nothing.

    Yields:
        At least one step; none has more than L tokens a row.
    """
    length, rows = segment_length, range(len(seen))
    read, total = [0] * len(seen), list(seen)
    for number in itertools.count(1):
        offsets = [(t - 1) % length + 1 if t else 0 for t in total]
        full = [offsets[b] == length and read[b] < counts[b] for b in rows]
        offsets = [0 if f else offset for f, offset in zip(full, offsets, strict=True)]
        takes = [min(length - offsets[b], counts[b] - read[b]) for b in rows]
        yield Cut(list(total), list(read), full, offsets, takes)
        for b in rows:
            read[b] += takes[b]
            total[b] += takes[b]
        if read == counts and number >= at_least:
            return


def steps_of_all(num_steps: int, layers: Iterable[nn.Module], device: torch.device) -> int:
    """Give the most steps that any process makes in this call, if layers are sharded among processes.

    Each use of such a layer gathers its weights from all processes, which would wait for one that makes fewer steps.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return num_steps
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if not any(isinstance(layer, (FSDPModule, FullyShardedDataParallel)) for layer in layers):
        return num_steps
    most = torch.tensor(num_steps, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def move_window(cut: Cut, segment_length: int, window: int, old_width: int, device: torch.device) -> Move:
    """Plan how windows of ``window`` tokens before the segment, and then the segment's own, go on.

    Place c of a window is token ``c - window`` counted from the segment's start: the same in every row, however many
    tokens a row has read.

    Args:
        cut: the step.
        segment_length: L.
        window: W.
        old_width: places of the window as it is.
        device: where the plan's tensors are to live.
    """
    offsets, full, most = cut.offsets, cut.full, cut.most
    width = window + max(1, *(offset + take for offset, take in zip(offsets, cut.takes, strict=True)))
    index_BS = None
    if len({*zip(offsets, full, strict=True)}) > 1:
        place = torch.arange(width)
        kept_B = torch.tensor([window + offset for offset in offsets])[:, None]
        shift_B = torch.tensor([segment_length if f else 0 for f in full])[:, None]
        fresh_BS = old_width + (place - kept_B).clamp(0, most - 1)
        index_BS = torch.where(place < kept_B, place + shift_B, fresh_BS).to(device)
    shift = segment_length if full[0] else 0
    return Move(shift, shift + window + offsets[0], width, index_BS)


def append(window_BSE: Tensor, new_BTE: Tensor, move: Move) -> Tensor:
    """Make the next window ``[B, move.width, ...]`` out of the last one and the new tokens, numbers or vectors."""
    if move.index_BS is None:
        return torch.cat((window_BSE[:, move.start : move.stop], new_BTE), dim=1)[:, : move.width]
    both = torch.cat((window_BSE, new_BTE), dim=1)
    return gather_tokens(both, move.index_BS)


def gather_tokens(x_BTE: Tensor, index_BS: Tensor) -> Tensor:
    """Pick tokens of ``[B, T, ...]`` by ``index_BS``."""
    index = index_BS.view(*index_BS.shape, *[1] * (x_BTE.dim() - 2))
    return x_BTE.gather(1, index.expand(-1, -1, *x_BTE.shape[2:]))


def taken_tokens(cut: Cut, counts: list[int], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Give ``tokens_BT`` and ``real_BT`` of a step, see `TakesTokens`."""
    tokens_BT = None
    if len(set(cut.read)) > 1:
        tokens_BT = torch.tensor(cut.read)[:, None] + torch.arange(cut.most)
        tokens_BT = tokens_BT.clamp(max=max(counts) - 1).to(device)
    real_BT = None
    if min(cut.takes) < cut.most:
        real_BT = (torch.arange(cut.most) < torch.tensor(cut.takes)[:, None]).to(device)
    return tokens_BT, real_BT


def take_tokens(tokens_BTE: Tensor, step: TakesTokens) -> Tensor:
    """Take a step's tokens out of a call's ``[B, T, ...]``, numbers or vectors."""
    if step.tokens_BT is None:
        return tokens_BTE[:, step.start : step.start + step.length]
    return gather_tokens(tokens_BTE, step.tokens_BT)


def join_tokens(parts: Sequence[Tensor], order_BT: Tensor | None) -> Tensor:
    """Put the outputs of all steps into the order of the call, see `token_order`."""
    joined_BTE = torch.cat(tuple(parts), dim=1) if len(parts) > 1 else parts[0]
    return joined_BTE if order_BT is None else gather_tokens(joined_BTE, order_BT)


def token_order(steps: Sequence[TakesTokens], counts: list[int], num_tokens: int) -> Tensor | None:
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
