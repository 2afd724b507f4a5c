"""Damaged checkpoints give a clear error and change nothing on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_longmem import ReformerLSHConfig, ReformerLSHForCausalLM


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = ReformerLSHConfig(hidden_size=16, num_attention_heads=2, attn_layers=["local", "lsh"])
    ReformerLSHForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(checkpoint: Path, value: float) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    for name in ("lm_head.bias", "model.layers.1.self_attn.qk_proj.weight"):
        weights[name].flatten()[3] = value
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"must be finite, got NaN or infinity in .*qk_proj.weight.*lm_head.bias; load"
    ):
        AutoModelForCausalLM.from_pretrained(checkpoint)


def test_at_most_five_broken_tensors_are_named(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    broken = {name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}
    save_file(broken, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"and {len(broken) - 5} more; load an earlier checkpoint"):
        ReformerLSHForCausalLM.from_pretrained(checkpoint)


@pytest.mark.parametrize("kept", [0, 5, 200, -10])
def test_a_truncated_file_says_so_and_stays_as_it_is(checkpoint: Path, kept: int) -> None:
    file = checkpoint / "model.safetensors"
    content = file.read_bytes()[:kept]
    file.write_bytes(content)
    with pytest.raises(OSError, match=r"must be whole, got a damaged one .*; download or copy them again"):
        ReformerLSHForCausalLM.from_pretrained(checkpoint)
    assert file.read_bytes() == content


def test_an_intact_file_loads_with_its_report(checkpoint: Path) -> None:
    model, report = ReformerLSHForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert isinstance(model, ReformerLSHForCausalLM)
    assert not report["missing_keys"]
