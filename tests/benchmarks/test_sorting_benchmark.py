"""The sorting benchmark runs from end to end, and its short cut through the segments without labels is exact."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hf_longmem import InfiniteFormerForCausalLM
from hf_longmem.data.synthetic import sorting

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("sorting_benchmark", FOLDER / "sorting.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in {"LENGTH": 100, "SYMBOLS": 5, "SEGMENT": 16, "BATCH": 2, "EVALUATED": 4}.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.parametrize("window", [16, 20, 40])
@pytest.mark.parametrize("variant", ["none", "fixed", "uniform", "sticky"])
def test_segments_without_labels_need_no_gradient(benchmark: ModuleType, variant: str, window: int) -> None:
    torch.manual_seed(0)
    changes = {"hidden_size": 16, "num_samples": 64, "short_term_window": window, "num_hidden_layers": 2}
    model = InfiniteFormerForCausalLM(benchmark.config(variant, changes)).train()
    batch = sorting(3, length=100, num_symbols=5).with_format("torch")[:]
    whole = model(batch["input_ids"], labels=batch["labels"]).loss
    expected = torch.autograd.grad(whole, list(model.parameters()))
    short = benchmark.loss_of(model, batch["input_ids"], batch["labels"])
    torch.testing.assert_close(short, whole)
    for gradient, other in zip(torch.autograd.grad(short, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(gradient, other)


def test_runs_are_collected_and_reported(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs.jsonl"

    def call(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["benchmarks/sorting.py", *arguments, "--runs", str(runs)])
        benchmark.main()

    for variant in ("none", "fixed"):
        call("run", variant, "--steps", "3", "--seed", "4")
    call("run", "uniform", "--steps", "2", "--set", "num_samples=256", "hidden_size=8", "--note", "narrow")
    call("report", "--results", str(tmp_path))
    assert [json.loads(line)["variant"] for line in runs.read_text(encoding="utf-8").splitlines()] == [
        *("none", "fixed", "uniform"),
    ]
    text = next(tmp_path.glob("*-sorting.md")).read_text(encoding="utf-8")
    first = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    assert first == ["memory", "---", "none", "fixed", "what", "---", "narrow"]
    assert "num_samples=256, hidden_size=8" in text
