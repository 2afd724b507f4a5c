"""The duplication benchmark runs from end to end, and what it calls full attention sees everything."""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hf_longmem import ReformerLSHForCausalLM

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALL = "--steps 2 --warmup 1 --length 32 --chunk_length 8 --hidden_size 16 --batch_size 2 --evaluated 3"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("duplication_benchmark", FOLDER / "duplication.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_writes_a_table_for_every_rule(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*SMALL.split(), "--candidates", "bucket:2", "chunk:4", "--trained", "full", "2"]
    monkeypatch.setattr(sys, "argv", ["benchmarks/duplication.py", *arguments, "--results", str(tmp_path)])
    benchmark.main()
    [path] = tmp_path.iterdir()
    text = path.read_text(encoding="utf-8")
    assert path.name.endswith("-duplication.md")
    assert "command: `python benchmarks/duplication.py --steps 2" in text
    assert [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")] == [
        *("trained with", "---", "full", "2"),
        *("trained with", "---", "full", "2"),
    ]


def test_full_attention_does_not_depend_on_the_hash_and_reaches_the_first_token(benchmark: ModuleType) -> None:
    arguments = Namespace(length=32, chunk_length=8, hidden_size=16)
    torch.manual_seed(0)
    model = ReformerLSHForCausalLM(benchmark.config(arguments, "bucket", 4, "full")).double().eval()
    tokens = torch.randint(1, 128, (1, 32))
    logits = model(tokens, hash_seed=1).logits
    torch.testing.assert_close(model(tokens, hash_seed=2).logits, logits, rtol=0, atol=1e-12)
    for seen in (0, 15, 30):
        changed = tokens.clone()
        changed[0, seen] = tokens[0, seen] % 127 + 1
        assert (model(changed).logits[0, 31] - logits[0, 31]).abs().max() > 1e-9
