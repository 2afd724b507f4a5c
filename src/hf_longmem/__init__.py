"""hf-longmem: long-memory architectures as a Hugging Face transformers plugin.

``import hf_longmem`` makes transformers' Auto classes know them; what is heavy is imported on first use.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hf_longmem._version import __version__

if TYPE_CHECKING:
    from hf_longmem.data.collators import DataCollatorForLongSequences
    from hf_longmem.data.stream_collator import DataCollatorForStreams
    from hf_longmem.data.streams import DocumentStreams
    from hf_longmem.hub.bundle import bundle
    from hf_longmem.models.infinite_cache import InfiniteFormerCache
    from hf_longmem.models.infinite_former.configuration_infinite_former import InfiniteFormerConfig
    from hf_longmem.models.infinite_former.modeling_infinite_former import (
        InfiniteFormerForCausalLM,
        InfiniteFormerModel,
    )
    from hf_longmem.models.infinite_former.modeling_infinite_former_heads import (
        InfiniteFormerForSequenceClassification,
        InfiniteFormerForTokenClassification,
    )
    from hf_longmem.models.infinite_former.retention import memory_retention
    from hf_longmem.models.memory_augmented.augment import (
        add_long_term_memory,
        memory_parameter_groups,
        set_trainable,
    )
    from hf_longmem.models.memory_augmented.cache import MemoryAugmentedCache
    from hf_longmem.models.memory_augmented.configuration_memory_augmented import (
        LongTermMemoryConfig,
        MemoryAugmentedConfig,
    )
    from hf_longmem.models.memory_augmented.modeling_memory_augmented import MemoryAugmentedForCausalLM
    from hf_longmem.models.reformer_lsh.configuration_reformer_lsh import ReformerLSHConfig
    from hf_longmem.models.reformer_lsh.modeling_reformer_lsh import ReformerLSHForCausalLM, ReformerLSHModel
    from hf_longmem.models.reformer_lsh.modeling_reformer_lsh_heads import (
        ReformerLSHForMaskedLM,
        ReformerLSHForQuestionAnswering,
        ReformerLSHForSequenceClassification,
        ReformerLSHForTokenClassification,
    )
    from hf_longmem.models.reformer_lsh.tokenization_reformer_lsh import ReformerLSHByteTokenizer
    from hf_longmem.training.callbacks import StreamMemoryCallback
    from hf_longmem.training.checkpoints import WholeCheckpointsCallback, last_complete_checkpoint
    from hf_longmem.training.evaluate_metrics import BitsPerByte, StreamPerplexity, token_nll
    from hf_longmem.training.log_metrics import LogMetricsCallback
    from hf_longmem.training.metrics import streaming_perplexity
    from hf_longmem.training.token_bytes import bytes_per_token

__all__ = [
    "BitsPerByte",
    "DataCollatorForLongSequences",
    "DataCollatorForStreams",
    "DocumentStreams",
    "InfiniteFormerCache",
    "InfiniteFormerConfig",
    "InfiniteFormerForCausalLM",
    "InfiniteFormerForSequenceClassification",
    "InfiniteFormerForTokenClassification",
    "InfiniteFormerModel",
    "LogMetricsCallback",
    "LongTermMemoryConfig",
    "MemoryAugmentedCache",
    "MemoryAugmentedConfig",
    "MemoryAugmentedForCausalLM",
    "ReformerLSHByteTokenizer",
    "ReformerLSHConfig",
    "ReformerLSHForCausalLM",
    "ReformerLSHForMaskedLM",
    "ReformerLSHForQuestionAnswering",
    "ReformerLSHForSequenceClassification",
    "ReformerLSHForTokenClassification",
    "ReformerLSHModel",
    "StreamMemoryCallback",
    "StreamPerplexity",
    "WholeCheckpointsCallback",
    "__version__",
    "add_long_term_memory",
    "bundle",
    "bytes_per_token",
    "last_complete_checkpoint",
    "memory_parameter_groups",
    "memory_retention",
    "set_trainable",
    "streaming_perplexity",
    "token_nll",
]

_PUBLIC = {
    "hf_longmem.data.collators": {"DataCollatorForLongSequences"},
    "hf_longmem.data.stream_collator": {"DataCollatorForStreams"},
    "hf_longmem.data.streams": {"DocumentStreams"},
    "hf_longmem.hub.bundle": {"bundle"},
    "hf_longmem.models.infinite_cache": {"InfiniteFormerCache"},
    "hf_longmem.models.infinite_former.configuration_infinite_former": {"InfiniteFormerConfig"},
    "hf_longmem.models.infinite_former.modeling_infinite_former": {"InfiniteFormerForCausalLM", "InfiniteFormerModel"},
    "hf_longmem.models.infinite_former.modeling_infinite_former_heads": {
        "InfiniteFormerForSequenceClassification",
        "InfiniteFormerForTokenClassification",
    },
    "hf_longmem.models.infinite_former.retention": {"memory_retention"},
    "hf_longmem.models.memory_augmented.augment": {"add_long_term_memory", "memory_parameter_groups", "set_trainable"},
    "hf_longmem.models.memory_augmented.cache": {"MemoryAugmentedCache"},
    "hf_longmem.models.memory_augmented.configuration_memory_augmented": {
        "LongTermMemoryConfig",
        "MemoryAugmentedConfig",
    },
    "hf_longmem.models.memory_augmented.modeling_memory_augmented": {"MemoryAugmentedForCausalLM"},
    "hf_longmem.models.reformer_lsh.configuration_reformer_lsh": {"ReformerLSHConfig"},
    "hf_longmem.models.reformer_lsh.modeling_reformer_lsh": {"ReformerLSHForCausalLM", "ReformerLSHModel"},
    "hf_longmem.models.reformer_lsh.modeling_reformer_lsh_heads": {
        "ReformerLSHForMaskedLM",
        "ReformerLSHForQuestionAnswering",
        "ReformerLSHForSequenceClassification",
        "ReformerLSHForTokenClassification",
    },
    "hf_longmem.models.reformer_lsh.tokenization_reformer_lsh": {"ReformerLSHByteTokenizer"},
    "hf_longmem.training.callbacks": {"StreamMemoryCallback"},
    "hf_longmem.training.checkpoints": {"WholeCheckpointsCallback", "last_complete_checkpoint"},
    "hf_longmem.training.evaluate_metrics": {"BitsPerByte", "StreamPerplexity", "token_nll"},
    "hf_longmem.training.log_metrics": {"LogMetricsCallback"},
    "hf_longmem.training.metrics": {"streaming_perplexity"},
    "hf_longmem.training.token_bytes": {"bytes_per_token"},
}


def __getattr__(name: str) -> Any:
    for module, names in _PUBLIC.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register() -> None:
    # The operators serve those who have torch alone.
    try:
        found = find_spec("transformers") is not None
    except ImportError:
        found = False
    if found:
        import_module("hf_longmem.models.auto").register()


_register()
