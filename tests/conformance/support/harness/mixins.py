"""transformers' test mixins, made to know the classes of this package."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import transformers

from . import source

# test_modeling_common decides by class name which labels a model takes.
_CLASS_NAMES = {
    "infinite_former": {
        "MODEL_MAPPING_NAMES": "InfiniteFormerModel",
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "InfiniteFormerForCausalLM",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "InfiniteFormerForSequenceClassification",
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "InfiniteFormerForTokenClassification",
    },
    "reformer_lsh": {
        "MODEL_MAPPING_NAMES": "ReformerLSHModel",
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "ReformerLSHForCausalLM",
        "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "ReformerLSHForMaskedLM",
        "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "ReformerLSHForQuestionAnswering",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "ReformerLSHForSequenceClassification",
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "ReformerLSHForTokenClassification",
    },
}
_PIPELINE_TESTS = {
    "feature-extraction": "FeatureExtractionPipelineTests",
    "fill-mask": "FillMaskPipelineTests",
    "text-classification": "TextClassificationPipelineTests",
    "text-generation": "TextGenerationPipelineTests",
    "token-classification": "TokenClassificationPipelineTests",
    "zero-shot": "ZeroShotClassificationPipelineTests",
}

# Where the pipeline mixin looks for tiny models instead of on the Hub; removed when the interpreter ends.
_tiny_models = tempfile.TemporaryDirectory(prefix="hf-longmem-tiny-models-")
TINY_MODELS = Path(_tiny_models.name)


def _load(name: str) -> ModuleType:
    # They look for transformers beside the tests, in a source tree; the one to test is the one that is installed.
    with patch("transformers.utils.direct_transformers_import", lambda *_, **__: transformers):
        return importlib.import_module(f"{source.PACKAGE}.{name}")


def _load_pipeline_tests() -> ModuleType:
    summary = TINY_MODELS / "reports" / "tiny_model_summary.json"
    summary.parent.mkdir()
    summary.write_text("{}", encoding="utf-8")
    with patch.dict(os.environ, TRANSFORMERS_TINY_MODEL_PATH=str(TINY_MODELS)):
        module = _load("test_pipeline_mixin")
    for task, name in _PIPELINE_TESTS.items():
        module.pipeline_test_mapping[task] = {"test": f"harness.pipelines.{name}"}
    return module


sys.path.append(str(source.fetch()))
common = _load("test_modeling_common")
for model_type, names in _CLASS_NAMES.items():
    for mapping, name in names.items():
        # A copy: the original is the one by which the Auto classes find models.
        setattr(common, mapping, {**getattr(common, mapping), model_type: name})
fsdp = _load("test_fsdp_mixin")
fsdp.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None
pipeline = _load_pipeline_tests()

ModelTesterMixin: Any = common.ModelTesterMixin
GenerationTesterMixin: Any = common.GenerationTesterMixin
ConfigTester: Any = _load("test_configuration_common").ConfigTester
FSDPTesterMixin: Any = fsdp.FSDPTesterMixin
PipelineTesterMixin: Any = pipeline.PipelineTesterMixin
TrainingTesterMixin: Any = _load("test_training_mixin").TrainingTesterMixin


def save_tiny_model(model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Put a model where the pipeline mixin finds it under its class name."""
    name = type(model).__name__
    if name in pipeline.tiny_model_summary:
        return
    folder = TINY_MODELS / model.config.model_type / name
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pipeline.tiny_model_summary[name] = {
        "tokenizer_classes": [type(tokenizer).__name__],
        "processor_classes": [],
    }


__all__ = [
    "ConfigTester",
    "FSDPTesterMixin",
    "GenerationTesterMixin",
    "ModelTesterMixin",
    "PipelineTesterMixin",
    "TrainingTesterMixin",
    "common",
    "save_tiny_model",
]
