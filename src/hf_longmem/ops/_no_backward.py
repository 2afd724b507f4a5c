"""Results that no gradient may flow through, said when one tries instead of left out in silence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, source: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "gradients must not pass through the continuation of a cache, got a backward pass through one; "
            "train on whole sequences with use_cache=False"
        )


def no_backward(out: Tensor, source: Tensor) -> Tensor:
    """``out``, computed from ``source`` without a graph; where a graph is expected, its backward raises."""
    if torch.is_grad_enabled() and source.requires_grad:
        return _NoBackward.apply(out, source)
    return out
