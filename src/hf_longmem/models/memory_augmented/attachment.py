"""How a memory reaches into a model that knows nothing of it: hooks on its decoder layers and their attention.

A layer's input is seen by a hook before the layer, which asks the memory; what the memory answers is added to the
attention's output by a hook after the attention. Between the two the answer travels among the layer's keyword
arguments, which activation checkpointing hands to the layer again when it recomputes it, long after the call.

The hooks hold nothing. What they read is a `BlockReading` that is in force, in this thread, for one call of the model;
without one they do nothing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_longmem._errors import complaint
from hf_longmem.layers.continuous_attention import ContinuousAttention, MemoryProjection
from hf_longmem.ops.continuous import MemoryState

_ARGUMENT = "long_term_memory_context"
_NORM_EPS = 1e-6


class _Context(NamedTuple):
    """What is to be added to an attention's output.

    by_argument: only what comes among the keyword arguments will be there when the layer is recomputed.
    """

    value_BSE: Tensor
    by_argument: bool


_READING: ContextVar[BlockReading | None] = ContextVar("_READING", default=None)
_CONTEXT: ContextVar[_Context | None] = ContextVar("_CONTEXT", default=None)


@dataclass
class BlockReading:
    """One call of the model: what its layers read of the memory, and what the memory learns of it.

    key: whose hooks may read it, see `DecoderLayers.attach`.
    attentions, projections, states: of each layer with a memory, by the layer's index.
    normalise: whether a layer's input is divided by its root mean square.
    reads: False while no memory can change anything; then layers only leave their inputs.
    counted_BS: which tokens are new, and thus recorded and regularised.
    last: how many tokens at the end may be new.
    inputs: what each layer will write of those, filled in by the call, as are the changed states.
    divergence_BS: each token's regulariser, summed over layers, filled in by the call.
    """

    key: object
    attentions: dict[int, ContinuousAttention]
    projections: dict[int, MemoryProjection]
    states: dict[int, MemoryState]
    normalise: bool
    reads: bool
    counted_BS: Tensor | None
    last: int
    inputs: dict[int, Tensor] = field(default_factory=dict)
    divergence_BS: Tensor | None = None

    def read(self, index: int, hidden_states: Tensor) -> Tensor | None:
        """Ask the memory of layer ``index``; None where it has none, or holds nothing that could matter."""
        attention = self.attentions.get(index)
        if attention is None:
            return None
        if self.normalise:
            hidden_states = nn.functional.rms_norm(hidden_states, hidden_states.shape[-1:], eps=_NORM_EPS)
        self.inputs[index] = hidden_states[:, hidden_states.shape[1] - self.last :]
        if not self.reads:
            return None
        queries = hidden_states.to(attention.dtype)
        context, state, divergence_BS = attention(queries, self.projections[index], self.states[index], self.counted_BS)
        self.states[index] = state
        before_BS = self.divergence_BS
        self.divergence_BS = divergence_BS if before_BS is None else before_BS + divergence_BS.to(before_BS.device)
        return context


@contextmanager
def reading(block: BlockReading) -> Iterator[None]:
    """Let the hooks of the model that is called meanwhile read ``block``."""
    token = _READING.set(block)
    try:
        yield
    finally:
        _READING.reset(token)


class DecoderLayers(NamedTuple):
    """The decoder layers of a model and where their attention is.

    path: name of their list within the model.
    layers: the layers.
    attention_name: name of the attention within a layer.
    with_attention: indices of the layers that have it.
    """

    path: str
    layers: list[nn.Module]
    attention_name: str
    with_attention: tuple[int, ...]

    def attach(self) -> object:
        """Hook the memory in; the model's own numbers stay what they are.

        Returns:
            A key: the hooks read blocks that carry it, and are blind to those of another model around this one's call.

        Raises:
            ValueError: there are hooks already.
        """
        if any(getattr(h, "func", None) is _enter_layer for h in self.layers[0]._forward_pre_hooks.values()):
            rule = "a model can have one long-term memory"
            raise ValueError(
                complaint(rule, "one that has one", "load the model anew, or go on with the memory it has")
            )
        key = object()
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(partial(_enter_layer, key, index), with_kwargs=True)
            layer.register_forward_hook(_leave, always_call=True)
            if index in self.with_attention:
                attention = layer.get_submodule(self.attention_name)
                attention.register_forward_pre_hook(_enter_attention, with_kwargs=True)
                attention.register_forward_hook(_add_context, always_call=True)
        return key


def find_decoder_layers(model: nn.Module, path: str | None = None, attention: str | None = None) -> DecoderLayers:
    """Find a model's decoder layers: the longest list of modules of one class that have an attention each.

    Args:
        model: a causal language model.
        path: name of the list, where structure does not tell.
        attention: name of the attention within a layer, where structure does not tell.

    Raises:
        ValueError: there is no such list, or more than one; a given name is not there.
    """
    found: list[tuple[str, nn.ModuleList]]
    if path is not None:
        found = [(path, _submodule(model, path))]
    else:
        found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        found = [(name, module) for name, module in found if _alike(module) and _attention_names(module, attention)]
        longest = max((len(module) for _, module in found), default=0)
        found = [(name, module) for name, module in found if len(module) == longest]
    if len(found) != 1:
        rule = "a model must have one list of decoder layers, each with an attention module"
        received = " and ".join(name for name, _ in found) or f"a {type(model).__name__} without one"
        raise ValueError(complaint(rule, received, "give the list's name, as layers='model.layers'"))
    ((name, layers),) = found
    names = _attention_names(layers, attention)
    if len(names) != 1:
        rule = f"the layers of {name!r} must have one attention module"
        children = ", ".join(child for child, _ in next(iter(layers)).named_children())
        fix = f"give its name, one of {children}, as attention='...'"
        raise ValueError(complaint(rule, f"{sorted(names) or 'none'}", fix))
    (attention_name,) = names
    having = tuple(index for index, layer in enumerate(layers) if _has(layer, attention_name))
    return DecoderLayers(name, list(layers), attention_name, having)


def _submodule(model: nn.Module, path: str) -> nn.ModuleList:
    module = dict(model.named_modules()).get(path)
    if not isinstance(module, nn.ModuleList) or not len(module):
        rule = f"layers must name a list of layers in {type(model).__name__}"
        received = f"{path!r}, which is " + ("not there" if module is None else f"a {type(module).__name__}")
        raise ValueError(complaint(rule, received, "leave it out, or look at model.named_modules()"))
    return module


def _alike(layers: nn.ModuleList) -> bool:
    return len({type(layer) for layer in layers}) == 1


def _attention_names(layers: nn.Module, given: str | None) -> set[str]:
    """Names of the children that are attention; a layer of a hybrid model may have none."""
    if given is not None:
        return {given} if any(_has(layer, given) for layer in layers.children()) else set()
    return {
        name
        for layer in layers.children()
        for name, child in layer.named_children()
        if re.search("attention|attn", type(child).__name__, re.IGNORECASE)
        and not re.search("norm|dropout", type(child).__name__, re.IGNORECASE)
        and not re.search("cross|encoder", name, re.IGNORECASE)
    }


def _has(layer: nn.Module, name: str) -> bool:
    return any(child == name for child, _ in layer.named_children())


def _enter_layer(
    key: object, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    _CONTEXT.set(None)
    block = _READING.get()
    if block is None or block.key is not key:
        return None
    value = block.read(index, args[0] if args else kwargs["hidden_states"])
    if value is None:
        return None
    recomputed = bool(getattr(layer, "gradient_checkpointing", False)) and layer.training and torch.is_grad_enabled()
    context = _Context(value, recomputed)
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(layer.forward).parameters.values()):
        kwargs = kwargs | {_ARGUMENT: context}
    _CONTEXT.set(context)
    return args, kwargs


def _leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    _CONTEXT.set(None)


def _enter_attention(
    attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    context = _CONTEXT.get()
    if _ARGUMENT in kwargs:
        kwargs = dict(kwargs)
        _CONTEXT.set(kwargs.pop(_ARGUMENT))
    elif context is not None and context.by_argument:
        rule = "activation checkpointing needs layers that hand their keyword arguments on to their attention"
        fix = "train without activation checkpointing"
        raise ValueError(complaint(rule, f"a {type(attention).__name__} that got none", fix))
    return args, kwargs


def _add_context(attention: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    context = _CONTEXT.get()
    _CONTEXT.set(None)
    if context is None or output is None:
        return None
    attended, value = output[0] if isinstance(output, tuple) else output, context.value_BSE
    if not isinstance(attended, Tensor) or attended.shape != value.shape:
        received = list(attended.shape) if isinstance(attended, Tensor) else type(attended).__name__
        rule = f"an attention's (first) output must be {list(value.shape)}, as the layer's input is"
        raise ValueError(
            complaint(rule, f"{received} of {type(attention).__name__}", "name another with attention='...'")
        )
    if value.requires_grad and not torch.is_grad_enabled():
        rule = "activation checkpointing around a long-term memory must not be reentrant"
        raise ValueError(complaint(rule, "use_reentrant=True", "pass {'use_reentrant': False}"))
    attended = attended + value.to(attended.device, attended.dtype)
    return (attended, *output[1:]) if isinstance(output, tuple) else attended


__all__ = ["BlockReading", "DecoderLayers", "find_decoder_layers", "reading"]
