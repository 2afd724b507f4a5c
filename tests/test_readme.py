"""What the README shows works as it is shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hf_longmem.cli.arguments import parse

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def commands(program: str) -> list[str]:
    lines = [line.partition("  #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith(program + " ")]


# What is pushed needs a hub: tests/hub/test_sharing.py runs that block.
RUN = [number for number, block in enumerate(blocks("python")) if "push_to_hub" not in block]
TRAIN = [*commands("longmem train"), *(line.partition("hf_longmem.cli.main ")[2] for line in commands("accelerate"))]


def test_the_readme_is_short_and_shows_what_it_should() -> None:
    assert len(README.splitlines()) <= 250
    assert len(blocks("python")) == 7
    assert len(RUN) == 6
    assert commands("make") == ["make demo", "make test"]
    assert len(TRAIN) == 7
    assert len(commands("longmem eval")) == 2
    assert len(commands("longmem convert")) == 1


@pytest.mark.parametrize("number", RUN)
def test_a_python_block_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks("python")[number], f"README.md, block {number}", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("command", TRAIN)
def test_a_longmem_command_has_arguments_that_exist(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.yaml").write_text("num_hashes: 4\n", encoding="utf-8")
    arguments = shlex.split(command)
    parse(arguments[arguments.index("train") + 1 :])


def test_make_has_the_targets_and_ci_runs_them() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in commands("make"):
        assert re.search(rf"^{command.split()[1]}:", makefile, flags=re.MULTILINE)
        assert re.search(rf"^{command}\b", ci, flags=re.MULTILINE)
    assert ci.rstrip().endswith("make test")
