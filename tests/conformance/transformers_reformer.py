"""transformers' own Reformer in the same mixins, for comparison; not part of the suite.

    python -m pytest tests/conformance/transformers_reformer.py

The sizes, the classes and the tests it leaves out are those of transformers' repository; so are the failures.
"""

from __future__ import annotations

import unittest
from typing import Any

import torch
from harness.mixins import (
    ConfigTester,
    FSDPTesterMixin,
    GenerationTesterMixin,
    ModelTesterMixin,
    PipelineTesterMixin,
    TrainingTesterMixin,
    common,
    save_tiny_model,
)
from transformers import (
    ByT5Tokenizer,
    ReformerConfig,
    ReformerForMaskedLM,
    ReformerForQuestionAnswering,
    ReformerForSequenceClassification,
    ReformerModel,
    ReformerModelWithLMHead,
)
from transformers.testing_utils import torch_device


class _Tester:
    is_training = True
    batch_size = 13
    num_labels = 2

    def __init__(self, parent: unittest.TestCase, **settings: Any) -> None:
        self.parent = parent
        self.seq_length = settings.pop("seq_length")
        self.settings = settings
        self.num_hidden_layers = len(settings["attn_layers"])
        self.vocab_size = settings["vocab_size"]
        self.hidden_size = settings["hidden_size"]
        self.num_attention_heads = settings["num_attention_heads"]
        kind = settings["attn_layers"][0]
        self.chunk_length = settings[f"{kind}_attn_chunk_length"]
        self.key_length = 2 * self.chunk_length
        self.encoder_seq_length = -(-self.seq_length // self.chunk_length)
        self.num_hashes = settings.get("num_hashes")

    def get_config(self, **changes: Any) -> ReformerConfig:
        return ReformerConfig(**(self.settings | changes))

    def prepare_config_and_inputs_for_common(self) -> tuple[ReformerConfig, dict[str, torch.Tensor]]:
        shape = (self.batch_size, self.seq_length)
        input_ids = common.ids_tensor(shape, self.vocab_size).to(torch_device)
        attention_mask = common.random_attention_mask(shape).to(torch_device)
        return self.get_config(), {"input_ids": input_ids, "attention_mask": attention_mask}


class _ReformerTests(ModelTesterMixin):
    all_model_classes = (
        ReformerModel,
        ReformerModelWithLMHead,
        ReformerForSequenceClassification,
        ReformerForQuestionAnswering,
    )
    model_tester: Any = None
    settings: dict[str, Any]

    def setUp(self) -> None:
        self.model_tester = _Tester(self, **self.settings)
        self.config_tester = ConfigTester(self, config_class=ReformerConfig, hidden_size=37)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    @unittest.skip("left out by transformers")
    def test_retain_grad_hidden_states_attentions(self) -> None: ...

    @unittest.skip("left out by transformers")
    def test_resize_embeddings_untied(self) -> None: ...


class ReformerLocalTest(_ReformerTests, GenerationTesterMixin, TrainingTesterMixin, FSDPTesterMixin, unittest.TestCase):
    training_overfit_learning_rate = 3e-3
    settings = {
        "seq_length": 32,
        "vocab_size": 32,
        "attention_head_size": 16,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "lsh_attn_chunk_length": None,
        "lsh_num_chunks_before": None,
        "lsh_num_chunks_after": None,
        "lsh_attention_probs_dropout_prob": None,
        "num_hashes": 1,
        "local_attn_chunk_length": 4,
        "local_num_chunks_before": 1,
        "local_num_chunks_after": 0,
        "feed_forward_size": 32,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "local_attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 512,
        "is_decoder": True,
        "hash_seed": 0,
        "axial_pos_shape": (4, 8),
        "axial_pos_embds_dim": (16, 16),
        "attn_layers": ["local", "local"],
    }

    def setUp(self) -> None:
        super().setUp()
        if self._testMethodName == "test_training_overfit":
            # In training, its input must fill the axial positions, and the mixins train on 64 tokens.
            self.model_tester.settings = self.settings | {"axial_pos_shape": (8, 8)}

    def _get_tiny_config(self) -> tuple[type[ReformerConfig], dict[str, Any]]:
        changes: dict[str, Any] = {"vocab_size": 256, "axial_pos_shape": (8, 8)}
        if "hsdp_grad_accumulation" in self._testMethodName:
            changes |= {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}
        config = self.model_tester.get_config(**changes)
        return type(config), config.to_diff_dict()


class ReformerLSHTest(_ReformerTests, GenerationTesterMixin, PipelineTesterMixin, unittest.TestCase):
    settings = {
        "seq_length": 13,
        "vocab_size": 32,
        "attention_head_size": 16,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_buckets": 2,
        "num_hashes": 4,
        "lsh_attn_chunk_length": 4,
        "lsh_num_chunks_before": 1,
        "lsh_num_chunks_after": 0,
        "local_attn_chunk_length": 4,
        "local_num_chunks_before": 1,
        "local_num_chunks_after": 0,
        "local_attention_probs_dropout_prob": 0.1,
        "feed_forward_size": 32,
        "hidden_act": "relu",
        "hidden_dropout_prob": 0.1,
        "lsh_attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 512,
        "is_decoder": True,
        "hash_seed": 0,
        "axial_pos_shape": (4, 8),
        "axial_pos_embds_dim": (16, 48),
        "attn_layers": ["lsh"],
    }
    pipeline_model_mapping = {
        "feature-extraction": ReformerModel,
        "fill-mask": ReformerForMaskedLM,
        "text-classification": ReformerForSequenceClassification,
        "text-generation": ReformerModelWithLMHead,
        "zero-shot": ReformerForSequenceClassification,
    }

    def setUp(self) -> None:
        super().setUp()
        self.model_tester.is_training = False
        if self._testMethodName.startswith("test_pipeline"):
            tokenizer = ByT5Tokenizer(mask_token="<extra_id_0>")
            for model_class in {*self.all_model_classes, ReformerForMaskedLM}:
                changes = {"vocab_size": len(tokenizer), "axial_pos_shape": (4, 25), "max_position_embeddings": 100}
                config = self.model_tester.get_config(
                    **changes, is_decoder=model_class is ReformerModelWithLMHead, num_buckets=2
                )
                save_tiny_model(model_class(config), tokenizer)

    @unittest.skip("left out by transformers")
    def test_problem_types(self) -> None: ...
