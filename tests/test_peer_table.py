"""The table of ``tests/README.md`` names tests that exist, for every row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
README = (TESTS / "README.md").read_text(encoding="utf-8")
REPORTS = [*range(1, 6), *range(8, 13), *range(14, 36), *range(37, 46)]
REPRODUCED = [*range(1, 9), *range(10, 20), 22, 23]


def rows() -> dict[str, str]:
    cells = re.findall(r"^\| (N?\d+) \|.*\| (.*) \|$", README, flags=re.MULTILINE)
    assert len(cells) == len(dict(cells))
    return dict(cells)


def test_every_row_has_an_answer() -> None:
    assert set(rows()) == {*map(str, REPORTS), *(f"N{number}" for number in REPRODUCED)}
    for row, answer in rows().items():
        refers = re.fullmatch(r"as (\d+)", answer)
        assert "`" in answer or answer == "there is no such option" or (refers and refers[1] in rows()), row


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", README)
    assert len(named) > 60
    for path, test in named:
        file = TESTS / path.replace("M/", "models/reformer_lsh/", 1)
        if path.startswith("benchmarks/"):
            file = TESTS.parent / path
        assert file.is_file(), path
        functions = {n.name for n in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(n, ast.FunctionDef)}
        assert not test or test in functions, f"{path}::{test}"
