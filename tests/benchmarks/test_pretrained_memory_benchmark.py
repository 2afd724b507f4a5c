"""The benchmark of a memory around a trained model runs from end to end."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("pretrained_memory_benchmark", FOLDER / "pretrained_memory.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.Text, "window", 64)
    monkeypatch.setattr(module.Text, "batch", 4)
    monkeypatch.setattr(module.Recall, "batch", 8)
    monkeypatch.setattr(module, "MEMORIES", {"memory, sticky": {"sticky_memories": True}})
    return module


def test_every_arm_is_measured_and_reported(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs.jsonl"
    small = ["--seeds", "3", "--steps", "2", "--extra", "2", "--hidden_size", "16", "--layers", "1"]
    scored = ["--documents", "1", "--characters", "2000", "--train_tokens", "20000", "--facts", "2"]
    for action in ("text", "recall", "report"):
        arguments = [
            *([] if action == "report" else [*small, *scored]),
            "--runs",
            str(runs),
            "--results",
            str(tmp_path),
        ]
        monkeypatch.setattr(sys, "argv", ["benchmarks/pretrained_memory.py", action, *arguments])
        benchmark.main()
    text, recall = (json.loads(line)["arms"] for line in runs.read_text(encoding="utf-8").splitlines())
    assert [len(text), len(recall)] == [5, 4]
    assert all(2 < arm["score"] < 10 for arm in text)
    assert len({arm["score"] for arm in text}) == len(text)  # each arm was trained on
    assert all(0 <= arm["score"] <= 100 for arm in recall)
    written = next(tmp_path.glob("*-pretrained-memory.md")).read_text(encoding="utf-8")
    assert written.count("| memory, sticky, then everything |") == 2
