"""Reformer with angular LSH attention, reversible layers and axial positions (Kitaev et al. 2020)."""

from typing import Any

_MODULES = {
    "ReformerLSHConfig": "configuration_reformer_lsh",
    "ReformerLSHForCausalLM": "modeling_reformer_lsh",
    "ReformerLSHModel": "modeling_reformer_lsh",
    "ReformerLSHPreTrainedModel": "modeling_reformer_lsh",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    # Models pull in the whole of transformers' modelling code: only once somebody asks for one.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
