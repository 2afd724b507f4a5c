"""Ids that a table of embeddings is to look up."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_longmem._errors import complaint


def check_range(name: str, ids: Tensor, limit: int, fix: str) -> None:
    """Raise a ValueError on ids outside ``0 .. limit - 1``, if they are on the CPU.

    Elsewhere a look at the values would wait for the device, and be traced in a graph.
    """
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or ids.numel() == 0:
        return
    low, high = (int(value) for value in ids.aminmax())
    if low < 0 or high >= limit:
        raise ValueError(complaint(f"{name} must lie in 0 .. {limit - 1}", low if low < 0 else high, fix))


__all__ = ["check_range"]
