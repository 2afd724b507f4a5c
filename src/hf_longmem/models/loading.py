"""Loading a checkpoint that may be damaged."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError
from transformers.modeling_utils import PreTrainedModel

from hf_longmem._errors import complaint

_NAMED_AT_MOST = 5


class CheckedLoading(PreTrainedModel):
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
