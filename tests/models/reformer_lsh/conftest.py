"""Tiny models of every kind of layer, position and merge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_longmem import ReformerLSHConfig, ReformerLSHForCausalLM

TINY: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "attn_layers": ("local", "lsh", "lsh"),
    "lsh_attn_chunk_length": 16,
    "local_attn_chunk_length": 16,
    "num_hashes": 2,
    "num_buckets": 4,
    "max_position_embeddings": 1024,
    "axial_norm_std": 0.1,
}


@pytest.fixture
def tiny() -> Callable[..., ReformerLSHConfig]:
    """Make a tiny config; keyword arguments override."""
    return lambda **overrides: ReformerLSHConfig(**(TINY | overrides))


@pytest.fixture
def causal_lm(tiny: Callable[..., ReformerLSHConfig]) -> Callable[..., ReformerLSHForCausalLM]:
    """Make a tiny causal language model in evaluation mode, the same for the same seed and config."""

    def make(seed: int = 0, **overrides: Any) -> ReformerLSHForCausalLM:
        torch.manual_seed(seed)
        return ReformerLSHForCausalLM(tiny(**overrides)).eval()

    return make


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    """Draw token ids ``[B, T]``, none of them padding."""

    def draw(batch: int, length: int, seed: int = 1) -> torch.Tensor:
        return torch.randint(2, TINY["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))

    return draw
