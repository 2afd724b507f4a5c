"""A Python in which the package is not installed, and everything else is."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def python_without_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh virtual environment that sees this one's packages, all but ours.

    Links to them, for installing PyTorch again would take minutes. A ``.pth`` file below the linked folder is not
    read, so an editable installation does not shine through either.
    """
    root = tmp_path_factory.mktemp("venv")
    venv.EnvBuilder(symlinks=True).create(root)
    links = root / "packages"
    links.mkdir()
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(folder).iterdir():
            ours = "hf_longmem" in entry.name or entry.suffix == ".pth"
            if not ours and not (links / entry.name).exists():
                (links / entry.name).symlink_to(entry)
    paths = {"base": str(root), "platbase": str(root)}
    site_packages = Path(sysconfig.get_path("purelib", scheme="venv", vars=paths))
    (site_packages / "packages.pth").write_text(f"{links}\n", encoding="utf-8")
    return Path(sysconfig.get_path("scripts", scheme="venv", vars=paths)) / "python"
