"""Padding, taken out of a model's sight: real tokens first inside, the caller's order outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from hf_longmem._errors import complaint
from hf_longmem.ops.documents import document_numbers


def compact_padding(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a base model's ``forward`` so that padding anywhere equals padding on the right.

    Each row's real tokens are moved to its front (in their order), and ``last_hidden_state``, ``hidden_states`` and
    ``attentions`` are put back into the caller's order. ``position_ids`` default to counting real tokens. Inside,
    ``attention_mask`` is None or bool ``[B, T]`` with the padding last, and ``document_ids``, where given, numbers the
    documents of each row from 0. Goes outside ``@capture_outputs``, so that what that records is put back too.
    """

    @wraps(forward)
    def wrapper(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return_dict = kwargs.pop("return_dict", None)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        tokens = input_ids if input_ids is not None else inputs_embeds
        order = None
        document_ids = pop_documents(kwargs)
        if position_ids is not None and tokens is not None:
            check_positions(position_ids, tokens)
        if attention_mask is not None and tokens is not None:
            attention_mask = real_tokens(attention_mask, tokens)
        if attention_mask is not None and tokens is not None:
            order = torch.argsort(~attention_mask, dim=1, stable=True)
            attention_mask = attention_mask.gather(1, order)
            if input_ids is not None:
                input_ids = input_ids.gather(1, order)
            if inputs_embeds is not None:
                inputs_embeds = finite_padding(_reorder(inputs_embeds, order, 1), attention_mask)
            if position_ids is not None:
                position_ids = position_ids.expand(order.shape).gather(1, order)
        if document_ids is not None and tokens is not None:
            document_ids = check_documents(document_ids, tokens)
            document_ids = document_ids if order is None else document_ids.gather(1, order)
            kwargs["document_ids"] = document_numbers(document_ids, attention_mask)
        outputs = forward(
            self, input_ids, attention_mask, position_ids, cache, inputs_embeds, *args, return_dict=True, **kwargs
        )
        if order is not None:
            _restore(outputs, torch.argsort(order, dim=1))
        return outputs if return_dict else outputs.to_tuple()

    return wrapper


def finite_padding(embeddings: Tensor, real: Tensor) -> Tensor:
    """Embeddings ``[B, T, E]`` without the NaN and infinity that may stand where ``real`` ``[B, T]`` says padding."""
    return embeddings.masked_fill(~(real[..., None] | embeddings.isfinite()), 0.0)


def check_size(tokens: Tensor) -> None:
    """Raise a ValueError if ``[B, T]`` or ``[B, T, E]`` holds no token."""
    if 0 in tokens.shape[:2]:
        rule = "an input must have at least one row and at least one token"
        raise ValueError(complaint(rule, f"shape {tuple(tokens.shape)}", "leave out empty inputs"))


def check_positions(position_ids: Tensor, tokens: Tensor) -> None:
    """Raise a ValueError if there is not one position per token of ``[B, T]`` or ``[B, T, E]``, or of any row."""
    batch, length = tokens.shape[:2]
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
        rule = f"position_ids must be [{batch}, {length}] or [1, {length}], as the input is"
        raise ValueError(complaint(rule, f"shape {list(position_ids.shape)}", "give one position per token"))


def pop_documents(kwargs: dict[str, Any], document_ids: Any = None) -> Any:
    """Take ``document_ids`` out of a forward's arguments, or ``seq_idx``: the same from DataCollatorWithFlattening.

    Args:
        kwargs: the arguments, which are changed.
        document_ids: those of a forward that has an argument of that name.
    """
    document_ids, alias = kwargs.pop("document_ids", document_ids), kwargs.pop("seq_idx", None)
    return alias if document_ids is None else document_ids


def check_documents(document_ids: Tensor, tokens: Tensor) -> Tensor:
    """The document ids on the device of the given tokens, ``[B, T]`` or ``[B, T, E]``, if they fit them."""
    if document_ids.shape != tokens.shape[:2]:
        rule = f"document_ids must be {list(tokens.shape[:2])}, as the input is"
        raise ValueError(complaint(rule, f"shape {list(document_ids.shape)}", "give one id per token"))
    return document_ids.to(tokens.device)


def real_tokens(attention_mask: Tensor, tokens: Tensor) -> Tensor | None:
    """The mask of the given tokens as bool, None when it is known to hide nothing."""
    if attention_mask.dim() != 2:
        rule = "attention_mask must have two axes, [batch, tokens], with 0 for padding"
        fix = "pass the tokenizer's mask, and document_ids for documents packed in one row"
        raise ValueError(complaint(rule, f"shape {list(attention_mask.shape)}", fix))
    batch, length = tokens.shape[:2]
    if attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
        rule = f"attention_mask must cover the input's {batch} rows and {length} tokens"
        raise ValueError(complaint(rule, f"shape {list(attention_mask.shape)}", "pass the mask made with these tokens"))
    real = attention_mask[:, attention_mask.shape[1] - length :].to(torch.bool).to(tokens.device)
    # Only on the CPU is a look at the values free; elsewhere it would wait for the device.
    if real.device.type == "cpu" and not torch.compiler.is_compiling() and bool(real.all()):
        return None
    return real


def _reorder(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Permute axis ``dim`` of ``[B, ...]`` by ``index[B, T]``."""
    shape = [index.shape[0]] + [1] * (x.dim() - 1)
    shape[dim] = index.shape[1]
    return torch.take_along_dim(x, index.view(shape), dim)


def _restore(outputs: ModelOutput, inverse: Tensor) -> None:
    last = outputs["last_hidden_state"]
    restored_last = outputs["last_hidden_state"] = _reorder(last, inverse, 1)
    if outputs.get("memory_loss") is not None:
        outputs["memory_loss"] = outputs["memory_loss"].gather(1, inverse)
    if outputs.get("hidden_states") is not None:
        # One of them may be last_hidden_state itself, and stays the same object.
        outputs["hidden_states"] = tuple(
            restored_last if state is last else state if state is None else _reorder(state, inverse, 1)
            for state in outputs["hidden_states"]
        )
    if outputs.get("attentions") is not None:
        outputs["attentions"] = tuple(
            _reorder(_reorder(weights, inverse, 2), inverse, 3) for weights in outputs["attentions"]
        )
