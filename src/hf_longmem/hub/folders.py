"""Where checkpoints are written to."""

from __future__ import annotations

from pathlib import Path

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


__all__ = ["empty_folder"]
