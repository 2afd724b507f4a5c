"""What the config of an untrusted checkpoint may not ask for."""

from __future__ import annotations

from typing import Any

from transformers.configuration_utils import PreTrainedConfig

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


def check_entries(config: PreTrainedConfig) -> None:
    """Refuse entries of transformers' own that make it read or run anything but this checkpoint's safetensors.

    Raises:
        ValueError: an attention kernel to be fetched from the Hub, or weights in another kind of file.
    """
    kernel = getattr(config, "_attn_implementation", None)
    if kernel is not None and ("/" in kernel or "\\" in kernel):
        rule = "attn_implementation must not be code to be fetched from the Hub"
        raise ValueError(complaint(rule, repr(kernel), "leave it out: these models compute their own attention"))
    weights = getattr(config, "transformers_weights", None)
    if weights is not None and not str(weights).endswith((".safetensors", ".safetensors.index.json")):
        rule = "transformers_weights must name safetensors"
        raise ValueError(complaint(rule, repr(weights), "leave it out, or save the model again by save_pretrained"))


def check_parameters(count: int) -> None:
    """Refuse a model that no machine holds.

    Raises:
        ValueError: more than ``MOST_PARAMETERS``.
    """
    if count > MOST_PARAMETERS:
        rule = f"a model must have at most {MOST_PARAMETERS:,} parameters"
        raise ValueError(complaint(rule, f"about {count:,}", "check the sizes for a slip of the keyboard"))


__all__ = ["MOST_PARAMETERS", "check_entries", "check_parameters", "without_code_map"]
