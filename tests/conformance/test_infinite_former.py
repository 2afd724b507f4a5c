"""transformers' own common tests on the infinity-former classes."""

from __future__ import annotations

import unittest
from fnmatch import filter as matching
from typing import Any

from harness.mixins import (
    ConfigTester,
    FSDPTesterMixin,
    GenerationTesterMixin,
    ModelTesterMixin,
    PipelineTesterMixin,
    TrainingTesterMixin,
)
from harness.skips import INFINITE_FORMER
from harness.testers import InfiniteFormerModelTester

from hf_longmem import (
    InfiniteFormerConfig,
    InfiniteFormerForCausalLM,
    InfiniteFormerForSequenceClassification,
    InfiniteFormerForTokenClassification,
    InfiniteFormerModel,
)


class InfiniteFormerTest(
    ModelTesterMixin,
    GenerationTesterMixin,
    TrainingTesterMixin,
    FSDPTesterMixin,
    PipelineTesterMixin,
    unittest.TestCase,
):
    has_attentions = False  # a layer attends to a window that moves and reads a density: there is no map of tokens
    test_can_init_all_missing_weights_before_2023 = True  # a file without a copyright line is taken for an old model
    training_overfit_learning_rate = 3e-3  # fewer epochs than transformers' own models need at 1e-3
    all_model_classes = (
        InfiniteFormerModel,
        InfiniteFormerForCausalLM,
        InfiniteFormerForSequenceClassification,
        InfiniteFormerForTokenClassification,
    )
    pipeline_model_mapping = {
        "feature-extraction": InfiniteFormerModel,
        "text-classification": InfiniteFormerForSequenceClassification,
        "text-generation": InfiniteFormerForCausalLM,
        "token-classification": InfiniteFormerForTokenClassification,
        "zero-shot": InfiniteFormerForSequenceClassification,
    }

    def setUp(self) -> None:
        self.model_tester = InfiniteFormerModelTester(self)
        self.config_tester = ConfigTester(self, config_class=InfiniteFormerConfig, hidden_size=40)
        if self._testMethodName.startswith("test_pipeline"):
            self.model_tester.save_tiny_models()

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    def _get_tiny_config(self) -> tuple[type[InfiniteFormerConfig], dict[str, Any]]:
        # The mixin would write other sizes into a finished config, past all that was derived from the first ones.
        changes: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "segment_length": 32}
        if "hsdp_grad_accumulation" in self._testMethodName:
            # There, one process with a whole batch is compared with several that have parts of it.
            changes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = self.model_tester.get_config(**changes)
        return type(config), config.to_diff_dict()

    def _prepare_config_and_inputs_for_retain_grad_hidden_states_attentions(self) -> Any:
        # Hidden states of several segments, or with padding, are copied together from those of the computation.
        _, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        return self.model_tester.get_config(segment_length=32), {"input_ids": inputs["input_ids"]}


def test_every_entry_in_the_list_of_skips_names_a_test() -> None:
    tests = dir(InfiniteFormerTest)
    assert [
        pattern for patterns in INFINITE_FORMER.values() for pattern in patterns if not matching(tests, pattern)
    ] == []
