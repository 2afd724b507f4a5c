"""The cache of `memory_augmented`: a state of constant size, which can be saved, loaded and given to `generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from transformers.cache_utils import Cache

from hf_longmem._errors import complaint
from hf_longmem.models.memory_augmented.configuration_memory_augmented import CACHE_LAYER_TYPE, MemoryAugmentedConfig
from hf_longmem.models.memory_augmented.state import MemoryAugmentedState
from hf_longmem.models.memory_cache import MemoryCache, MemoryCacheLayer
from hf_longmem.models.recurrent_cache import own_layers
from hf_longmem.models.static_cache import refuse_static
from hf_longmem.ops.continuous import MemoryState

_FINGERPRINT = (
    "segment_length",
    "window_length",
    "memory_layers",
    "memory_input_norm",
    "num_basis",
    "basis_widths",
    "num_samples",
    "memory_ridge",
    "memory_decay",
    "uniform_segments",
    "histogram_bins",
)


class BlockCache(NamedTuple):
    """The model's own cache of the block it read last, and which of its places are real (None for all)."""

    cache: Cache
    mask_BS: Tensor | None

    def mask(self, change: Callable[[Tensor], Tensor]) -> BlockCache:
        """Put the mask through ``change``; the cache has been changed in place."""
        return BlockCache(self.cache, None if self.mask_BS is None else change(self.mask_BS))


class MemoryAugmentedCacheLayer(MemoryCacheLayer):
    """All that is remembered, of every layer of the model.

    The block can be read anew from the state, so it is dropped where it could not follow.
    """

    _layer_type = CACHE_LAYER_TYPE
    model_type = MemoryAugmentedConfig.model_type

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state: MemoryAugmentedState | None = None
        self.block: BlockCache | None = None

    def keep(self, state: MemoryAugmentedState, block: BlockCache | None, length: int) -> None:
        """Take the state after ``length`` more tokens, padding included."""
        self.state, self.block = state, block
        self.length += length
        self._begin(state.memories[0].coefficients_BNE)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.block = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row ``beam_idx[i]`` was."""
        super().reorder_cache(beam_idx)
        if self.block is not None:
            self.block.cache.reorder_cache(beam_idx)  # type: ignore[arg-type]
            self.block = self.block.mask(lambda mask: mask.index_select(0, beam_idx.to(mask.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        super().batch_repeat_interleave(repeats)
        if self.block is not None:
            self.block.cache.batch_repeat_interleave(repeats)
            self.block = self.block.mask(lambda mask: mask.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        super().batch_select_indices(indices)
        if self.block is not None:
            self.block.cache.batch_select_indices(indices)
            self.block = self.block.mask(lambda mask: mask[indices.to(mask.device)])

    def offload(self) -> None:
        """Move the state to the CPU."""
        self.block = None
        super().offload()

    def prefetch(self) -> None:
        """Move the state back to where it was made."""
        self.block = None
        super().prefetch()


refuse_static(CACHE_LAYER_TYPE)


class MemoryAugmentedCache(MemoryCache):
    """What a model with a long-term memory around it remembers; of bounded size however long the document.

    Args:
        config: the model's config.
    """

    file_format = "hf_longmem.memory_augmented.1"

    @property
    def layer(self) -> MemoryAugmentedCacheLayer:
        """Where everything is."""
        return self.layers[0]  # type: ignore[return-value]

    @staticmethod
    def _settings(config: MemoryAugmentedConfig) -> dict[str, Any]:
        base = {"base_model_type": config.base_config.model_type, "hidden_size": config.hidden_size}  # type: ignore[union-attr]
        return base | {name: getattr(config.memory, name) for name in _FINGERPRINT}

    def _remembered(self) -> MemoryAugmentedState | None:
        return self.layer.state

    def _keep(self, memory: MemoryAugmentedState, length: int = 0) -> None:
        self.layer.keep(memory, None, length)

    @staticmethod
    def _stored(memory: MemoryAugmentedState) -> dict[str, Tensor]:
        tensors = {"seen": memory.seen_B, "window": memory.window}
        for index, (inputs_BSE, state) in enumerate(zip(memory.inputs, memory.memories, strict=True)):
            coefficients_BNE, segments_B, histogram_BK = state
            parts = {"inputs": inputs_BSE, "coefficients": coefficients_BNE}
            parts |= {"segments": segments_B, "histogram": histogram_BK}
            tensors |= {f"memories.{index}.{name}": part for name, part in parts.items()}
        return tensors

    @staticmethod
    def _restored(tensors: dict[str, Tensor], config: MemoryAugmentedConfig) -> MemoryAugmentedState:
        inputs, memories = [], []
        for index in range(len(config.memory.memory_layers)):  # type: ignore[arg-type]
            part = {name: tensors[f"memories.{index}.{name}"] for name in ("coefficients", "segments", "histogram")}
            inputs.append(tensors[f"memories.{index}.inputs"])
            memories.append(MemoryState(*part.values()))
        return MemoryAugmentedState(tensors["seen"], tensors["window"], tuple(inputs), tuple(memories))


def check_cache(cache: Cache, config: MemoryAugmentedConfig) -> MemoryAugmentedCacheLayer:
    """Give the one layer of a cache, or refuse one that the model cannot go on with.

    Raises:
        ValueError: it has layers of another kind, or comes from another config.
    """
    own_layers(cache, MemoryAugmentedCacheLayer)
    layers: list[Any] = getattr(cache, "layers", [])
    if len(layers) != 1 or not isinstance(layers[0], MemoryAugmentedCacheLayer):
        received = f"a {type(cache).__name__} of {len(layers)} layers"
        fix = "use MemoryAugmentedCache(model.config)"
        raise ValueError(complaint("the cache must be made for this model", received, fix))
    if isinstance(cache, MemoryAugmentedCache):
        cache.check_config(config)
    return layers[0]


__all__ = ["MemoryAugmentedCache", "MemoryAugmentedCacheLayer"]
