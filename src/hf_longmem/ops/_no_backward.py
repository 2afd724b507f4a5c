"""Results that no gradient may flow through, said when one tries instead of left out in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_longmem._errors import complaint


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


def first_derivatives_only(operator: str, twin: str) -> Callable[..., Any]:
    """Make the backward of an operator's backward: it raises and names the module whose functions to use instead."""

    def refuse(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rule = f"{operator} has first derivatives only"
        raise RuntimeError(complaint(rule, "a request for a second one", f"use {twin}"))

    return refuse
