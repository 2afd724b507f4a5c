"""The benchmark of the memory runs from end to end, and the authors' formulation computes what the layer does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("memory_benchmark", FOLDER / "memory.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "memory_benchmark", module)
    spec.loader.exec_module(module)
    return module


def test_the_authors_formulation_gives_the_layers_numbers(benchmark: ModuleType) -> None:
    calls, _ = benchmark.layer_pair((24, 3, 32, 16, 48, 2), sticky=False, dtype=torch.float64)
    (out, kl), (ours, mean_kl) = calls["theirs"](), calls["ours"]()
    torch.testing.assert_close(ours, out, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(mean_kl, kl.mean(dim=1), atol=1e-9, rtol=1e-6)


def test_its_gradients_are_the_layers(benchmark: ModuleType) -> None:
    calls, modules = benchmark.layer_pair((24, 3, 32, 16, 48, 2), sticky=False, dtype=torch.float64)
    for call in calls.values():
        call()[0].square().sum().backward()
    theirs = dict(modules["theirs"].named_parameters())
    assert len(theirs) == 5
    for name, parameter in modules["ours"].named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=1e-6, rtol=1e-5)


def test_sticky_samples_and_every_table_run(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sticky in (False, True):
        cells = benchmark.measure_layers((24, 3, 32, 16, 48, 2), sticky, 1, torch.get_num_threads())
        assert len(cells) == 4
        assert all(cell.endswith("x") for cell in cells)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "segment_length": 16, "num_basis": 16}
    monkeypatch.setattr(benchmark, "TRAINED", small | {"basis_widths": (0.05, 0.1)})
    monkeypatch.setattr(benchmark, "TRAINED_BATCH", (1, 40))
    assert len(benchmark.training_table(1).splitlines()) == 6
    monkeypatch.setattr(benchmark, "SMALL", small | {"basis_widths": (0.05, 0.1)})
    seconds, peaks = benchmark.stream({}, [32, 64], 2, 1)
    assert len(seconds) == len(peaks) == 2
    assert peaks[1] >= peaks[0] > 1
