"""What each of two gloo processes runs.

Trains a memory around a tiny model for two calls that go on from each other, under DistributedDataParallel with and
without a search for unused parameters, and tells how far its gradients are from those of one process with both rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longmem import LongTermMemoryConfig, add_long_term_memory


def model(train: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    base = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, max_position_embeddings=16, **sizes)).double()
    memory = {"segment_length": 8, "num_basis": 8, "basis_widths": (0.1, 0.2), "memory_zero_init": False}
    config = LongTermMemoryConfig(**memory, memory_gate="convolution", memory_kl_weight=1e-3)
    return add_long_term_memory(base, config, train=train).train()


def gradients(wrapped: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    memory = None
    # The first call writes nothing, the second does.
    for piece in ids.split([7, 13], dim=1):
        outputs = wrapped(input_ids=piece, labels=piece, memory=memory)
        memory = outputs.memory
        outputs.loss.backward()
    return [p.grad for p in wrapped.parameters() if p.requires_grad]


def distances() -> list[float]:
    rank = dist.get_rank()
    ids = torch.randint(30, (2, 20), generator=torch.Generator().manual_seed(1))
    errors = []
    for train in ("memory", "all"):
        expected = gradients(model(train), ids)
        for find_unused in (False, True):
            wrapped = DistributedDataParallel(model(train), find_unused_parameters=find_unused)
            found = gradients(wrapped, ids[rank : rank + 1])
            errors.append(max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)))
    return errors
