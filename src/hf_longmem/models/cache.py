"""The cache layers of `reformer_lsh`, which `DynamicCache(config=...)` and `generate` pick up by their layer types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_longmem._errors import complaint
from hf_longmem.models.reformer_lsh.configuration_reformer_lsh import CACHE_LAYER_TYPES
from hf_longmem.models.static_cache import refuse_static
from hf_longmem.ops.local import decode as local_decode
from hf_longmem.ops.lsh import decode as lsh_decode

MAKE_CACHE = "DynamicCache(config=model.config)"


class RecurrentAttentionLayer(CacheLayerMixin):
    """What both kinds of layer share: a state of `hf_longmem.ops` whose rows follow beams and batches.

    Rows of one batch may hold different numbers of real tokens: padding is never stored. The state cannot be rolled
    back, so `crop` raises.
    """

    is_sliding = False
    # Its keys and values are made by the layer's first forward, whose rules it follows.
    supports_early_init = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state: Any = None

    def attend(self, *tensors: Tensor, **rules: Any) -> Tensor:
        """Attend with the layer's new tokens to the past and remember them."""
        raise NotImplementedError

    def seen(self) -> Tensor | None:
        """How many real tokens each row holds, ``[B]``; None before the first."""
        return None if self.state is None else self.state.seen_B

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do before the first forward."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: these layers attend themselves and hand out no keys."""
        rule = "the cache of a reformer_lsh model is filled by its own layers only"
        raise NotImplementedError(complaint(rule, "update(keys, values)", "use the model that the cache was made for"))

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return 0 if self.state is None else self.state.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what a mask has to cover."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: what bounds a sequence is the model's `max_position_embeddings`."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.state = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove nothing (0), or raise: what a bucket forgot cannot be brought back."""
        if tokens_to_remove:
            rule = "the cache of a reformer_lsh model cannot be shortened"
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


class LSHCacheLayer(RecurrentAttentionLayer):
    """Past queries/keys and values, and for each row, head, round and bucket a ring of its last tokens."""

    _layer_type = CACHE_LAYER_TYPES["lsh"]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hashing: Any = None

    def attend(  # type: ignore[override]
        self,
        qk_BHTD: Tensor,
        v_BHTD: Tensor,
        buckets_BHRT: Tensor,
        attention_mask: Tensor | None,
        *,
        hashing: tuple[Any, ...],
        num_buckets: Any,
        chunk_length: int,
        chunks_before: int,
        **rules: Any,
    ) -> Tensor:
        """See :func:`hf_longmem.ops.lsh.decode.extend`; for ``hashing`` see :func:`check_hashing`."""
        if self.state is None:
            # Under the "chunk" rule every call passes over the whole past, and no ring is ever read.
            window = chunk_length * chunks_before if rules["candidates"] == "bucket" else 0
            self.state = lsh_decode.empty_state(qk_BHTD, buckets_BHRT.shape[2], num_buckets, window)
            self.hashing = hashing
            self._begin(qk_BHTD)
        out_BHTD, self.state = lsh_decode.extend(
            self.state,
            qk_BHTD,
            v_BHTD,
            buckets_BHRT,
            attention_mask=attention_mask,
            chunk_length=chunk_length,
            chunks_before=chunks_before,
            **rules,
        )
        return out_BHTD

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.hashing = None


class LocalCacheLayer(RecurrentAttentionLayer):
    """The keys and values of each row's last window."""

    _layer_type = CACHE_LAYER_TYPES["local"]

    def attend(  # type: ignore[override]
        self,
        q_BHTD: Tensor,
        k_BHTD: Tensor,
        v_BHTD: Tensor,
        attention_mask: Tensor | None,
        **rules: Any,
    ) -> Tensor:
        """See :func:`hf_longmem.ops.local.decode.extend`."""
        if self.state is None:
            self.state = local_decode.empty_state(k_BHTD, **rules)
            self._begin(k_BHTD)
        out_BHTD, self.state = local_decode.extend(
            self.state, q_BHTD, k_BHTD, v_BHTD, attention_mask=attention_mask, **rules
        )
        return out_BHTD


refuse_static(*CACHE_LAYER_TYPES.values())


def check_cache(cache: Cache, rows: int, layer_types: list[str], *, causal: bool, output_attentions: bool) -> None:
    """Refuse a cache that this model, or this call, cannot go on with.

    Raises:
        ValueError: its layers are not those of ``layer_types``, or another number of rows than the input; the model is
            bidirectional; attention maps are asked for.
    """
    own_layers(cache, LSHCacheLayer, LocalCacheLayer)
    layers = cache.layers if isinstance(cache, Cache) else None
    foreign = [type(layer).__name__ for layer in layers or () if not isinstance(layer, RecurrentAttentionLayer)]
    if foreign or not layers:
        received = f"a layer of type {foreign[0]}" if foreign else "a cache without layers"
        received = received if layers is not None else f"a {type(cache).__name__}"
        raise ValueError(complaint("the cache must be made for this model", received, f"use {MAKE_CACHE}"))
    kinds = [str(getattr(layer, "_layer_type", None)) for layer in layers]
    if kinds != layer_types:
        rule = f"the cache must have the model's layers, {', '.join(layer_types)}"
        raise ValueError(complaint(rule, ", ".join(kinds), f"use {MAKE_CACHE}"))
    if not causal:
        raise ValueError(complaint("only a causal model can use a cache", "is_decoder=False", "pass cache=None"))
    if output_attentions:
        rule = "attention maps are computed over whole sequences only, without a cache"
        raise ValueError(complaint(rule, "output_attentions=True and a cache", "pass use_cache=False"))
    seen_B = _first_layer(cache).seen()
    if seen_B is not None and len(seen_B) != rows:
        rule = f"the batch must have the cache's {len(seen_B)} rows"
        raise ValueError(complaint(rule, rows, "pass a new cache, or choose its rows with reorder_cache"))


def own_layers(cache: Any, *classes: type[RecurrentAttentionLayer]) -> None:
    """Replace a cache's empty layers of these types by layers of exactly these classes.

    transformers knows one class of a layer type, the one defined last. Where models that were loaded as remote code
    share a process, each has brought its own copy of this file.
    """
    by_type = {kind._layer_type: kind for kind in classes}
    layers: list[Any] = cache.layers if isinstance(cache, Cache) else []
    for index, layer in enumerate(layers):
        kind = by_type.get(getattr(layer, "_layer_type", None))
        if kind is not None and not isinstance(layer, kind) and not layer.get_seq_length():
            layers[index] = kind()


def check_hashing(cache: Cache, hashing: tuple[int, int]) -> None:
    """Refuse a call that hashes unlike the calls before, before any layer changes the cache.

    Raises:
        ValueError: another number of rounds or another hash seed than the cache was begun with.
    """
    for layer in cache.layers:
        if isinstance(layer, LSHCacheLayer) and layer.hashing not in (None, hashing):
            rule = f"num_hashes and hash_seed must stay what the cache was begun with, {layer.hashing}"
            raise ValueError(complaint(rule, hashing, "pass the same in every call, or start from an empty cache"))


def next_positions(cache: Cache | None, length: int, device: torch.device) -> Tensor:
    """Positions of ``length`` new tokens, ``[B or 1, T]``: counting on from each row's real tokens."""
    steps_1T = torch.arange(length, device=device)[None]
    seen_B = None if cache is None else _first_layer(cache).seen()
    return steps_1T if seen_B is None else seen_B[:, None] + steps_1T


def _first_layer(cache: Cache) -> Any:
    return cache.layers[0]
