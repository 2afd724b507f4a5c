"""transformers' own tests are found, and only those of the installed version are taken."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
from harness import source


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of its own with the archive, but nothing unpacked."""
    source.fetch()
    shutil.copy(source.cache_directory() / source.ARCHIVE, tmp_path)
    return tmp_path


def test_the_tests_of_the_installed_version_are_here() -> None:
    folder = source.fetch()
    assert (folder / source.PACKAGE / "test_modeling_common.py").is_file()


def test_what_is_cached_needs_no_network_and_is_mended(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    module = source.fetch(cache) / source.PACKAGE / "test_training_mixin.py"
    whole = module.read_bytes()
    module.write_bytes(whole[:-1])
    source.fetch(cache)
    assert module.read_bytes() == whole


def test_without_a_network_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(source.TestsUnavailable, match=f"Run once with a network, or put {source.ARCHIVE} into"):
        source.fetch(tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(source.TestsUnavailable, match="cannot be written"):
        source.fetch(tmp_path / "file")


def test_an_archive_of_other_sources_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "transformers-0" / "src" / "transformers" / "__init__.py"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("", encoding="utf-8")
    with tarfile.open(tmp_path / source.ARCHIVE, "w:gz") as archive:
        archive.add(foreign.parents[2], "transformers-0")
    with pytest.raises(source.TestsUnavailable, match="not the source of the installed transformers"):
        source.fetch(tmp_path)


def test_a_damaged_archive_is_refused(cache: Path) -> None:
    archive = cache / source.ARCHIVE
    archive.write_bytes(archive.read_bytes()[:100_000])
    with pytest.raises(source.TestsUnavailable, match="is damaged"):
        source.fetch(cache)
    assert not list(cache.glob("transformers-*/*"))
