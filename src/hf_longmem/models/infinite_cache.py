"""The cache of `infinite_former`: a state of constant size, which can be saved, loaded and given to `generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from hf_longmem._errors import complaint
from hf_longmem.models.infinite_former.configuration_infinite_former import CACHE_LAYER_TYPE, InfiniteFormerConfig
from hf_longmem.models.infinite_former.state import InfiniteFormerMemory, LayerState
from hf_longmem.models.memory_cache import MemoryCache, MemoryCacheLayer
from hf_longmem.models.recurrent_cache import own_layers
from hf_longmem.models.static_cache import refuse_static
from hf_longmem.ops.continuous import MemoryState

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


class InfiniteFormerCacheLayer(MemoryCacheLayer):
    """One layer's short-term window and long-term memory, and how many tokens each row has read."""

    _layer_type = CACHE_LAYER_TYPE
    model_type = InfiniteFormerConfig.model_type

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state: LayerState | None = None
        self.seen_B: Tensor | None = None

    def keep(self, seen_B: Tensor, state: LayerState, length: int) -> None:
        """Take the state after ``length`` more tokens, padding included."""
        self.seen_B, self.state = seen_B, state
        self.length += length
        self._begin(state.inputs_BSE)

    def seen(self) -> Tensor | None:
        """How many real tokens each row holds, ``[B]``; None before the first."""
        return self.seen_B

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.seen_B = None

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None and self.seen_B is not None:
            self.state, self.seen_B = self.state.map(change), change(self.seen_B)


refuse_static(CACHE_LAYER_TYPE)


class InfiniteFormerCache(MemoryCache):
    """What an `infinite_former` model remembers; of the same size however long the document.

    Args:
        config: the model's config.
    """

    file_format = "hf_longmem.infinite_former.1"

    @staticmethod
    def _settings(config: InfiniteFormerConfig) -> dict[str, Any]:
        return {name: getattr(config, name) for name in _FINGERPRINT}

    def _remembered(self) -> InfiniteFormerMemory | None:
        return remembered(self)

    def _keep(self, memory: InfiniteFormerMemory, length: int = 0) -> None:
        keep(self, memory, length)

    @staticmethod
    def _stored(memory: InfiniteFormerMemory) -> dict[str, Tensor]:
        tensors = {"seen": memory.seen_B}
        for index, layer in enumerate(memory.layers):
            tensors |= {f"layers.{index}.{name}": part for name, part in _parts(layer).items()}
        return tensors

    @staticmethod
    def _restored(tensors: dict[str, Tensor], config: InfiniteFormerConfig) -> InfiniteFormerMemory:
        layers = []
        for index in range(config.num_hidden_layers):
            prefix = f"layers.{index}."
            parts = {name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)}
            memory = None
            if "coefficients" in parts:
                memory = MemoryState(parts["coefficients"], parts["segments"], parts["histogram"])
            layers.append(LayerState(parts["inputs"], parts.get("keys"), parts.get("values"), memory))
        return InfiniteFormerMemory(tensors["seen"], tuple(layers))


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
    layers: list[Any] = getattr(cache, "layers", [])
    foreign = [type(layer).__name__ for layer in layers if not isinstance(layer, InfiniteFormerCacheLayer)]
    if foreign or len(layers) != config.num_hidden_layers:
        received = f"a layer of type {foreign[0]}" if foreign else f"a {type(cache).__name__} of {len(layers)} layers"
        fix = "use InfiniteFormerCache(model.config)"
        raise ValueError(complaint("the cache must be made for this model", received, fix))
    if isinstance(cache, InfiniteFormerCache):
        cache.check_config(config)
    return remembered(cache)


def _parts(layer: LayerState) -> dict[str, Tensor]:
    parts = {"inputs": layer.inputs_BSE}
    if layer.keys_BSE is not None and layer.values_BSE is not None:
        parts |= {"keys": layer.keys_BSE, "values": layer.values_BSE}
    if layer.memory is not None:
        coefficients_BNE, segments_B, histogram_BK = layer.memory
        parts |= {"coefficients": coefficients_BNE, "segments": segments_B, "histogram": histogram_BK}
    return parts


__all__ = ["InfiniteFormerCache", "InfiniteFormerCacheLayer"]
