"""What the config of an untrusted checkpoint may not ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_longmem._errors import complaint

_PACKAGE = "hf_longmem"
MOST_PARAMETERS = 10**12


def without_code_map(config_class: type, config_dict: dict[str, Any]) -> dict[str, Any]:
    """A saved config without its ``auto_map``, by which transformers would find code beside the weights.

    The code in a bundle is for those without this package. Kept, the map would be saved again, without the files.
    The copy of this code inside a bundle keeps it.
    """
    if config_class.__module__.partition(".")[0] != _PACKAGE:
        return config_dict
    return {name: value for name, value in config_dict.items() if name != "auto_map"}


def check_entries(entries: Mapping[str, Any]) -> None:
    """Refuse entries of transformers' own that make it read or run anything but this checkpoint's safetensors.

    Args:
        entries: of a saved config, or ``vars`` of one; those of a config within it are looked at too.

    Raises:
        ValueError: an attention kernel to be fetched from the Hub, or weights in another kind of file.
    """
    for name in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
        kernel = entries.get(name)
        if kernel is not None and ("/" in str(kernel) or "\\" in str(kernel)):
            rule = "attn_implementation must not be code to be fetched from the Hub"
            raise ValueError(complaint(rule, repr(kernel), "leave it out, or ask for it by from_pretrained's argument"))
    weights = entries.get("transformers_weights")
    if weights is not None and not str(weights).endswith((".safetensors", ".safetensors.index.json")):
        rule = "transformers_weights must name safetensors"
        raise ValueError(complaint(rule, repr(weights), "leave it out, or save the model again by save_pretrained"))
    for part in entries.values():
        if isinstance(part, Mapping):
            check_entries(part)


def check_parameters(count: int) -> None:
    """Refuse a model that no machine holds.

    Raises:
        ValueError: more than ``MOST_PARAMETERS``.
    """
    if count > MOST_PARAMETERS:
        rule = f"a model must have at most {MOST_PARAMETERS:,} parameters"
        raise ValueError(complaint(rule, f"about {count:,}", "check the sizes for a slip of the keyboard"))


__all__ = ["MOST_PARAMETERS", "check_entries", "check_parameters", "without_code_map"]
