"""The cache of `memory_augmented`: a state of constant size, which can be saved, loaded and given to `generate`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from hf_longmem._errors import complaint
from hf_longmem.models.cache import RecurrentAttentionLayer, own_layers
from hf_longmem.models.memory_augmented.configuration_memory_augmented import CACHE_LAYER_TYPE, MemoryAugmentedConfig
from hf_longmem.models.memory_augmented.state import MemoryAugmentedState
from hf_longmem.models.memory_files import read_memory_file, write_memory_file
from hf_longmem.models.static_cache import refuse_static
from hf_longmem.ops.continuous import MemoryState

_FORMAT = "hf_longmem.memory_augmented.1"
# Two configs that agree in these can go on with each other's memory.
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


class MemoryAugmentedCacheLayer(RecurrentAttentionLayer):
    """All that is remembered, of every layer of the model.

    The block can be read anew from the state, so it is dropped where it could not follow.
    """

    _layer_type = CACHE_LAYER_TYPE

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state: MemoryAugmentedState | None = None
        self.block: BlockCache | None = None
        self.length = 0

    def keep(self, state: MemoryAugmentedState, block: BlockCache | None, length: int) -> None:
        """Take the state after ``length`` more tokens, padding included."""
        self.state, self.block = state, block
        self.length += length
        self._begin(state.memories[0].coefficients_BNE)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: the model fills its cache itself."""
        rule = "the cache of a memory_augmented model is filled by the model only"
        raise NotImplementedError(complaint(rule, "update(keys, values)", "use the model that the cache was made for"))

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return self.length

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.block, self.length = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove nothing (0), or raise: a memory cannot be unwritten."""
        if tokens_to_remove:
            rule = "the cache of a memory_augmented model cannot be shortened"
            raise ValueError(complaint(rule, f"crop({tokens_to_remove})", "keep a copy, or start from an empty cache"))

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


class MemoryAugmentedCache(DynamicCache):
    """What a model with a long-term memory around it remembers; of bounded size however long the document.

    Args:
        config: the model's config.
    """

    def __init__(self, config: MemoryAugmentedConfig) -> None:
        super().__init__(config=config)
        self.fingerprint = _fingerprint(config)

    @property
    def layer(self) -> MemoryAugmentedCacheLayer:
        """Where everything is."""
        return self.layers[0]  # type: ignore[return-value]

    @property
    def seen(self) -> Tensor | None:
        """How many real tokens each row has read, ``[B]``; None before the first."""
        return None if self.layer.state is None else self.layer.state.seen_B

    def reset(self, rows: Tensor | None = None) -> None:
        """Make the rows that ``rows`` (bool ``[B]``) says as new, bit for bit; by default forget everything."""
        if rows is None:
            super().reset()
        elif self.layer.state is not None:
            self.layer.keep(self.layer.state.reset(rows), None, 0)

    def reorder(self, rows: Tensor) -> None:
        """Make row i what row ``rows[i]`` was."""
        self.reorder_cache(rows)  # type: ignore[arg-type]

    def select(self, rows: Tensor) -> None:
        """Keep the rows ``rows``, in their order."""
        self.batch_select_indices(rows)

    def repeat(self, repeats: int) -> None:
        """Repeat each row, as for several continuations of one document."""
        self.batch_repeat_interleave(repeats)

    def to(self, device: torch.device | str) -> MemoryAugmentedCache:
        """Move to a device."""
        if self.layer.state is not None:
            self.layer.keep(self.layer.state.to(device), None, 0)
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a safetensors file; never leaves a half-written one.

        Raises:
            ValueError: there is nothing to save yet.
        """
        state = self.layer.state
        if state is None:
            rule = "a cache must hold something to be saved"
            raise ValueError(complaint(rule, "an empty one", "run the model first"))
        tensors = {"seen": state.seen_B, "window": state.window}
        for index, (inputs_BSE, memory) in enumerate(zip(state.inputs, state.memories, strict=True)):
            coefficients_BNE, segments_B, histogram_BK = memory
            parts = {"inputs": inputs_BSE, "coefficients": coefficients_BNE}
            parts |= {"segments": segments_B, "histogram": histogram_BK}
            tensors |= {f"memories.{index}.{name}": part for name, part in parts.items()}
        write_memory_file(path, _FORMAT, tensors, self.fingerprint, self.get_seq_length())

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], config: MemoryAugmentedConfig, device: torch.device | str = "cpu"
    ) -> MemoryAugmentedCache:
        """Read what `save` wrote.

        Raises:
            OSError: the file is missing, truncated or corrupt.
            ValueError: it is no memory, one of another config, or holds NaN or infinity.
        """
        cache = cls(config)
        tensors, length = read_memory_file(path, _FORMAT, cache.fingerprint, config.model_type)
        inputs, memories = [], []
        for index in range(len(config.memory.memory_layers)):  # type: ignore[arg-type]
            part = {name: tensors[f"memories.{index}.{name}"] for name in ("coefficients", "segments", "histogram")}
            inputs.append(tensors[f"memories.{index}.inputs"])
            memories.append(MemoryState(*part.values()))
        state = MemoryAugmentedState(tensors["seen"], tensors["window"], tuple(inputs), tuple(memories))
        cache.layer.keep(state, None, length)
        return cache.to(device)


def check_cache(cache: Cache, config: MemoryAugmentedConfig) -> MemoryAugmentedCacheLayer:
    """Give the one layer of a cache, or refuse one that the model cannot go on with.

    Raises:
        ValueError: it has layers of another kind, or comes from another config.
    """
    own_layers(cache, MemoryAugmentedCacheLayer)
    layers = cache.layers if isinstance(cache, Cache) else []
    if len(layers) != 1 or not isinstance(layers[0], MemoryAugmentedCacheLayer):
        received = f"a {type(cache).__name__} of {len(layers)} layers"
        fix = "use MemoryAugmentedCache(model.config)"
        raise ValueError(complaint("the cache must be made for this model", received, fix))
    if isinstance(cache, MemoryAugmentedCache) and cache.fingerprint != _fingerprint(config):
        rule = "the cache must come from a model of this config"
        raise ValueError(complaint(rule, "one of another config", "use MemoryAugmentedCache(model.config)"))
    return layers[0]


def _fingerprint(config: MemoryAugmentedConfig) -> dict[str, Any]:
    memory = {name: getattr(config.memory, name) for name in _FINGERPRINT}
    base = {"base_model_type": config.base_config.model_type, "hidden_size": config.hidden_size}  # type: ignore[union-attr]
    # Through json, so that one that was saved compares equal.
    return json.loads(json.dumps(base | memory))


__all__ = ["MemoryAugmentedCache", "MemoryAugmentedCacheLayer"]
