"""Linear layers whose weight may be used in place of their ``forward``."""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor, nn


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Tell a bare ``nn.Linear`` from one with an adapter, a quantised or sharded weight, or hooks, all to be called."""
    if type(module) is not nn.Linear or type(module.weight) not in (nn.Parameter, Tensor):
        return False
    return "forward" not in vars(module) and not module._forward_hooks and not module._forward_pre_hooks
