"""Where checkpoints are written to and read from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_longmem._errors import complaint

# What from_pretrained(variant="half") reads: model.half.safetensors, or model-00001-of-00002.half.safetensors.
_OF_A_VARIANT = re.compile(r"model(-\d+-of-\d+)?\.[^.]+\.safetensors")


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


def weight_files(folder: str | Path) -> list[Path]:
    """Give the safetensors files in a folder that ``from_pretrained`` reads, and none of what else may lie there.

    Trainer's checkpoints hold the memory of training text as safetensors too, and `longmem eval --save_memory` writes
    such a file wherever it is told to.

    Args:
        folder: a checkpoint. Shards that its index lists and that are not there are left out.

    Raises:
        OSError: its index is damaged.
    """
    folder = Path(folder)
    name = _named_in_config(folder) or SAFE_WEIGHTS_NAME
    if name == SAFE_WEIGHTS_NAME and not (folder / name).is_file():
        name = SAFE_WEIGHTS_INDEX_NAME
    names = {name} if name.endswith(".safetensors") else listed_shards(folder / name)
    return sorted(file for file in folder.glob("*.safetensors") if file.name in names and file.is_file())


def variant_files(folder: str | Path) -> list[Path]:
    """Give the safetensors files in a folder that ``from_pretrained`` reads with a ``variant``."""
    return sorted(file for file in Path(folder).glob("*.safetensors") if _OF_A_VARIANT.fullmatch(file.name))


def listed_shards(index: Path) -> set[str]:
    """Names of the files that an index lists; none if it does not exist.

    Raises:
        OSError: it is damaged.
    """
    if not index.is_file():
        return set()
    try:
        return set(map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"{index} must be whole"
        raise OSError(complaint(rule, f"a damaged one ({error})", "download or copy it again")) from error


def _named_in_config(folder: Path) -> str | None:
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    name = config.get("transformers_weights") if isinstance(config, dict) else None
    return None if name is None else str(name)


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


__all__ = ["empty_folder", "listed_shards", "open_safetensors", "variant_files", "weight_files"]
