"""Registration with transformers' Auto classes; nothing else calls ``Auto*.register``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto, tokenization_auto

from hf_longmem.models.infinite_former.configuration_infinite_former import InfiniteFormerConfig
from hf_longmem.models.memory_augmented.configuration_memory_augmented import MemoryAugmentedConfig
from hf_longmem.models.reformer_lsh.configuration_reformer_lsh import ReformerLSHConfig
from hf_longmem.models.reformer_lsh.tokenization_reformer_lsh import ReformerLSHByteTokenizer

_INFINITE = "hf_longmem.models.infinite_former.modeling_infinite_former"
_INFINITE_HEADS = "hf_longmem.models.infinite_former.modeling_infinite_former_heads"
_AUGMENTED = "hf_longmem.models.memory_augmented.modeling_memory_augmented"
_REFORMER = "hf_longmem.models.reformer_lsh.modeling_reformer_lsh"
_REFORMER_HEADS = "hf_longmem.models.reformer_lsh.modeling_reformer_lsh_heads"
_MODELS: dict[type[PreTrainedConfig], dict[str, tuple[str, str]]] = {
    InfiniteFormerConfig: {
        "AutoModel": (_INFINITE, "InfiniteFormerModel"),
        "AutoModelForCausalLM": (_INFINITE, "InfiniteFormerForCausalLM"),
        "AutoModelForSequenceClassification": (_INFINITE_HEADS, "InfiniteFormerForSequenceClassification"),
        "AutoModelForTokenClassification": (_INFINITE_HEADS, "InfiniteFormerForTokenClassification"),
    },
    MemoryAugmentedConfig: {"AutoModelForCausalLM": (_AUGMENTED, "MemoryAugmentedForCausalLM")},
    ReformerLSHConfig: {
        "AutoModel": (_REFORMER, "ReformerLSHModel"),
        "AutoModelForCausalLM": (_REFORMER, "ReformerLSHForCausalLM"),
        "AutoModelForMaskedLM": (_REFORMER_HEADS, "ReformerLSHForMaskedLM"),
        "AutoModelForQuestionAnswering": (_REFORMER_HEADS, "ReformerLSHForQuestionAnswering"),
        "AutoModelForSequenceClassification": (_REFORMER_HEADS, "ReformerLSHForSequenceClassification"),
        "AutoModelForTokenClassification": (_REFORMER_HEADS, "ReformerLSHForTokenClassification"),
    },
}
MODEL_TYPES = tuple(config_class.model_type for config_class in _MODELS)


def model_classes(model_type: str) -> dict[str, tuple[str, str]]:
    """Give module and name of every class of an architecture of this package, its config's included, by Auto class.

    Args:
        model_type: one of ``MODEL_TYPES``.
    """
    config_class = next(config_class for config_class in _MODELS if config_class.model_type == model_type)
    return {"AutoConfig": (config_class.__module__, config_class.__name__)} | _MODELS[config_class]


class _NoModel(PreTrainedConfig):
    """Stands for no model: what is registered for it is found by its name only.

    Registered for a model's config, a tokenizer would silently be that of every checkpoint which lacks its own.
    """


class _Import(NamedTuple):
    """A class by name, to be imported when somebody asks for it."""

    module: str
    name: str


class _ImportedOnDemand(dict[type, Any]):
    """Registered classes by config class; one given as `_Import` is imported when it is first looked at.

    An Auto mapping resolves transformers' own models lazily, but wants those of a plugin as classes: importing ours
    would cost everyone who imports the package the whole of transformers' modelling code.
    """

    def __getitem__(self, key: type) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, _Import):
            value = self[key] = getattr(import_module(value.module), value.name)
        return value

    def __iter__(self) -> Iterator[type]:
        # Without this, dict(self) would copy values past __getitem__ (the mappings do that when they are pickled).
        return super().__iter__()

    def values(self) -> Any:
        self._import_all()
        return super().values()

    def items(self) -> Any:
        self._import_all()
        return super().items()

    def _import_all(self) -> None:
        for key in list(self):
            self[key]


def register() -> None:
    """Make the Auto classes know the architectures of this package, and ``AutoTokenizer`` its tokenizer."""
    for config_class, models in _MODELS.items():
        configuration_auto.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        for auto_name, (module, name) in models.items():
            auto_class = getattr(modeling_auto, auto_name)
            mapping = auto_class._model_mapping
            if not isinstance(mapping._extra_content, _ImportedOnDemand):
                mapping._extra_content = _ImportedOnDemand(mapping._extra_content)
            auto_class.register(config_class, _Import(module, name), exist_ok=True)
        if "AutoModelForCausalLM" in models:
            # By these names Trainer knows whose labels its label smoothing has to shift.
            names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            names[config_class.model_type] = models["AutoModelForCausalLM"][1]
    tokenization_auto.AutoTokenizer.register(_NoModel, tokenizer_class=ReformerLSHByteTokenizer, exist_ok=True)
