"""Where checkpoints are written to and read from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hf_longmem._errors import complaint


def empty_folder(path: str | Path) -> Path:
    """Give ``path`` if it is an empty folder or nothing yet.

    Raises:
        ValueError: it is a file, or a folder with something in it.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(complaint("the destination must be a folder", path, "name another one"))
    if path.is_dir() and any(path.iterdir()):
        rule, fix = "the destination must be empty", "name another folder, or empty it"
        raise ValueError(complaint(rule, f"{path} with files in it", fix))
    return path


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file.

    Raises:
        OSError: it is damaged.
    """
    try:
        with safe_open(file, framework="pt") as weights:
            yield weights
    except SafetensorError as error:
        raise OSError(complaint(f"{file} must be whole", f"a damaged file ({error})", "copy it again")) from error


__all__ = ["empty_folder", "open_safetensors"]
