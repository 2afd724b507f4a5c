"""Imports point one way, operators need nothing but torch, and one file registers with transformers' Auto classes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "hf_longmem"
ROOT = Path(__file__).resolve().parents[1] / "src" / PACKAGE
# The front is the package's own __init__: it collects the public names, so it stands above all that defines them, and
# only the command line may import it.
FRONT = ""
FLOORS = {
    "_shapes": 0,
    "_errors": 0,
    "_version": 0,
    "ops": 1,
    "layers": 2,
    "models": 3,
    "data": 4,
    "training": 4,
    "hub": 4,
    FRONT: 5,
    "cli": 6,
}
ALLOWED_IN_OPS = {*sys.stdlib_module_names, "torch"}
REGISTRAR = "models.auto"


def module_name(path: Path, root: Path) -> str:
    """Dotted name below the package: ``ops.chunking``, ``ops`` for its ``__init__``, the empty string for the top."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported, wherever in the file; relative imports keep their dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            if source == PACKAGE:
                yield from ((node.lineno, f"{PACKAGE}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, source
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def import_violations(name: str, tree: ast.AST) -> Iterator[str]:
    floor = name.split(".")[0]
    if floor not in FLOORS:
        yield f"{name}: {floor} has no floor in the import order"
        return
    for line, imported in imported_names(tree):
        where = f"{name or PACKAGE}:{line} imports {imported}"
        if imported.startswith("."):
            yield f"{where}: relative import"
        elif imported.split(".")[0] == PACKAGE:
            target = imported.partition(".")[2].split(".")[0]
            target = target if target in FLOORS else FRONT  # a public name, taken from the front
            if target != floor and FLOORS[target] >= FLOORS[floor]:
                yield f"{where}: not on a lower floor"
        elif floor == "ops" and imported.split(".")[0] not in ALLOWED_IN_OPS:
            yield f"{where}: operators import torch and the standard library only"


def registration_violations(name: str, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "register"):
            continue
        owner = node.func.value
        owner_name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if owner_name.startswith("Auto") and name != REGISTRAR:
            yield f"{name}:{node.lineno} calls {owner_name}.register outside {REGISTRAR}"


def violations(root: Path) -> list[str]:
    found = []
    for path in sorted(root.rglob("*.py")):
        name, tree = module_name(path, root), ast.parse(path.read_text(encoding="utf-8"))
        found += [*import_violations(name, tree), *registration_violations(name, tree)]
    return found


def test_the_package_keeps_the_import_order() -> None:
    assert len(list(ROOT.rglob("*.py"))) > 5, f"no package found at {ROOT}"
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("where", "source", "complaint"),
    [
        ("ops/a.py", "from hf_longmem.layers.b import c", "not on a lower floor"),
        ("ops/a.py", "from hf_longmem import layers", "not on a lower floor"),
        ("ops/a.py", "import hf_longmem", "not on a lower floor"),
        ("ops/a.py", "def f():\n    import hf_longmem.cli.main", "not on a lower floor"),
        ("ops/lsh/a.py", "import importlib\nimportlib.import_module('hf_longmem.models')", "not on a lower floor"),
        ("ops/lsh/a.py", "from . import b", "relative import"),
        ("ops/a.py", "import numpy as np", "torch and the standard library only"),
        ("ops/a.py", "from transformers.utils import logging", "torch and the standard library only"),
        ("layers/a.py", "from hf_longmem.models.b import c", "not on a lower floor"),
        ("data/a.py", "from hf_longmem.training.b import c", "not on a lower floor"),
        ("_errors.py", "from hf_longmem import _shapes", "not on a lower floor"),
        ("hub/a.py", "from hf_longmem import ReformerLSHConfig", "not on a lower floor"),
        ("models/a.py", "import hf_longmem", "not on a lower floor"),
        ("__init__.py", "from hf_longmem.cli.main import main", "not on a lower floor"),
        ("surprise/a.py", "", "no floor"),
        ("hub/a.py", "AutoConfig.register('x', X)", "outside models.auto"),
        ("__init__.py", "import transformers\ntransformers.AutoModel.register(X, Y)", "outside models.auto"),
    ],
)
def test_the_checker_finds_a_planted_violation(tmp_path: Path, where: str, source: str, complaint: str) -> None:
    planted = tmp_path / where
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(source, encoding="utf-8")
    (found,) = violations(tmp_path)
    assert complaint in found


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("ops/a.py", "import math\nimport torch.nn.functional as F\nfrom hf_longmem._errors import complaint"),
        ("ops/lsh/a.py", "from hf_longmem.ops import _blocks\nfrom hf_longmem._shapes import X"),
        ("models/auto.py", "from transformers import AutoModel\nAutoModel.register(X, Y)"),
        ("cli/a.py", "from hf_longmem.hub import cards\nfrom hf_longmem.ops import lsh"),
        ("cli/a.py", "import hf_longmem\nfrom hf_longmem import ReformerLSHConfig"),
        ("hub/a.py", "X.register_for_auto_class('AutoModel')\nregistry.register(X)"),
        ("__init__.py", "from hf_longmem.models import auto"),
    ],
)
def test_the_checker_lets_the_allowed_pass(tmp_path: Path, where: str, source: str) -> None:
    planted = tmp_path / where
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(source, encoding="utf-8")
    assert violations(tmp_path) == []
