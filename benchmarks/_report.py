"""What every results file says of where its numbers come from."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from pathlib import Path

import torch
import transformers

RESULTS = Path(__file__).parent / "results"


def origin() -> str:
    """Date, machine, versions and command, as a Markdown list."""
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return "\n".join(
        [
            f"- date: {datetime.date.today()}",
            f"- machine: {device}, {threads}, {platform.system()}",
            f"- versions: {versions}",
            f"- command: `{command}`",
        ]
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def write(question: str, text: str, folder: Path = RESULTS) -> Path:
    """Write ``<folder>/<date>-<question>.md`` and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.date.today()}-{question}.md"
    path.write_text(text, encoding="utf-8")
    return path


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
