"""What all cache layers of this package share: a state in place of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hf_longmem._errors import complaint


class RecurrentCacheLayer(CacheLayerMixin):
    """Base: holds a state whose rows follow beams and batches, and which cannot be rolled back: `crop` raises.

    Rows of one batch may hold different numbers of real tokens: padding is never stored.
    """

    is_sliding = False
    # Its keys and values are made by the layer's first forward, whose rules it follows.
    supports_early_init = False
    model_type: ClassVar[str]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state: Any = None

    def seen(self) -> Tensor | None:
        """How many real tokens each row holds, ``[B]``; None before the first."""
        return None if self.state is None else self.state.seen_B

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do before the first forward."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: no keys are handed out."""
        rule = f"the cache of a model of type {self.model_type} is filled by the model only"
        raise NotImplementedError(complaint(rule, "update(keys, values)", "use the model that the cache was made for"))

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return 0 if self.state is None else self.state.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what a mask has to cover."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: what bounds a sequence, if anything, is the model."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.state = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove nothing (0), or raise: what was forgotten cannot be brought back."""
        if tokens_to_remove:
            rule = f"the cache of a model of type {self.model_type} cannot be shortened"
            raise ValueError(complaint(rule, f"crop({tokens_to_remove})", "keep a copy, or start from an empty cache"))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row ``beam_idx[i]`` was."""
        self._map_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        self._map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        self._map_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def offload(self) -> None:
        """Move the state to the CPU."""
        self._map_rows(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the state back to where it was made."""
        self._map_rows(lambda tensor: tensor.to(self.device, non_blocking=True))

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.state = self.state.map_rows(change)

    def _begin(self, tensor: Tensor) -> None:
        self.device, self.dtype, self.is_initialized = tensor.device, tensor.dtype, True


def own_layers(cache: Any, *classes: type[RecurrentCacheLayer]) -> None:
    """Replace a cache's empty layers of these types by layers of exactly these classes.

    transformers knows one class of a layer type, the one defined last. Where models that were loaded as remote code
    share a process, each has brought its own copy of this file.
    """
    by_type = {kind._layer_type: kind for kind in classes}
    layers: list[Any] = getattr(cache, "layers", [])  # an EncoderDecoderCache has none
    for index, layer in enumerate(layers):
        kind = by_type.get(getattr(layer, "_layer_type", None))
        if kind is not None and not isinstance(layer, kind) and not layer.get_seq_length():
            layers[index] = kind()


__all__ = ["RecurrentCacheLayer", "own_layers"]
