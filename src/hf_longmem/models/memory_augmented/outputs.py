"""What a model with a long-term memory around it gives back."""

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from hf_longmem.models.memory_augmented.state import MemoryAugmentedState


@dataclass
class MemoryAugmentedOutput(ModelOutput):
    """What reading gives: the logits, under the name of what is put back into a call's order.

    ``memory_loss`` ``[B, T]`` is each token's regulariser, the mean over heads and layers: 0 where nothing was read.
    """

    last_hidden_state: torch.FloatTensor | None = None
    cache: Cache | None = None
    memory: MemoryAugmentedState | None = None
    memory_loss: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class MemoryAugmentedCausalLMOutput(ModelOutput):
    """What the language model gives; ``memory_loss`` is the regulariser alone, unweighted."""

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    cache: Cache | None = None
    memory: MemoryAugmentedState | None = None
    memory_loss: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
