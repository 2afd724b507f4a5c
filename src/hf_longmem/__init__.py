"""hf-longmem: long-memory architectures as a Hugging Face transformers plugin.

``import hf_longmem`` makes transformers' Auto classes know them; what is heavy is imported on first use.
"""

from importlib import import_module
from typing import Any

from hf_longmem._version import __version__
from hf_longmem.models.auto import register

_MODULES = {
    "ReformerLSHConfig": "hf_longmem.models.reformer_lsh",
    "ReformerLSHForCausalLM": "hf_longmem.models.reformer_lsh",
    "ReformerLSHModel": "hf_longmem.models.reformer_lsh",
}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
