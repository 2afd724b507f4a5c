"""Memories in files: safetensors with the settings that they only make sense with."""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_longmem._errors import complaint


def write_memory_file(
    path: str | os.PathLike[str], file_format: str, tensors: dict[str, Tensor], fingerprint: dict[str, Any], length: int
) -> None:
    """Write a memory; never leaves a half-written file.

    Args:
        path: the file.
        file_format: name and version of what the tensors mean.
        tensors: the memory.
        fingerprint: the settings which a model that goes on with it must share.
        length: tokens read, padding included.

    Raises:
        OSError: the folder is missing, or the file cannot be written.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"format": file_format, "config": json.dumps(fingerprint), "length": str(length)}
    metadata["checksum"] = _checksum(tensors, metadata)
    folder = os.path.dirname(os.fspath(path)) or os.curdir
    if not os.path.isdir(folder):
        raise FileNotFoundError(complaint("a memory is saved to an existing folder", repr(folder), "make it first"))
    partial = f"{os.fspath(path)}.partial"
    try:
        save_file(tensors, partial, metadata)
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)


def read_memory_file(
    path: str | os.PathLike[str], file_format: str, fingerprint: dict[str, Any], model_type: str
) -> tuple[dict[str, Tensor], int]:
    """Read what `write_memory_file` wrote: the tensors, on the CPU, and how many tokens were read.

    Raises:
        OSError: the file is missing, truncated or corrupt.
        ValueError: it is no memory, one of other settings, or holds NaN or infinity.
    """
    whole = f"the memory file {os.fspath(path)!r} must be whole"
    if os.path.isdir(path):
        raise IsADirectoryError(complaint("a memory is one file", f"the folder {os.fspath(path)!r}", "name the file"))
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise OSError(complaint(whole, f"a damaged one ({error})", "save it again")) from error
    if metadata.get("format") != file_format:
        rule = f"{os.fspath(path)!r} must hold the memory of {model_type} models"
        raise ValueError(complaint(rule, f"format {metadata.get('format')}", "use a file that save(path) wrote"))
    if metadata.get("checksum") != _checksum(tensors, metadata):
        raise OSError(complaint(whole, "one whose checksum is wrong", "save it again"))
    theirs = json.loads(metadata["config"])
    if theirs != fingerprint:
        differ = [f"{name}={theirs.get(name)}" for name, value in fingerprint.items() if theirs.get(name) != value]
        rule = f"the memory in {os.fspath(path)!r} must come from a model of this config"
        raise ValueError(complaint(rule, ", ".join(differ), "load it into the model that wrote it"))
    broken = [n for n, tensor in tensors.items() if tensor.is_floating_point() and not torch.isfinite(tensor).all()]
    if broken:
        rule = f"the memory in {os.fspath(path)!r} must be finite"
        raise ValueError(complaint(rule, f"NaN or infinity in {broken[0]}", "save it again"))
    return tensors, int(metadata["length"])


def _checksum(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Of all that a file holds: safetensors itself notices only one that is too short."""
    found = zlib.crc32("\n".join(metadata.get(name, "") for name in ("format", "config", "length")).encode())
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


__all__ = ["read_memory_file", "write_memory_file"]
