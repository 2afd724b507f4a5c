"""The cache layers of `reformer_lsh`, which `DynamicCache(config=...)` and `generate` pick up by their layer types."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_longmem._errors import complaint
from hf_longmem.models.recurrent_cache import RecurrentCacheLayer, own_layers
from hf_longmem.models.reformer_lsh.configuration_reformer_lsh import CACHE_LAYER_TYPES
from hf_longmem.models.static_cache import refuse_static
from hf_longmem.ops.local import decode as local_decode
from hf_longmem.ops.lsh import decode as lsh_decode

MAKE_CACHE = "DynamicCache(config=model.config)"


class AttendingCacheLayer(RecurrentCacheLayer):
    """What both kinds of layer share: a state of `hf_longmem.ops`, and the attention to it."""

    model_type = "reformer_lsh"

    def attend(self, *tensors: Tensor, **rules: Any) -> Tensor:
        """Attend with the layer's new tokens to the past and remember them."""
        raise NotImplementedError


class LSHCacheLayer(AttendingCacheLayer):
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


class LocalCacheLayer(AttendingCacheLayer):
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
        ValueError: its layers are not those of ``layer_types``, or another number of rows than the input; a call
            failed midway; the model is bidirectional; attention maps are asked for.
    """
    own_layers(cache, LSHCacheLayer, LocalCacheLayer)
    layers = getattr(cache, "layers", None)
    foreign = [type(layer).__name__ for layer in layers or () if not isinstance(layer, AttendingCacheLayer)]
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
    lengths = [layer.get_seq_length() for layer in layers]
    if len(set(lengths)) > 1:
        rule = "the layers of a cache must have read equally many tokens"
        raise ValueError(complaint(rule, f"{lengths}, as a call that failed leaves it", f"use {MAKE_CACHE}"))
    seen_B = _first_layer(cache).seen()
    if seen_B is not None and len(seen_B) != rows:
        rule = f"the batch must have the cache's {len(seen_B)} rows"
        raise ValueError(complaint(rule, rows, "pass a new cache, or choose its rows with reorder_cache"))


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
