"""Loading a checkpoint that may be damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file

from hf_longmem._errors import complaint

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
PICKLE_WAY_OUT = (
    "a pickle can run code, so none is read; one that you trust becomes safetensors by "
    "model.load_state_dict(torch.load(file, weights_only=True)) and model.save_pretrained(folder)"
)
_NAMED_AT_MOST = 5


class SafetensorsOnly(PreTrainedModel):
    """A model whose ``from_pretrained`` reads weights from safetensors, and from no pickle."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does, from safetensors.

        Raises:
            OSError: the checkpoint holds its weights as a pickle.
            ValueError: a pickle is asked for.
        """
        for name in ("use_safetensors", "weights_only"):
            if kwargs.get(name) is False:
                raise ValueError(complaint(f"{name} must be True", False, "leave it out: no pickle is read"))
        if pretrained_model_name_or_path is not None and has_safetensors(pretrained_model_name_or_path, kwargs):
            kwargs["use_safetensors"] = True
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)


def has_safetensors(source: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a checkpoint holds safetensors.

    Args:
        source: its folder or name on the Hub.
        kwargs: the arguments of ``from_pretrained``, some of which say where to look.

    Raises:
        OSError: it holds a pickle instead.
    """
    variant = f".{kwargs['variant']}" if kwargs.get("variant") else ""
    # What is forced is fetched once, by the loading itself.
    names = (name for name in HUB_ARGUMENTS if name != "force_download")
    arguments = {name: kwargs[name] for name in names if kwargs.get(name) is not None}

    def found(name: str) -> str | None:
        stem, dot, ending = name.rpartition(".")
        file = f"{stem}{variant}{dot}{ending}"
        return cached_file(source, file, _raise_exceptions_for_missing_entries=False, **arguments)

    if found(SAFE_WEIGHTS_NAME):
        return True
    index = found(SAFE_WEIGHTS_INDEX_NAME)
    pickles = other_shards(index) if index else [name for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME) if found(name)]
    if pickles:
        raise OSError(complaint(f"the weights of {str(source)!r} must be safetensors", pickles[0], PICKLE_WAY_OUT))
    return index is not None


def other_shards(index: str) -> list[str]:
    """What an index of safetensors lists that are none."""
    try:
        shards = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"{index} must be whole"
        raise OSError(complaint(rule, f"a damaged one ({error})", "download or copy it again")) from error
    return sorted(shard for shard in map(str, shards) if not shard.endswith(".safetensors"))


class CheckedLoading(SafetensorsOnly):
    """A model whose ``from_pretrained`` refuses truncated files and weights that are not finite."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does, then check.

        Raises:
            OSError: a safetensors file is truncated or corrupt.
            ValueError: a loaded tensor holds NaN or infinity; the message names it.
        """
        try:
            loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except SafetensorError as error:
            rule = f"the safetensors files of {pretrained_model_name_or_path!r} must be whole"
            fix = "download or copy them again, or load an earlier checkpoint"
            raise OSError(complaint(rule, f"a damaged one ({error})", fix)) from error
        check_finite(loaded[0] if isinstance(loaded, tuple) else loaded, pretrained_model_name_or_path)
        return loaded


def check_finite(model: torch.nn.Module, source: Any) -> None:
    """Raise ValueError naming the floating parameters and buffers of ``model`` that are not finite throughout."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    broken = [
        name
        for name, tensor in tensors
        if tensor.is_floating_point() and not tensor.is_meta and not bool(torch.isfinite(tensor).all())
    ]
    if broken:
        named = ", ".join(broken[:_NAMED_AT_MOST])
        more = f" and {len(broken) - _NAMED_AT_MOST} more" if len(broken) > _NAMED_AT_MOST else ""
        rule = f"the weights in {source!r} must be finite"
        raise ValueError(complaint(rule, f"NaN or infinity in {named}{more}", "load an earlier checkpoint"))
