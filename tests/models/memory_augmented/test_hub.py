"""Memories on a hub that the test starts on localhost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from local_hub import LocalHub

PROGRAM = Path(__file__).parent / "hub_program.py"
TIMEOUT = 150  # seconds; it needs about 10 idle


def test_a_memory_is_pushed_alone_and_pulled_with_its_model(tmp_path: Path) -> None:
    with LocalHub() as hub:
        command = [sys.executable, str(PROGRAM), str(tmp_path / "answer.json")]
        environment = hub.environment(tmp_path / "home")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        assert done.returncode == 0, done.stderr
        sizes = {name: len(repo.files["model.safetensors"]) for name, repo in hub.repositories.items()}
    answer = json.loads((tmp_path / "answer.json").read_text(encoding="utf-8"))
    assert answer == {name: {"same": True, "max_length": 33} for name in ("memory", "everything")}
    assert sizes["user/memory"] + sizes["user/base"] < sizes["user/everything"] + 4000
    assert sizes["user/memory"] < sizes["user/everything"] / 2
