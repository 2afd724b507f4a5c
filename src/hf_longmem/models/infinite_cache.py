"""The cache of `infinite_former`: a state of constant size, which can be saved, loaded and given to `generate`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from hf_longmem._errors import complaint
from hf_longmem.models.cache import RecurrentAttentionLayer, own_layers
from hf_longmem.models.infinite_former.configuration_infinite_former import CACHE_LAYER_TYPE, InfiniteFormerConfig
from hf_longmem.models.infinite_former.state import InfiniteFormerMemory, LayerState
from hf_longmem.models.memory_files import read_memory_file, write_memory_file
from hf_longmem.models.static_cache import refuse_static
from hf_longmem.ops.continuous import MemoryState

_FORMAT = "hf_longmem.infinite_former.1"
# Two configs that agree in these can go on with each other's memory.
_FINGERPRINT = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "attention_head_size",
    "segment_length",
    "short_term_window",
    "memory_layers",
    "num_basis",
    "basis_widths",
    "num_samples",
    "memory_ridge",
    "memory_decay",
    "uniform_segments",
    "histogram_bins",
)


class InfiniteFormerCacheLayer(RecurrentAttentionLayer):
    """One layer's short-term window and long-term memory, and how many tokens each row has read."""

    _layer_type = CACHE_LAYER_TYPE

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state: LayerState | None = None
        self.seen_B: Tensor | None = None
        self.length = 0

    def keep(self, seen_B: Tensor, state: LayerState, length: int) -> None:
        """Take the state after ``length`` more tokens, padding included."""
        self.seen_B, self.state = seen_B, state
        self.length += length
        self._begin(state.inputs_BSE)

    def seen(self) -> Tensor | None:
        """How many real tokens each row holds, ``[B]``; None before the first."""
        return self.seen_B

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: the model fills its cache itself."""
        rule = "the cache of an infinite_former model is filled by the model only"
        raise NotImplementedError(complaint(rule, "update(keys, values)", "use the model that the cache was made for"))

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return self.length

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.seen_B, self.length = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove nothing (0), or raise: a memory cannot be unwritten."""
        if tokens_to_remove:
            rule = "the cache of an infinite_former model cannot be shortened"
            raise ValueError(complaint(rule, f"crop({tokens_to_remove})", "keep a copy, or start from an empty cache"))

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None and self.seen_B is not None:
            self.state, self.seen_B = self.state.map(change), change(self.seen_B)


refuse_static(CACHE_LAYER_TYPE)


class InfiniteFormerCache(DynamicCache):
    """What an `infinite_former` model remembers; of the same size however long the document.

    Args:
        config: the model's config.
    """

    def __init__(self, config: InfiniteFormerConfig) -> None:
        super().__init__(config=config)
        self.fingerprint = _fingerprint(config)

    @property
    def seen(self) -> Tensor | None:
        """How many real tokens each row has read, ``[B]``; None before the first."""
        return self.layers[0].seen()  # type: ignore[union-attr]

    def reset(self, rows: Tensor | None = None) -> None:
        """Make the rows that ``rows`` (bool ``[B]``) says as new, bit for bit; by default forget everything."""
        if rows is None:
            super().reset()
        elif (memory := remembered(self)) is not None:
            _set(self, memory.reset(rows))

    def reorder(self, rows: Tensor) -> None:
        """Make row i what row ``rows[i]`` was."""
        self.reorder_cache(rows)  # type: ignore[arg-type]

    def select(self, rows: Tensor) -> None:
        """Keep the rows ``rows``, in their order."""
        self.batch_select_indices(rows)

    def repeat(self, repeats: int) -> None:
        """Repeat each row, as for several continuations of one document."""
        self.batch_repeat_interleave(repeats)

    def to(self, device: torch.device | str) -> InfiniteFormerCache:
        """Move to a device."""
        if (memory := remembered(self)) is not None:
            layers = tuple(layer.map(lambda tensor: tensor.to(device)) for layer in memory.layers)
            _set(self, InfiniteFormerMemory(memory.seen_B, layers))
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a safetensors file; never leaves a half-written one.

        Raises:
            ValueError: there is nothing to save yet.
        """
        memory = remembered(self)
        if memory is None:
            raise ValueError(
                complaint("a cache must hold something to be saved", "an empty one", "run the model first")
            )
        tensors = {"seen": memory.seen_B}
        for index, layer in enumerate(memory.layers):
            tensors |= {f"layers.{index}.{name}": part for name, part in _stored(layer).items()}
        write_memory_file(path, _FORMAT, tensors, self.fingerprint, self.get_seq_length())

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], config: InfiniteFormerConfig, device: torch.device | str = "cpu"
    ) -> InfiniteFormerCache:
        """Read what `save` wrote.

        Raises:
            OSError: the file is missing, truncated or corrupt.
            ValueError: it is no memory, one of another config, or holds NaN or infinity.
        """
        cache = cls(config)
        tensors, length = read_memory_file(path, _FORMAT, cache.fingerprint, config.model_type)
        layers = []
        for index in range(config.num_hidden_layers):
            prefix = f"layers.{index}."
            layers.append(_restored({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}))
        keep(cache, InfiniteFormerMemory(tensors["seen"], tuple(layers)), length)
        return cache.to(device)


def keep(cache: Cache, memory: InfiniteFormerMemory, length: int) -> None:
    """Put what a model remembers after ``length`` more tokens (padding included) into a cache."""
    for layer, state in zip(cache.layers, memory.layers, strict=True):
        layer.keep(memory.seen_B, state, length)  # type: ignore[union-attr]


def remembered(cache: Cache) -> InfiniteFormerMemory | None:
    """What a cache holds, None before the first token."""
    layers: list[Any] = cache.layers
    if layers[0].state is None:
        return None
    return InfiniteFormerMemory(layers[0].seen_B.cpu(), tuple(layer.state for layer in layers))


def check_cache(cache: Cache, config: InfiniteFormerConfig) -> InfiniteFormerMemory | None:
    """Give what a cache holds, or refuse one that the model cannot go on with.

    Raises:
        ValueError: it has layers of another kind, another number of them, or comes from another config.
    """
    own_layers(cache, InfiniteFormerCacheLayer)
    layers = cache.layers if isinstance(cache, Cache) else []
    foreign = [type(layer).__name__ for layer in layers if not isinstance(layer, InfiniteFormerCacheLayer)]
    if foreign or len(layers) != config.num_hidden_layers:
        received = f"a layer of type {foreign[0]}" if foreign else f"a {type(cache).__name__} of {len(layers)} layers"
        fix = "use InfiniteFormerCache(model.config)"
        raise ValueError(complaint("the cache must be made for this model", received, fix))
    if isinstance(cache, InfiniteFormerCache) and cache.fingerprint != _fingerprint(config):
        rule = "the cache must come from a model of this config"
        raise ValueError(complaint(rule, "one of another config", "use InfiniteFormerCache(model.config)"))
    return remembered(cache)


def _set(cache: Cache, memory: InfiniteFormerMemory) -> None:
    keep(cache, memory, 0)


def _fingerprint(config: InfiniteFormerConfig) -> dict[str, Any]:
    # Through json, so that one that was saved compares equal.
    return json.loads(json.dumps({name: getattr(config, name) for name in _FINGERPRINT}))


def _stored(layer: LayerState) -> dict[str, Tensor]:
    parts = {"inputs": layer.inputs_BSE}
    if layer.keys_BSE is not None and layer.values_BSE is not None:
        parts |= {"keys": layer.keys_BSE, "values": layer.values_BSE}
    if layer.memory is not None:
        coefficients_BNE, segments_B, histogram_BK = layer.memory
        parts |= {"coefficients": coefficients_BNE, "segments": segments_B, "histogram": histogram_BK}
    return parts


def _restored(parts: dict[str, Tensor]) -> LayerState:
    memory = None
    if "coefficients" in parts:
        memory = MemoryState(parts["coefficients"], parts["segments"], parts["histogram"])
    return LayerState(parts["inputs"], parts.get("keys"), parts.get("values"), memory)


__all__ = ["InfiniteFormerCache", "InfiniteFormerCacheLayer"]
