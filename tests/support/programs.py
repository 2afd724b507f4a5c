"""Functions of one file, called in a fresh Python: for what counts before an import, or for another environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_CALL = """\
import importlib.util, json, sys
file, function, arguments, answer = sys.argv[1:]
spec = importlib.util.spec_from_file_location("program", file)
module = importlib.util.module_from_spec(spec)
sys.modules["program"] = module
spec.loader.exec_module(module)
result = getattr(module, function)(**json.loads(arguments))
with open(answer, "w") as out:
    json.dump(result, out)
"""


def call(
    file: str | Path,
    function: str,
    directory: Path,
    environment: dict[str, str],
    *,
    python: str | Path = sys.executable,
    timeout: float = 240,
    **arguments: Any,
) -> Any:
    """Call ``function`` of ``file`` with ``arguments`` in a new process, and return what it returns; both are JSON.

    Args:
        directory: where the process runs; it is made if it is not there.
        environment: added to a clean one, without the variables of this process that huggingface_hub would read.
        python: the interpreter, which has ``tests/support`` on its path.
    """
    directory.mkdir(parents=True, exist_ok=True)
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_", "PYTEST"))
    }
    kept.pop("PYTHONPATH", None)
    environment = kept | {"PYTHONPATH": str(Path(__file__).parent), "PYTHONDONTWRITEBYTECODE": "1"} | environment
    answer = directory / f"{function}.answer.json"
    answer.unlink(missing_ok=True)
    done = subprocess.run(
        [str(python), "-c", _CALL, str(file), function, json.dumps(arguments), str(answer)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, (
        f"{function} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    )
    return json.loads(answer.read_text())


__all__ = ["call"]
