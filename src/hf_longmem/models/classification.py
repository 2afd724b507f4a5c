"""What every sequence classifier does, whatever its base model: choose what to read, and score it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def pool_tokens(hidden_states: Tensor, attention_mask: Tensor | None, pooling: str | None) -> Tensor:
    """One vector per row, ``[B, E]``, from its real tokens: the ``"first"``, the ``"last"`` or their ``"mean"``.

    Args:
        hidden_states: ``[B, T, E]``.
        attention_mask: ``[B, T]``, 0 for padding; of a longer mask the last T columns count, as in the models.
        pooling: ``"first"``, ``"last"`` or ``"mean"``.
    """
    if attention_mask is None:
        attention_mask = hidden_states.new_ones(hidden_states.shape[:2])
    real = attention_mask[:, -hidden_states.shape[1] :].to(hidden_states.device) != 0
    if pooling == "mean":
        # Sums of many tokens leave float16's range.
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        total = hidden_states.masked_fill(~real[..., None], 0).sum(1, dtype=wide)
        return (total / real.sum(1, keepdim=True).clamp(min=1)).to(hidden_states.dtype)
    order = torch.arange(1, real.shape[1] + 1, device=real.device)
    token = (real * (order if pooling == "last" else order.flip(0))).argmax(-1)
    return hidden_states.take_along_dim(token[:, None, None], 1).squeeze(1)


def classification_loss(model: Any, logits: Tensor, labels: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """transformers' loss for the kind of labels given, scaled as Trainer's ``num_items_in_batch`` asks."""
    problem = SimpleNamespace(num_labels=model.config.num_labels, problem_type=_problem_type(model.config, labels))
    loss = model.loss_function(labels=labels, logits=logits, pooled_logits=logits, config=problem)
    return over_items(loss, labels, kwargs)


def over_items(mean_loss: Tensor, labels: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Turn a mean over this batch's labels into its share of the mean that Trainer asks for over several batches."""
    num_items = kwargs.get("num_items_in_batch")
    if num_items is None:
        return mean_loss
    counted = labels.numel() if labels.is_floating_point() else (labels != -100).sum().to(mean_loss.device)
    return mean_loss * (counted / torch.as_tensor(num_items, device=mean_loss.device))


def _problem_type(config: Any, labels: Tensor) -> str:
    # transformers would write its guess into the config, where it would outlive these labels.
    if config.problem_type is not None:
        return config.problem_type
    if config.num_labels == 1:
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
