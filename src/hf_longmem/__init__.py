"""hf-longmem: long-memory architectures as a Hugging Face transformers plugin.

``import hf_longmem`` makes transformers' Auto classes know them; what is heavy is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_longmem._version import __version__
from hf_longmem.models.auto import register
from hf_longmem.models.reformer_lsh.configuration_reformer_lsh import ReformerLSHConfig
from hf_longmem.models.reformer_lsh.tokenization_reformer_lsh import ReformerLSHByteTokenizer

if TYPE_CHECKING:
    from hf_longmem.models.reformer_lsh.modeling_reformer_lsh import ReformerLSHForCausalLM, ReformerLSHModel
    from hf_longmem.models.reformer_lsh.modeling_reformer_lsh_heads import (
        ReformerLSHForMaskedLM,
        ReformerLSHForQuestionAnswering,
        ReformerLSHForSequenceClassification,
        ReformerLSHForTokenClassification,
    )

__all__ = [
    "ReformerLSHByteTokenizer",
    "ReformerLSHConfig",
    "ReformerLSHForCausalLM",
    "ReformerLSHForMaskedLM",
    "ReformerLSHForQuestionAnswering",
    "ReformerLSHForSequenceClassification",
    "ReformerLSHForTokenClassification",
    "ReformerLSHModel",
    "__version__",
]

_HEAVY = {
    "hf_longmem.models.reformer_lsh.modeling_reformer_lsh": {"ReformerLSHForCausalLM", "ReformerLSHModel"},
    "hf_longmem.models.reformer_lsh.modeling_reformer_lsh_heads": {
        "ReformerLSHForMaskedLM",
        "ReformerLSHForQuestionAnswering",
        "ReformerLSHForSequenceClassification",
        "ReformerLSHForTokenClassification",
    },
}


def __getattr__(name: str) -> Any:
    for module, names in _HEAVY.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
