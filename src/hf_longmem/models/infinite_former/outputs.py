"""What the models of the infinity-former give back."""

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from hf_longmem.models.infinite_former.state import InfiniteFormerMemory


@dataclass
class InfiniteFormerModelOutput(ModelOutput):
    """What the bare model gives; ``memory`` while training or when one was passed, else ``cache``.

    ``memory_loss`` ``[B, T]`` is each token's regulariser, the mean over heads and layers: 0 where nothing was read.
    """

    last_hidden_state: torch.FloatTensor | None = None
    cache: Cache | None = None
    memory: InfiniteFormerMemory | None = None
    memory_loss: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class InfiniteFormerCausalLMOutput(ModelOutput):
    """What the language model gives; ``memory_loss`` is the regulariser alone, with gradients or labels; unweighted."""

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    cache: Cache | None = None
    memory: InfiniteFormerMemory | None = None
    memory_loss: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class InfiniteFormerClassifierOutput(ModelOutput):
    """What a classifier gives; ``memory_loss`` is the regulariser alone, with gradients or labels; unweighted."""

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    memory_loss: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
