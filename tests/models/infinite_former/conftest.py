"""Tiny infinity-formers of every kind, with weights large enough that every part of them matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_longmem.models.infinite_former.configuration_infinite_former import InfiniteFormerConfig
from hf_longmem.models.infinite_former.modeling_infinite_former import InfiniteFormerForCausalLM

TINY: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "segment_length": 16,
    "num_basis": 16,
    "basis_widths": (0.05, 0.1),
    "initializer_range": 0.15,
}


@pytest.fixture
def tiny() -> Callable[..., InfiniteFormerConfig]:
    """Make a tiny config; keyword arguments override."""
    return lambda **overrides: InfiniteFormerConfig(**(TINY | overrides))


@pytest.fixture
def causal_lm(tiny: Callable[..., InfiniteFormerConfig]) -> Callable[..., InfiniteFormerForCausalLM]:
    """Make a tiny causal language model in evaluation mode, the same for the same seed and config."""

    def make(seed: int = 0, **overrides: Any) -> InfiniteFormerForCausalLM:
        torch.manual_seed(seed)
        return InfiniteFormerForCausalLM(tiny(**overrides)).eval()

    return make


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    """Draw token ids ``[B, T]``, none of them padding."""

    def draw(batch: int, length: int, seed: int = 1) -> torch.Tensor:
        return torch.randint(2, TINY["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))

    return draw
