"""transformers' own common tests on the Reformer classes."""

from __future__ import annotations

import unittest
from fnmatch import filter as matching
from typing import Any

import torch
from harness.mixins import (
    ConfigTester,
    FSDPTesterMixin,
    GenerationTesterMixin,
    ModelTesterMixin,
    PipelineTesterMixin,
    TrainingTesterMixin,
)
from harness.skips import REFORMER_LSH
from harness.testers import ReformerLSHModelTester

from hf_longmem import (
    ReformerLSHConfig,
    ReformerLSHForCausalLM,
    ReformerLSHForMaskedLM,
    ReformerLSHForQuestionAnswering,
    ReformerLSHForSequenceClassification,
    ReformerLSHForTokenClassification,
    ReformerLSHModel,
)


class _ReformerLSHTests(ModelTesterMixin):
    model_tester: Any = None
    config_tester: Any = None
    test_resize_position_embeddings = True
    test_can_init_all_missing_weights_before_2023 = True  # the mixin takes every "reformer" for an old model
    is_decoder: bool

    def setUp(self) -> None:
        self.model_tester = ReformerLSHModelTester(self, is_decoder=self.is_decoder)
        self.config_tester = ConfigTester(self, config_class=ReformerLSHConfig, hidden_size=36)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    def test_bc_cache_name_forward(self) -> None:
        with torch.no_grad():  # a cache is made for inference
            super().test_bc_cache_name_forward()

    def test_retain_grad_hidden_states_attentions(self) -> None:
        # The operator never holds attention weights; those that are returned are computed beside it, for the eye.
        self.has_attentions = False
        super().test_retain_grad_hidden_states_attentions()

    def _prepare_config_and_inputs_for_retain_grad_hidden_states_attentions(self) -> Any:
        # With padding, hidden states are returned in the order of the input, copied from those of the computation.
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        return config, {"input_ids": inputs["input_ids"]}


class ReformerLSHCausalTest(
    _ReformerLSHTests,
    GenerationTesterMixin,
    TrainingTesterMixin,
    FSDPTesterMixin,
    unittest.TestCase,
):
    is_decoder = True
    training_overfit_learning_rate = 3e-3  # with dropout and new rotations in every step, 1e-3 takes longer
    all_model_classes = (
        ReformerLSHModel,
        ReformerLSHForCausalLM,
        ReformerLSHForSequenceClassification,
        ReformerLSHForTokenClassification,
        ReformerLSHForQuestionAnswering,
    )

    def _get_tiny_config(self) -> tuple[type[ReformerLSHConfig], dict[str, Any]]:
        # The mixin would write other sizes into a finished config, past all that was derived from the first ones.
        changes: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64}
        if "hsdp_grad_accumulation" in self._testMethodName:
            # There, one process with a whole batch is compared with several that have parts of it.
            changes |= {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}
        config = self.model_tester.get_config(**changes)
        return type(config), config.to_diff_dict()


class ReformerLSHBidirectionalTest(
    _ReformerLSHTests,
    PipelineTesterMixin,
    unittest.TestCase,
):
    is_decoder = False
    all_model_classes = (
        ReformerLSHModel,
        ReformerLSHForMaskedLM,
        ReformerLSHForSequenceClassification,
        ReformerLSHForTokenClassification,
        ReformerLSHForQuestionAnswering,
    )
    pipeline_model_mapping = {
        "feature-extraction": ReformerLSHModel,
        "fill-mask": ReformerLSHForMaskedLM,
        "text-classification": ReformerLSHForSequenceClassification,
        "text-generation": ReformerLSHForCausalLM,
        "token-classification": ReformerLSHForTokenClassification,
        "zero-shot": ReformerLSHForSequenceClassification,
    }

    def setUp(self) -> None:
        super().setUp()
        if self._testMethodName.startswith("test_pipeline"):
            self.model_tester.save_tiny_models()


def test_every_entry_in_the_list_of_skips_names_a_test() -> None:
    tests = {*dir(ReformerLSHCausalTest), *dir(ReformerLSHBidirectionalTest)}
    assert [pattern for patterns in REFORMER_LSH.values() for pattern in patterns if not matching(tests, pattern)] == []
