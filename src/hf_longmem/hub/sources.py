"""The package's own modules as flat files, which transformers' loader of remote code can copy and import."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from hf_longmem._errors import complaint
from hf_longmem._version import __version__

PACKAGE = "hf_longmem"
_DISTRIBUTION = "hf-longmem"
# Modules with such a name keep it: it is what people look for in a repository of the Hub.
_KNOWN_BY_NAME = re.compile(r"(configuration|modeling|tokenization)_\w+")
# PyTorch has one operator of a name, and a model on its own, another head of it and another checkpoint each bring a
# copy of the code into one process: a copy's operators carry the number of its module.
_OPERATOR = re.compile(rf'"{PACKAGE}::(\w+)"')
_OPERATOR_OF_THE_COPY = rf'''f"{PACKAGE}_{{__import__('zlib').crc32(__name__.encode()):08x}}::\1"'''


def flat_name(module: str) -> str:
    """Name of the flat module that stands for ``module``.

    Args:
        module: dotted name inside this package.

    >>> flat_name("hf_longmem.ops.lsh.attend"), flat_name("hf_longmem.models.m.modeling_m")
    ('hf_longmem_ops_lsh_attend', 'modeling_m')
    """
    last = module.rpartition(".")[2]
    return last if _KNOWN_BY_NAME.fullmatch(last) else module.replace(".", "_")


def flat_sources(modules: Iterable[str]) -> dict[str, str]:
    """Give the text of a flat file for each of ``modules`` and for all of this package that they import.

    An absolute import of this package becomes a relative one of a sibling, wherever it stands, for transformers copies
    no other files. Operators get names that differ from copy to copy. The rest stays as it was written.

    Args:
        modules: dotted names inside this package.

    Raises:
        ValueError: a module imports this package in a way that has no flat form, or two modules want one file.
    """
    to_do, texts, written_for = list(modules), dict[str, str](), dict[str, str]()
    version = source_version()
    while to_do:
        module = to_do.pop()
        name = f"{flat_name(module)}.py"
        if written_for.setdefault(name, module) != module:
            rule = "every module of a bundle must have its own file"
            raise ValueError(complaint(rule, f"{module} and {written_for[name]} in {name}", "rename one of them"))
        if name not in texts:
            text, imported = flattened(module, _source(module))
            texts[name] = f"{_heading(module, version)}\n{text}"
            to_do += imported
    return dict(sorted(texts.items()))


def source_version() -> str:
    """Version of this package, and the commit of its source where that is known.

    The commit is that of the working tree which the package is imported from, or the one that pip installed.
    """
    commit = commit_of_working_tree(Path(__file__)) or _commit_of_installation()
    return f"{_DISTRIBUTION} {__version__}" + (f", commit {commit}" if commit else "")


def _heading(module: str, version: str) -> str:
    return (
        f"# {module}, written as a flat file by hf_longmem.bundle: {version}.\n"
        "# Apache-2.0. To change it, change the package and bundle again.\n"
    )


def flattened(module: str, source: str) -> tuple[str, list[str]]:
    """Give the source of a module with its imports rewritten, and the modules of this package which it imports.

    Raises:
        ValueError: an import of this package in another form than ``from hf_longmem.x import y``.
    """
    lines, imported = source.rstrip("\n").split("\n"), list[str]()
    # From the last to the first, so that the line numbers before a replacement stay true.
    for node in sorted(_own_imports(module, ast.parse(source)), key=lambda node: -node.lineno):
        start, end = node.lineno - 1, node.end_lineno or node.lineno
        replacement, needed = _relative(node, lines[start:end])
        lines[start:end] = replacement
        imported += needed
    return _OPERATOR.sub(_OPERATOR_OF_THE_COPY, "\n".join(lines)) + "\n", imported


def _source(module: str) -> str:
    spec = find_spec(module)
    get_source = getattr(getattr(spec, "loader", None), "get_source", None)
    source = get_source(module) if get_source else None
    if source is None:
        raise ValueError(complaint("a bundle is made from the package's sources", f"none for {module}", "install them"))
    return source


def _own_imports(module: str, tree: ast.AST) -> list[ast.ImportFrom]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_own(node.module or "") and not node.level:
            found.append(node)
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else _named_in_call(node)
        if isinstance(node, ast.ImportFrom) and node.level:
            names = [PACKAGE]
        if any(map(_is_own, names)):
            rule = "a module of a bundle must import its own package by `from hf_longmem.x import y`"
            raise ValueError(complaint(rule, f"another import in line {node.lineno} of {module}", "write it so"))  # type: ignore[attr-defined]
    return found


def _is_own(module: str) -> bool:
    return module.split(".")[0] == PACKAGE


def _named_in_call(node: ast.AST) -> list[str]:
    """What `import_module("hf_longmem.x")` and its kind name."""
    if not isinstance(node, ast.Call):
        return []
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called not in ("import_module", "__import__", "find_spec"):
        return []
    return [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]


def _relative(node: ast.ImportFrom, written: list[str]) -> tuple[list[str], list[str]]:
    """The lines for an import of this package, and the modules it needs."""
    package = str(node.module)
    submodules = [alias for alias in node.names if _is_submodule(package, alias.name)]
    if not submodules:
        words = rf"(\s*from\s+){re.escape(package)}(\s+import)"
        return [re.sub(words, rf"\g<1>.{flat_name(package)}\g<2>", written[0]), *written[1:]], [package]
    indent = written[0][: len(written[0]) - len(written[0].lstrip())]
    lines, needed = [f"{indent}import sys"], []
    for alias in node.names:
        name = alias.asname or alias.name
        if alias in submodules:
            # `from . import x` is not copied: take the module's name, and by it the module.
            needed.append(f"{package}.{alias.name}")
            lines.append(f"{indent}from .{flat_name(needed[-1])} import __name__ as {name}")
            lines.append(f"{indent}{name} = sys.modules[{name}]")
        else:
            needed.append(package)
            lines.append(f"{indent}from .{flat_name(package)} import {alias.name} as {name}")
    return lines, needed


def _is_submodule(package: str, name: str) -> bool:
    if not getattr(find_spec(package), "submodule_search_locations", None):
        return False
    if find_spec(f"{package}.{name}") is None:
        return False
    imports = (node for node in ast.parse(_source(package)).body if isinstance(node, ast.ImportFrom))
    return name not in {alias.asname or alias.name for node in imports for alias in node.names}


def commit_of_working_tree(file: Path) -> str | None:
    """Commit of the git working tree that holds ``file``, a module of a package's folder; None if it holds none.

    Changes of the package since then are said.
    """
    file = file.resolve()
    if _git(file, "ls-files", "--error-unmatch", file.name) is None:  # installed below somebody else's repository
        return None
    commit = _git(file, "rev-parse", "HEAD")
    changed = _git(file, "status", "--porcelain", "--", str(file.parents[1]))
    return f"{commit} with changes" if commit and changed else commit


def _git(file: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(file.parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _commit_of_installation() -> str | None:
    try:
        recorded = metadata.distribution(_DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    return json.loads(recorded).get("vcs_info", {}).get("commit_id") if recorded else None
