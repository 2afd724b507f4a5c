"""Tiny configurations and inputs on which transformers' mixins run."""

from __future__ import annotations

import unittest
from typing import Any

import torch
from transformers import ByT5Tokenizer
from transformers.testing_utils import torch_device

from hf_longmem import (
    InfiniteFormerConfig,
    InfiniteFormerForCausalLM,
    InfiniteFormerForSequenceClassification,
    InfiniteFormerForTokenClassification,
    InfiniteFormerModel,
    ReformerLSHConfig,
    ReformerLSHForCausalLM,
    ReformerLSHForMaskedLM,
    ReformerLSHForQuestionAnswering,
    ReformerLSHForSequenceClassification,
    ReformerLSHForTokenClassification,
    ReformerLSHModel,
)

from .mixins import common, save_tiny_model


class InfiniteFormerModelTester:
    """Two layers of width 32; the inputs span several segments, end inside one, and are padded."""

    def __init__(self, parent: unittest.TestCase) -> None:
        self.parent = parent
        self.batch_size = 4
        self.seq_length = 19
        self.vocab_size = 99
        self.hidden_size = 32
        self.num_attention_heads = 4
        self.num_hidden_layers = 2
        self.num_labels = 3
        self.is_training = True
        self.base_model_class = InfiniteFormerModel
        self.causal_lm_class = InfiniteFormerForCausalLM
        self.sequence_classification_class = InfiniteFormerForSequenceClassification

    def get_config(self, **changes: Any) -> InfiniteFormerConfig:
        settings: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "feed_forward_size": 64,
            "segment_length": 8,
            "num_basis": 16,
            "basis_widths": (0.05, 0.1),
            "sticky_memories": True,
            "num_labels": self.num_labels,
        }
        if self.parent._testMethodName == "test_training_overfit":
            settings["segment_length"] = 32  # it takes 300 steps of 64 tokens
        return InfiniteFormerConfig(**(settings | changes))

    def prepare_config_and_inputs_for_common(self) -> tuple[InfiniteFormerConfig, dict[str, torch.Tensor]]:
        shape = (self.batch_size, self.seq_length)
        input_ids = common.ids_tensor(shape, self.vocab_size).to(torch_device)
        attention_mask = common.random_attention_mask(shape).to(torch_device)
        return self.get_config(), {"input_ids": input_ids, "attention_mask": attention_mask}

    def save_tiny_models(self) -> None:
        """One model of each head, with the byte tokenizer, for the pipelines."""
        tokenizer = ByT5Tokenizer()
        config = self.get_config(vocab_size=len(tokenizer))
        for model_class in (
            InfiniteFormerForCausalLM,
            InfiniteFormerForSequenceClassification,
            InfiniteFormerForTokenClassification,
            InfiniteFormerModel,
        ):
            save_tiny_model(model_class(config), tokenizer)


class ReformerLSHModelTester:
    """Two layers of width 32; the inputs span several chunks, fill none of them, and are padded."""

    def __init__(self, parent: unittest.TestCase, is_decoder: bool) -> None:
        self.parent = parent
        self.is_decoder = is_decoder
        self.batch_size = 4
        self.seq_length = 19
        self.vocab_size = 99
        self.hidden_size = 32
        self.num_attention_heads = 4
        self.num_hidden_layers = 2
        self.num_labels = 3
        self.is_training = True
        self.base_model_class = ReformerLSHModel
        self.causal_lm_class = ReformerLSHForCausalLM if is_decoder else None
        self.sequence_classification_class = ReformerLSHForSequenceClassification

    def get_config(self, **changes: Any) -> ReformerLSHConfig:
        settings: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "attn_layers": ["local", "lsh"],
            "num_attention_heads": self.num_attention_heads,
            "feed_forward_size": 64,
            "lsh_attn_chunk_length": 4,
            "local_attn_chunk_length": 4,
            "num_hashes": 2,
            "num_buckets": 4,
            "max_position_embeddings": 512,
            "is_decoder": self.is_decoder,
            "num_labels": self.num_labels,
        }
        if self.parent._testMethodName == "test_resize_position_vector_embeddings":
            settings["position_embedding_type"] = "learned"  # it wants any number of rows, not a product of axes
        return ReformerLSHConfig(**(settings | changes))

    def prepare_config_and_inputs_for_common(self) -> tuple[ReformerLSHConfig, dict[str, torch.Tensor]]:
        shape = (self.batch_size, self.seq_length)
        input_ids = common.ids_tensor(shape, self.vocab_size).to(torch_device)
        attention_mask = common.random_attention_mask(shape).to(torch_device)
        return self.get_config(), {"input_ids": input_ids, "attention_mask": attention_mask}

    def save_tiny_models(self) -> None:
        """One model of each head, with the byte tokenizer, for the pipelines."""
        tokenizer = ByT5Tokenizer(mask_token="<extra_id_0>")
        for model_class in (
            ReformerLSHForCausalLM,
            ReformerLSHForMaskedLM,
            ReformerLSHForQuestionAnswering,
            ReformerLSHForSequenceClassification,
            ReformerLSHForTokenClassification,
            ReformerLSHModel,
        ):
            config = self.get_config(vocab_size=len(tokenizer), is_decoder=model_class is ReformerLSHForCausalLM)
            save_tiny_model(model_class(config), tokenizer)
