"""What the caches of models with a long-term memory share: rows, devices and files."""

from __future__ import annotations

import json
import os
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache

from hf_longmem._errors import complaint
from hf_longmem.models.memory_files import read_memory_file, write_memory_file
from hf_longmem.models.recurrent_cache import RecurrentCacheLayer
from hf_longmem.models.row_memory import RowMemory


class MemoryCacheLayer(RecurrentCacheLayer):
    """Base: a layer that the model fills after it has run, and which counts the tokens itself."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.length = 0

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return self.length

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.length = 0


class MemoryCache(DynamicCache):
    """Base: of bounded size however long the document, saved and loaded with the settings that it makes sense with.

    Args:
        config: the model's config.
    """

    file_format: ClassVar[str]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.fingerprint = self._fingerprint(config)

    @property
    def seen(self) -> Tensor | None:
        """How many real tokens each row has read, ``[B]``; None before the first."""
        memory = self._remembered()
        return None if memory is None else memory.seen_B

    def reset(self, rows: Tensor | None = None) -> None:
        """Make the rows that ``rows`` (bool ``[B]``) says as new, bit for bit; by default forget everything.

        The cache stays as long as its longest row was: to `generate`, a prompt that is longer than that is the whole
        text of every row.
        """
        if rows is not None and (memory := self._remembered()) is not None:
            rows = torch.as_tensor(rows)
            memory = memory.reset(rows)
            if not rows.all():
                self._keep(memory)
                return
        super().reset()

    def reorder(self, rows: Tensor) -> None:
        """Make row i what row ``rows[i]`` was."""
        self.reorder_cache(rows)  # type: ignore[arg-type]

    def select(self, rows: Tensor) -> None:
        """Keep the rows ``rows``, in their order."""
        self.batch_select_indices(rows)

    def repeat(self, repeats: int) -> None:
        """Repeat each row, as for several continuations of one document."""
        self.batch_repeat_interleave(repeats)

    def to(self, device: torch.device | str) -> Self:
        """Move to a device."""
        if (memory := self._remembered()) is not None:
            self._keep(memory.to(device))
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a safetensors file; never leaves a half-written one.

        Raises:
            ValueError: there is nothing to save yet.
        """
        memory = self._remembered()
        if memory is None:
            rule = "a cache must hold something to be saved"
            raise ValueError(complaint(rule, "an empty one", "run the model first"))
        write_memory_file(path, self.file_format, self._stored(memory), self.fingerprint, self.get_seq_length())

    @classmethod
    def load(cls, path: str | os.PathLike[str], config: PreTrainedConfig, device: torch.device | str = "cpu") -> Self:
        """Read what `save` wrote.

        Raises:
            OSError: the file is missing, truncated or corrupt.
            ValueError: it is no memory, one of another config, or holds NaN or infinity.
        """
        cache = cls(config)
        tensors, length = read_memory_file(path, cls.file_format, cache.fingerprint, config.model_type)
        cache._keep(cls._restored(tensors, config), length)
        return cache.to(device)

    def check_config(self, config: PreTrainedConfig) -> None:
        """Raise a ValueError if a model of this config cannot go on with what another left here."""
        if self.fingerprint != self._fingerprint(config):
            rule = "the cache must come from a model of this config"
            raise ValueError(complaint(rule, "one of another config", f"use {type(self).__name__}(model.config)"))

    @classmethod
    def _fingerprint(cls, config: Any) -> dict[str, Any]:
        # Through json, so that one that was saved compares equal.
        return json.loads(json.dumps(cls._settings(config)))

    @staticmethod
    def _settings(config: Any) -> dict[str, Any]:
        """Give what two configs must agree in to go on with each other's memory."""
        raise NotImplementedError

    def _remembered(self) -> Any:
        """Give all that is held, a `RowMemory`; None before the first token."""
        raise NotImplementedError

    def _keep(self, memory: Any, length: int = 0) -> None:
        """Hold what a model remembers after ``length`` more tokens, padding included."""
        raise NotImplementedError

    @staticmethod
    def _stored(memory: Any) -> dict[str, Tensor]:
        """Name the tensors of a memory, for a file."""
        raise NotImplementedError

    @staticmethod
    def _restored(tensors: dict[str, Tensor], config: Any) -> RowMemory:
        """Make a memory of a file's tensors."""
        raise NotImplementedError


__all__ = ["MemoryCache", "MemoryCacheLayer"]
