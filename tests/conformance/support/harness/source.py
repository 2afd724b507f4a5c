"""The tests that transformers ships in its source distribution, for the version that is installed.

A wheel has no tests, so the source distribution is downloaded once, by pip, compared with the installed package and
kept in a cache directory. From then on no network is needed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path, PurePosixPath

from filelock import FileLock

VERSION = metadata.version("transformers")
ARCHIVE = f"transformers-{VERSION}.tar.gz"
PACKAGE = "transformers_tests"  # a name of its own: this project's tests are called "tests" too
_MANIFEST = "manifest.json"


class TestsUnavailable(RuntimeError):
    """transformers' tests can neither be found nor downloaded."""

    __test__ = False


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/hf-longmem``, by default ``~/.cache/hf-longmem``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf-longmem"


def fetch(cache: Path | None = None) -> Path:
    """Return a folder to put on ``sys.path``; in it, ``transformers_tests/`` holds transformers' own test modules.

    Raises:
        TestsUnavailable: no network and nothing in the cache, an archive that is not the installed version, or a cache
            that cannot be written.
    """
    cache = cache_directory() if cache is None else cache
    folder = cache / f"transformers-{VERSION}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{ARCHIVE}.lock"):
            if not _intact(folder):
                archive = cache / ARCHIVE
                if not archive.is_file():
                    _download(cache)
                _unpack(archive, folder)
    except OSError as error:
        raise TestsUnavailable(
            f"{cache} cannot be written ({error}); set XDG_CACHE_HOME to a folder that can"
        ) from error
    return folder


def _intact(folder: Path) -> bool:
    try:
        digests = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return all(_digest((folder / name).read_bytes()) == digest for name, digest in digests.items())
    except (OSError, ValueError):
        return False


def _download(cache: Path) -> None:
    # Only transformers itself is taken as source: pip looks into it for its metadata, with a setuptools wheel.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "transformers", "--dest", str(cache), f"transformers=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not (cache / ARCHIVE).is_file():
        last_lines = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise TestsUnavailable(
            f"transformers' own tests come with its source distribution, which pip could not download:\n{last_lines}\n"
            f"Run once with a network, or put {ARCHIVE} into {cache}."
        )


def _unpack(archive: Path, folder: Path) -> None:
    """Take the test modules out of ``archive``, if its library is byte for byte the one installed."""
    recorded = _installed_digests()
    tests: dict[str, bytes] = {}
    foreign: list[str] = []
    try:
        with tarfile.open(archive) as source:
            for member in source:
                path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
                if not member.isfile() or path.suffix != ".py" or ".." in path.parts:
                    continue
                content = source.extractfile(member).read()  # type: ignore[union-attr]
                if path.parts[0] == "tests":
                    tests["/".join((PACKAGE, *path.parts[1:]))] = content
                elif path.parts[0] == "src" and recorded:
                    name = "/".join(path.parts[1:])
                    if recorded.get(name) != _digest(content):
                        foreign.append(name)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise TestsUnavailable(f"{archive} is damaged ({error}); delete it") from error
    if foreign or f"{PACKAGE}/test_modeling_common.py" not in tests:
        wrong = f"{len(foreign)} files differ, {foreign[0]} first" if foreign else "there are no tests in it"
        raise TestsUnavailable(
            f"{archive} is not the source of the installed transformers {VERSION}: {wrong}; delete it"
        )

    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        for name, content in tests.items():
            target = Path(temporary, "new", *PurePosixPath(name).parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        manifest = {name: _digest(content) for name, content in tests.items()}
        Path(temporary, "new", _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        Path(temporary, "new").rename(folder)


def _installed_digests() -> dict[str, str]:
    """Digests of the installed library's files as pip recorded them; empty for an editable install."""
    files = metadata.files("transformers") or []
    digests = {file.as_posix(): file.hash.value for file in files if file.hash and file.hash.mode == "sha256"}
    return digests if "transformers/__init__.py" in digests else {}


def _digest(content: bytes) -> str:
    # The form of a wheel's RECORD.
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode("ascii").rstrip("=")
