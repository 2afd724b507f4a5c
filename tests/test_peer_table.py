"""The tables of ``tests/README.md`` name tests that exist, for every row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
README = (TESTS / "README.md").read_text(encoding="utf-8")
REPORTS = [*range(1, 6), *range(8, 13), *range(14, 36), *range(37, 46)]
REPRODUCED = [*range(1, 9), *range(10, 20), 22, 23]
MEMORIES = [*range(1, 14), 16, 17, *range(19, 23), *range(24, 27), *range(29, 37)]
FOLDERS = {"M/": "models/reformer_lsh/", "I/": "models/infinite_former/", "A/": "models/memory_augmented/"}


def rows() -> dict[str, str]:
    cells = re.findall(r"^\| ([MN]?\d+) \|.*\| (.*) \|$", README, flags=re.MULTILINE)
    assert len(cells) == len(dict(cells))
    return dict(cells)


def test_every_row_has_an_answer() -> None:
    numbered = {"": REPORTS, "N": REPRODUCED, "M": MEMORIES}
    assert set(rows()) == {f"{letter}{number}" for letter, numbers in numbered.items() for number in numbers}
    for row, answer in rows().items():
        refers = re.fullmatch(r"as (M?\d+)", answer)
        assert "`" in answer or answer == "there is no such option" or (refers and refers[1] in rows()), row


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", README)
    assert len(named) > 120
    for path, test in named:
        file = TESTS / (FOLDERS.get(path[:2], path[:2]) + path[2:])
        if path.startswith("benchmarks/"):
            file = TESTS.parent / path
        assert file.is_file(), path
        functions = {n.name for n in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(n, ast.FunctionDef)}
        assert not test or test in functions, f"{path}::{test}"
