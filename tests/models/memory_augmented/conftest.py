"""Tiny language models of eight families with a memory around them, with weights large enough that all parts matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_longmem.models.memory_augmented.augment import add_long_term_memory
from hf_longmem.models.memory_augmented.configuration_memory_augmented import LongTermMemoryConfig
from hf_longmem.models.memory_augmented.modeling_memory_augmented import MemoryAugmentedForCausalLM

VOCAB, POSITIONS = 60, 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"intermediate_size": 64},
    "qwen3": {"intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16},
    # A window shorter than a block, so that distances across a segment's border matter.
    "mistral": {"intermediate_size": 64, "num_key_value_heads": 1, "sliding_window": 7},
    "gpt_neox": {"intermediate_size": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.15},
    "phi": {"intermediate_size": 64},
    "gemma": {"intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16},
}
MEMORY: dict[str, Any] = {
    "segment_length": 16,
    "window_length": 9,
    "num_basis": 16,
    "basis_widths": (0.05, 0.1),
    "memory_zero_init": False,
}


@pytest.fixture
def base_model() -> Callable[..., PreTrainedModel]:
    """Make a tiny model of a family in evaluation mode, the same for the same seed."""

    def make(family: str = "gpt2", seed: int = 0, **overrides: Any) -> PreTrainedModel:
        sizes = SIZES | FAMILIES[family] | overrides
        if family == "opt":
            sizes.pop("initializer_range")
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()

    return make


@pytest.fixture
def augmented(base_model: Callable[..., PreTrainedModel]) -> Callable[..., MemoryAugmentedForCausalLM]:
    """Put a memory, whose answers matter, around one; keyword arguments override the memory's config."""

    def make(family: str = "gpt2", seed: int = 0, train: Any = "all", **overrides: Any) -> MemoryAugmentedForCausalLM:
        base = base_model(family, seed)
        torch.manual_seed(seed)
        return add_long_term_memory(base, LongTermMemoryConfig(**(MEMORY | overrides)), train=train)

    return make


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    """Draw token ids ``[B, T]``, none of them padding."""

    def draw(batch: int, length: int, seed: int = 1) -> torch.Tensor:
        return torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))

    return draw
