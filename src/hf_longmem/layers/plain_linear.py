"""Linear layers whose weight may be used in place of their ``forward``."""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor, nn


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Tell a bare ``nn.Linear`` from one with an adapter, a quantised or sharded weight, or hooks, all to be called."""
    if type(module) is not nn.Linear or type(module.weight) not in (nn.Parameter, Tensor):
        return False
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" not in vars(module) and not any(getattr(module, name) for name in hooks)
