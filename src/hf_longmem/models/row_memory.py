"""What models with a long-term memory remember between calls: pure values, whose first axis is the batch.

They are no tuples: Trainer would rebuild those from a generator, and what casts a module's inputs would round memories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from hf_longmem._errors import complaint


@dataclass(frozen=True, eq=False)
class RowMemory:
    """Base of what a model remembers of each row: give it back as ``memory`` to go on where the call ended.

    seen_B: how many real tokens each row has read, int64, on the CPU.
    """

    seen_B: Tensor

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Put every tensor through ``change``, which may choose, repeat or move rows."""
        raise NotImplementedError

    def detach(self) -> Self:
        """Cut it from the graph that made it."""
        return self.map_rows(lambda tensor: tensor.detach())

    def reset(self, rows_B: Tensor) -> Self:
        """Make the chosen rows as new, bit for bit.

        Args:
            rows_B: which rows, bool or 0 and 1 ``[B]``.

        Raises:
            ValueError: not one value for each row.
        """
        rows = len(self.seen_B)
        if rows_B.shape != (rows,):
            rule = f"reset_memory must hold one bool for each of the {rows} rows"
            raise ValueError(complaint(rule, f"shape {tuple(rows_B.shape)}", f"use a bool tensor [{rows}]"))
        # Everything that a row which has read nothing remembers is zero.
        return self.map_rows(lambda tensor: _zero_rows(tensor, rows_B))

    def to(self, device: torch.device | str) -> Self:
        """Move to a device, but for ``seen_B``."""
        return replace(self.map_rows(lambda tensor: tensor.to(device)), seen_B=self.seen_B.cpu())


def _zero_rows(tensor: Tensor, rows_B: Tensor) -> Tensor:
    chosen = rows_B.to(tensor.device, torch.bool).view(-1, *[1] * (tensor.dim() - 1))
    return torch.where(chosen, torch.zeros_like(tensor), tensor)


__all__ = ["RowMemory"]
