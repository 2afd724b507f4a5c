"""A few weights of a model, by which another one under the same name is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_longmem._errors import complaint

_MATRICES, _VALUES = 8, 4


def sample_weights(model: nn.Module) -> dict[str, Any]:
    """Give some values of some matrices of a model, from its first to its last, as a config can hold them.

    Args:
        model: any; of weights that are quantized, spread over processes or not there yet nothing is taken.

    Returns:
        By the parameter's name, ``{"dtype": "float32", "values": [...]}``.
    """
    matrices = {name: weight for name, weight in model.named_parameters() if weight.dim() > 1 and _is_plain(weight)}
    names = [list(matrices)[place] for place in _spread(len(matrices), _MATRICES)]
    return {
        name: {"dtype": str(matrices[name].dtype).removeprefix("torch."), "values": _values(matrices[name]).tolist()}
        for name in names
    }


def differing_weight(sample: dict[str, Any], model: nn.Module) -> str | None:
    """Name a parameter of a model that has other values than a sample says; None if there is none.

    Values of two precisions are the same if rounding to the lower one makes them so. Parameters that only one of the
    two has are not compared.

    Args:
        sample: what `sample_weights` gave.
        model: the model to compare.

    Raises:
        ValueError: the sample is none.
    """
    parameters = dict(model.named_parameters())
    for name, taken in sample.items():
        weight = parameters.get(name)
        if weight is not None and _is_plain(weight) and not _are_same(_values(weight), weight.dtype, *_taken(taken)):
            return name
    return None


def _taken(entry: Any) -> tuple[Tensor, torch.dtype]:
    try:
        values, dtype = torch.tensor(entry["values"], dtype=torch.float64), getattr(torch, entry["dtype"])
        torch.finfo(dtype)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        rule = "base_weights must be values of weights by name, as add_long_term_memory writes them"
        raise ValueError(complaint(rule, repr(entry), "set it to null in config.json")) from error
    return values, dtype


def _are_same(first: Tensor, first_dtype: torch.dtype, second: Tensor, second_dtype: torch.dtype) -> bool:
    relative = absolute = 0.0
    if first_dtype != second_dtype:
        kinds = torch.finfo(first_dtype), torch.finfo(second_dtype)
        # Below the smallest normal number precision is absolute.
        relative, absolute = max(kind.eps for kind in kinds), max(kind.tiny for kind in kinds)
    return first.shape == second.shape and torch.allclose(first, second, relative, absolute, equal_nan=True)


def _is_plain(weight: Tensor) -> bool:
    return weight.is_floating_point() and not weight.is_meta and type(weight.data) is Tensor and weight.numel() > 0


def _values(weight: Tensor) -> Tensor:
    flat = weight.detach().reshape(-1)
    places = torch.tensor(_spread(len(flat), _VALUES), device=flat.device)
    return flat[places].cpu().double()


def _spread(size: int, count: int) -> list[int]:
    """Up to ``count`` places among ``size``, the first and the last among them."""
    return sorted({place * (size - 1) // max(count - 1, 1) for place in range(count)}) if size else []


__all__ = ["differing_weight", "sample_weights"]
