"""What an attention layer asks of a cache."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class AttentionCache(Protocol):
    """Attends with new tokens to the remembered ones and to each other, and remembers them."""

    def attend(self, *tensors: Tensor | None, **rules: Any) -> Tensor:
        """Take the new tokens' projections ``[B, H, T, D]`` and their mask, return ``[B, H, T, D]``."""
        ...


def past_reach(reach: dict[str, Any]) -> dict[str, Any]:
    """The rules of an attention layer without those that a cache, always causal, does not know."""
    return {name: value for name, value in reach.items() if name not in ("causal", "chunks_after")}
