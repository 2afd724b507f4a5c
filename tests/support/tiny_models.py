"""One tiny causal language model of each family, and documents for them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from hf_longmem import InfiniteFormerConfig, InfiniteFormerForCausalLM, ReformerLSHConfig, ReformerLSHForCausalLM

VOCABULARY = 40
_REFORMER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "attn_layers": ("local", "lsh"),
    "lsh_attn_chunk_length": 8,
    "local_attn_chunk_length": 8,
    "num_hashes": 2,
    "num_buckets": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
_INFINITE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "segment_length": 8,
    "num_basis": 8,
    "basis_widths": (0.05, 0.1),
    "memory_kl_weight": 0.1,
    "initializer_range": 0.2,
}
_NO_DROPOUT: dict[str, dict[str, Any]] = {
    "reformer_lsh": {
        "hidden_dropout_prob": 0,
        "lsh_attention_probs_dropout_prob": 0,
        "local_attention_probs_dropout_prob": 0,
    },
    "infinite_former": {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
}
FAMILIES = tuple(_NO_DROPOUT)


def causal_lm(family: str, *, dropout: bool = False, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Make a tiny model, the same for the same arguments, in training mode."""
    overrides = ({} if dropout else _NO_DROPOUT[family]) | overrides
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if family == "reformer_lsh":
            return ReformerLSHForCausalLM(ReformerLSHConfig(**(_REFORMER | overrides))).train()
        return InfiniteFormerForCausalLM(InfiniteFormerConfig(**(_INFINITE | overrides))).train()


class Documents(Dataset):
    """Random documents, each of another length unless told."""

    def __init__(self, count: int, length: int = 48, *, even: bool = False):
        self.count, self.length, self.even = count, length, even

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = self.length if self.even else self.length * (8 - index % 5) // 8
        ids = torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def collate(documents: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad to the longest, at the end."""
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([document["input_ids"] for document in documents], batch_first=True),
        "attention_mask": pad([torch.ones_like(document["input_ids"]) for document in documents], batch_first=True),
        "labels": pad([document["labels"] for document in documents], batch_first=True, padding_value=-100),
    }


__all__ = ["FAMILIES", "VOCABULARY", "Documents", "causal_lm", "collate"]
