"""The memory of a training run's document streams as safetensors files, one for each process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_longmem._errors import complaint
from hf_longmem.models.stream_memory import CarriedMemory

_FORMAT = "hf_longmem.stream_memory.1"


def memory_file(folder: str | os.PathLike[str], rank: int) -> Path:
    """Where a checkpoint folder keeps the memory of the process ``rank``."""
    return Path(folder) / f"memory-rank-{rank}.safetensors"


def save_carried_memory(
    folder: str | os.PathLike[str], carried: CarriedMemory, *, rank: int = 0, world_size: int = 1
) -> None:
    """Write what one process remembers of its streams into a checkpoint folder; never leaves a half-written file.

    Args:
        folder: the checkpoint's, made if it does not exist.
        carried: ``collator.carried(streams)``.
        rank: this process, of ``world_size``.
        world_size: how many processes write such a file.
    """
    tensors = [] if carried.value is None else _tensors(carried.value)
    path = memory_file(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"format": _FORMAT, "num_batches": str(carried.num_batches), "world_size": str(world_size)}
    partial = path.with_name(f"{path.name}.partial")
    try:
        # Each in storage of its own, as safetensors asks.
        stored = {str(index): tensor.detach().cpu().clone() for index, tensor in enumerate(tensors)}
        save_file(stored, partial, metadata)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_carried_memory(
    folder: str | os.PathLike[str],
    carried: CarriedMemory,
    model: nn.Module,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Restore what `save_carried_memory` wrote, so that training goes on with the batch after it.

    Args:
        folder: the checkpoint's.
        carried: ``collator.carried(streams)``, which is changed.
        model: on its device; it, or a module in it, has ``empty_memory``.
        batch_size: rows of this process.
        rank: this process, of ``world_size``.
        world_size: how many processes there are.

    Raises:
        FileNotFoundError: the folder has no such file.
        OSError: the file is truncated or corrupt.
        ValueError: it was written by another number of processes, or for another model or batch size.
    """
    path = memory_file(folder, rank)
    if not path.is_file():
        rule = f"{path.parent} must hold the memory of its streams to go on in the middle of documents"
        fix = "resume from a checkpoint that StreamMemoryCallback was there to complete, with as many processes"
        raise FileNotFoundError(complaint(rule, f"no {path.name}", fix))
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise OSError(
            complaint(f"{path} must be whole", f"a damaged file ({error})", "resume from another checkpoint")
        ) from error
    if metadata.get("format") != _FORMAT:
        received = f"format {metadata.get('format')}"
        raise ValueError(complaint(f"{path} must hold the memory of streams", received, "use another checkpoint"))
    if int(metadata["world_size"]) != world_size:
        rule = f"{path.parent} has the memory of streams of {metadata['world_size']} processes"
        fix = "resume with as many, or start from the documents' beginnings"
        raise ValueError(complaint(rule, f"{world_size} processes", fix))
    carried.restore(int(metadata["num_batches"]), _as_before(tensors, model, batch_size, path) if tensors else None)


def _as_before(tensors: dict[str, Tensor], model: nn.Module, batch_size: int, path: Path) -> Any:
    owner = next((module for module in model.modules() if hasattr(module, "empty_memory")), None)
    if owner is None:
        rule = "the model must have a memory to be restored"
        raise ValueError(complaint(rule, type(model).__name__, "use a model of a family with memory"))
    empty: Any = owner.empty_memory(batch_size)  # type: ignore[operator]
    places = _tensors(empty)
    loaded = [tensors.get(str(index), torch.empty(0)) for index in range(len(places))]
    # The window's length may differ, the rows may not.
    if len(tensors) != len(places) or any(
        (new.dtype, new.dim(), len(new)) != (old.dtype, old.dim(), len(old))
        for new, old in zip(loaded, places, strict=True)
    ):
        rows = {len(tensor) for tensor in tensors.values()}
        received = f"{len(tensors)} tensors of {sorted(rows)} rows, not {len(places)} of {batch_size}"
        fix = "resume with the same model and batch size"
        raise ValueError(complaint(f"{path} must be of this model and batch size", received, fix))
    moved = iter([new.to(old.device) for new, old in zip(loaded, places, strict=True)])
    return empty.map_rows(lambda _: next(moved))


def _tensors(memory: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def find(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    memory.map_rows(find)
    return found


__all__ = ["load_carried_memory", "memory_file", "save_carried_memory"]
