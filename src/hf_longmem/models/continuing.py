"""Generating from what a cache remembers of a text that is not at hand any more."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache


class ContinuesFromCache:
    """A causal language model whose ``generate`` takes a prompt that comes after what its cache has read.

    transformers takes a prompt for the whole text, of which it leaves out what the cache has read, unless the attention
    mask covers more than the prompt. A prompt which is no longer than that can only be what comes next, and is taken
    so. Stands before `GenerationMixin` among the bases.
    """

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        next_sequence_length: int | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As transformers does, for what is new in a prompt."""
        if next_sequence_length is not None and next_sequence_length < 1:
            next_sequence_length = None
        return super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids, next_sequence_length=next_sequence_length, cache=cache, inputs_embeds=inputs_embeds, **kwargs
        )


__all__ = ["ContinuesFromCache"]
