"""How much memory a process has needed."""

from __future__ import annotations

import sys

import psutil
import torch


def peak_memory() -> dict[str, float]:
    """Look up how much this process has held at most since it began.

    Returns:
        Bytes: ``peak_memory`` in the machine's memory, and ``peak_memory_cuda`` in PyTorch's allocator where there is
        an NVIDIA card.
    """
    if sys.platform == "win32":
        peak = {"peak_memory": float(psutil.Process().memory_info().peak_wset)}
    else:
        import resource

        # Kilobytes on Linux, bytes on macOS.
        scale = 1 if sys.platform == "darwin" else 1024
        peak = {"peak_memory": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale)}
    if torch.cuda.is_available():
        peak["peak_memory_cuda"] = float(torch.cuda.max_memory_allocated())
    return peak


__all__ = ["peak_memory"]
