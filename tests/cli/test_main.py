"""`longmem` itself: help, version, mistakes, and what it imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hf_longmem import __version__
from hf_longmem.cli.errors import CommandError, user_mistakes
from hf_longmem.cli.main import COMMANDS, main


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    printed = capsys.readouterr().out
    assert all(command in printed for command in COMMANDS)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"longmem {__version__}\n"


def test_an_unknown_command_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["trian"])
    assert "'trian'" in capsys.readouterr().err


def test_help_loads_neither_datasets_nor_the_trainer() -> None:
    code = (
        "import sys; from hf_longmem.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = ('datasets', 'accelerate', 'transformers.trainer', 'hf_longmem.cli.train')\n"
        "sys.exit(', '.join(name for name in heavy if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hf_longmem.cli.main", "train", "--text", "gone.txt"],
        capture_output=True,
        text=True,
        check=False,
    )
    expected = "longmem train: error: gone.txt must be a text file, got no such file; check the path\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_only_the_named_kinds_are_the_users_mistakes() -> None:
    with pytest.raises(CommandError, match=r"^here: two lines$") as caught, user_mistakes(ValueError, prefix="here: "):
        raise ValueError("two\n  lines")
    assert caught.value.status == 2
    with pytest.raises(KeyError), user_mistakes(ValueError):
        raise KeyError("ours")
