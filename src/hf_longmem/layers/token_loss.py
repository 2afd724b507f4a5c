"""The loss of a language-model head without its logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_longmem.layers.plain_linear import is_plain
from hf_longmem.ops.chunking import chunked_linear_cross_entropy


def head_cross_entropy(
    head: nn.Module, hidden_states: Tensor, labels: Tensor, *, chunk_size: int, num_items: Tensor | int | None = None
) -> Tensor:
    """Cross entropy of ``head(hidden_states)``; a plain linear head's logits never exist all at once.

    Args:
        head: a ``nn.Linear`` from E to V, or what wraps one (an adapter, a quantised or a sharded layer).
        hidden_states: ``[B, T, E]``.
        labels: ``[B, T]``, already shifted, -100 where nothing is to be predicted.
        chunk_size: tokens whose logits exist at a time, 0 for all.
        num_items: divide the sum by this instead of the number of labels that count.

    Returns:
        A float32 (or float64) scalar.
    """
    labels = labels.to(hidden_states.device)
    if is_plain(head):
        weight, bias = head.weight, head.bias
        return chunked_linear_cross_entropy(
            hidden_states, weight, bias, labels, chunk_size=chunk_size, num_items=num_items
        )
    # Only its own forward knows what a wrapped head computes.
    logits = head(hidden_states).flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    num_items = (labels != -100).sum() if num_items is None else torch.as_tensor(num_items, device=counted.device)
    return counted / num_items.clamp(min=1)
