"""Checkpoints of a memory around a model: with the model's weights, or the memory's alone."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, logging

from hf_longmem._errors import complaint
from hf_longmem.models.config_safety import check_entries
from hf_longmem.models.loading import CheckedLoading, check_finite, has_safetensors
from hf_longmem.models.memory_augmented.base_sample import differing_weight
from hf_longmem.models.memory_augmented.configuration_memory_augmented import MemoryAugmentedConfig

logger = logging.get_logger(__name__)

_MEMORY = "long_term_memory."
# Of the arguments of from_pretrained, those that say where a checkpoint is and go for the base model's as well.
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "token")
_OWN_ARGUMENTS = ("revision", "subfolder", "variant", "_commit_hash", "adapter_kwargs")
# Whoever trusts the code of a memory's checkpoint has not said so of the other that it names.
_NOT_FOR_BASE = ("config", "state_dict", "output_loading_info", "trust_remote_code", "code_revision", *_OWN_ARGUMENTS)


class MemoryCheckpoints(CheckedLoading):
    """Saves and loads the memory alone as well: a checkpoint that names its base model instead of holding it."""

    config: MemoryAugmentedConfig
    language_model: PreTrainedModel
    long_term_memory: nn.Module

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, memory_only: bool = False, **kwargs: Any
    ) -> None:
        """Save everything, or the memory's weights alone.

        Args:
            save_directory: where; with ``push_to_hub=True`` to the Hub as well.
            memory_only: leave out the weights of the model around which the memory is; ``from_pretrained`` then loads
                them from where they came from, ``config.base_model_name_or_path``, without a revision or a subfolder,
                and refuses others than they were when the memory was added. What was trained of them is lost.
            args, kwargs: as in transformers.

        Raises:
            ValueError: ``memory_only`` of a model that came from nowhere.
        """
        if memory_only:
            if not self.config.base_model_name_or_path:
                rule = "memory_only needs the name or path of the model around which the memory is"
                fix = "save that model, load it from there and add the memory to it, or save everything"
                raise ValueError(complaint(rule, "a model that was not loaded from anywhere", fix))
            if any(parameter.requires_grad for parameter in self.language_model.parameters()):
                logger.warning(
                    "memory_only leaves out the weights of %s; if they were trained as well, save everything",
                    self.config.base_model_name_or_path,
                )
            state = kwargs.pop("state_dict", None) or self.state_dict()
            kwargs["state_dict"] = {name: tensor for name, tensor in state.items() if name.startswith(_MEMORY)}
        super().save_pretrained(save_directory, *args, **kwargs)

    def push_to_hub(self, repo_id: str, *, memory_only: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
        """Upload everything, or the memory's weights alone as `save_pretrained` writes them.

        Args:
            repo_id: name of the repository.
            memory_only: see `save_pretrained`.
            kwargs: as in transformers; with ``memory_only`` ``commit_message``, ``create_pr``, ``private``, ``token``.

        Raises:
            ValueError: ``memory_only`` of a model that came from nowhere.
        """
        if not memory_only:
            return super().push_to_hub(repo_id, **kwargs)  # type: ignore[arg-type]
        with tempfile.TemporaryDirectory() as folder:
            return self.save_pretrained(folder, memory_only=True, push_to_hub=True, repo_id=repo_id, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load either kind of checkpoint.

        Raises:
            OSError: a safetensors file is truncated or corrupt, or the base model is not where it came from.
            ValueError: a loaded tensor holds NaN or infinity, or the base model is another than the memory is for, by
                its sizes or by its weights (``config.base_weights``).
        """
        path = pretrained_model_name_or_path
        where = {name: kwargs[name] for name in (*_HUB_ARGUMENTS, "revision", "subfolder") if name in kwargs}
        files: list[str] = []
        if path is not None and kwargs.get("state_dict") is None:
            files = _files_of_memory_alone(path, kwargs.get("variant"), where)
        if not files:
            return super().from_pretrained(path, *args, **kwargs)
        config = kwargs.get("config")
        if not isinstance(config, MemoryAugmentedConfig):
            config = MemoryAugmentedConfig.from_pretrained(path, **where)
        model = cls(config, _load_base(config, path, {k: v for k, v in kwargs.items() if k not in _NOT_FOR_BASE}))
        tensors = dict[str, Tensor]()
        for file in files:
            with safe_open(file, framework="pt") as weights:
                tensors |= {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
        missing = {name for name in model.state_dict() if name.startswith(_MEMORY)} ^ set(tensors)
        if missing:
            rule = f"the memory in {path!r} must be that of its config"
            raise ValueError(complaint(rule, f"{sorted(missing)[0]} in one of them", "save it again"))
        model.load_state_dict(tensors, strict=False)
        check_finite(model.long_term_memory, path)
        model.name_or_path = str(path)
        with suppress(OSError):  # one saved without it generates as the base model does
            model.generation_config = GenerationConfig.from_pretrained(path, **where)
        model.eval()
        if kwargs.get("output_loading_info"):
            return model, {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
        return model


def _files_of_memory_alone(path: Any, variant: str | None, where: dict[str, Any]) -> list[str]:
    """The safetensors of a checkpoint that holds nothing but a memory; none of one that holds everything."""

    def find(name: str) -> str | None:
        if variant:
            stem, _, ending = name.rpartition(".")
            name = f"{stem}.{variant}.{ending}"
        return cached_file(
            path,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_connection_errors=False,
            **where,
        )

    if file := find(SAFE_WEIGHTS_NAME):
        return [file] if holds_memory_alone(file) else []
    index = find(SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        return []
    try:
        with open(index, encoding="utf-8") as opened:
            shard_of = json.load(opened)["weight_map"]
        if not all(name.startswith(_MEMORY) for name in shard_of):
            return []
        shards = sorted(set(shard_of.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # what is broken is told by whoever loads it
    return [str(cached_file(path, shard, **where)) for shard in shards]


def holds_memory_alone(file: str | os.PathLike[str]) -> bool:
    """Whether a safetensors file holds the weights of a memory and no others."""
    try:
        with safe_open(file, framework="pt") as weights:
            return all(name.startswith(_MEMORY) for name in weights.keys())  # noqa: SIM118
    except SafetensorError:
        return False  # what is broken is told by whoever loads it


def _load_base(config: MemoryAugmentedConfig, path: Any, kwargs: dict[str, Any]) -> Any:
    name = config.base_model_name_or_path
    if not name:
        rule = f"{path!r} holds a memory alone and must name the model around which it is"
        raise ValueError(complaint(rule, "no base_model_name_or_path", "pass a config that has one"))
    if config._attn_implementation:
        # Asked for by from_pretrained's argument, which the Auto classes put into the config.
        kwargs = {"attn_implementation": config._attn_implementation} | kwargs
    try:
        has_safetensors(name, kwargs)
        saved, _ = PreTrainedConfig.get_config_dict(name, **{k: kwargs[k] for k in _HUB_ARGUMENTS if k in kwargs})
        # Whoever loads this checkpoint has not looked at the other.
        check_entries(saved)
        if saved.get("model_type") == config.model_type:
            rule = f"the model around which the memory in {path!r} is must have no memory of its own"
            raise ValueError(complaint(rule, f"{name!r}, which has one", "save the memory with everything"))
        base = AutoModelForCausalLM.from_pretrained(name, **kwargs)
    except OSError as error:
        rule = f"the model around which the memory in {path!r} is must be where it came from"
        raise OSError(
            complaint(rule, f"{name!r} ({error})", "put it there, or save the memory with everything")
        ) from error
    theirs, ours = base.config.get_text_config(decoder=True), config.text_part
    for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        if getattr(theirs, key) != getattr(ours, key):
            rule = f"{name!r} must have {key}={getattr(ours, key)}, as the model which the memory in {path!r} is for"
            raise ValueError(complaint(rule, getattr(theirs, key), "load that model and add a memory to it"))
    if other := differing_weight(config.base_weights or {}, base):
        rule = f"{name!r} must have the weights of the model which the memory in {path!r} is for"
        fix = (
            "if they came from a revision or a subfolder, or were changed, save that model and name its folder as "
            "base_model_name_or_path, or save the memory with everything"
        )
        raise ValueError(complaint(rule, f"others in {other}", fix))
    return base


__all__ = ["MemoryCheckpoints", "holds_memory_alone"]
