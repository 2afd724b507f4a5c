"""The static form of this package's caches, which there is not: asking for one says so."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import StaticLayer

from hf_longmem._errors import complaint


class NoStaticLayer(StaticLayer):
    """What ``StaticCache(config)`` and ``generate(cache_implementation="static")`` find."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        rule = "this model's cache keeps a state, not keys and values of a fixed length"
        raise ValueError(complaint(rule, "a static cache", "leave cache_implementation out"))


def refuse_static(*layer_types: str) -> None:
    """Make these layer types known to transformers as ones without a static form."""
    for layer_type in layer_types:
        # Defining a subclass registers it.
        type("NoStaticLayer", (NoStaticLayer,), {"_layer_type": layer_type})


__all__ = ["NoStaticLayer", "refuse_static"]
