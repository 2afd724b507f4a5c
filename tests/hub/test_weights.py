"""A bundle holds the weights that its model is loaded from, and nothing else that is written as safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import causal_lm
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hf_longmem import LongTermMemoryConfig, MemoryAugmentedForCausalLM, add_long_term_memory, bundle
from hf_longmem.cli.main import main
from hf_longmem.hub.cards import facts_of_folder, write_card
from hf_longmem.hub.folders import weight_files

STRANGERS = ("memory-rank-0", "book", "model_memory", "modelled", "adapter_model")


def checkpoint(folder: Path, **how: Any) -> int:
    """Save a model, and beside it what a training run and people leave there; give its size."""
    model = causal_lm("infinite_former")
    model.save_pretrained(folder, **how)
    for name in STRANGERS:
        save_file({"tokens": torch.arange(1000)}, folder / f"{name}.safetensors")
    return model.num_parameters()


@pytest.mark.parametrize("how", [{}, {"max_shard_size": "5KB"}])
def test_what_a_model_remembers_of_a_text_stays_behind(tmp_path: Path, how: dict[str, Any]) -> None:
    size = checkpoint(tmp_path / "checkpoint", **how)
    assert facts_of_folder(tmp_path / "checkpoint").num_parameters == size
    out = bundle(tmp_path / "checkpoint", tmp_path / "out")
    names = {file.stem for file in out.glob("*.safetensors")}
    assert names
    assert not names & set(STRANGERS)
    assert {file.stem for file in weight_files(tmp_path / "checkpoint")} == names
    assert f"| parameters | {size:,} |" in (out / "README.md").read_text()
    assert facts_of_folder(out).num_parameters == size
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(out).state_dict().items():
        assert torch.equal(tensor, ours[name])


def test_variants_are_taken_along_and_counted_once(tmp_path: Path) -> None:
    size = checkpoint(tmp_path / "checkpoint")
    for how in ({}, {"max_shard_size": "5KB"}):
        causal_lm("infinite_former").save_pretrained(tmp_path / "checkpoint", variant=f"v{len(how)}", **how)
    out = bundle(tmp_path / "checkpoint", tmp_path / "out")
    assert {file.name for file in out.glob("model*.safetensors")} > {"model.safetensors", "model.v0.safetensors"}
    assert not {file.stem for file in out.iterdir()} & set(STRANGERS)
    assert facts_of_folder(out).num_parameters == size
    for variant in ("v0", "v1"):
        AutoModelForCausalLM.from_pretrained(out, variant=variant)


def test_weights_that_the_config_names_are_the_weights(tmp_path: Path) -> None:
    size = checkpoint(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "model.safetensors").rename(tmp_path / "checkpoint" / "weights.safetensors")
    config = tmp_path / "checkpoint" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"transformers_weights": "weights.safetensors"}))
    out = bundle(tmp_path / "checkpoint", tmp_path / "out")
    assert [file.name for file in out.glob("*.safetensors")] == ["weights.safetensors"]
    assert facts_of_folder(out).num_parameters == size
    AutoModelForCausalLM.from_pretrained(out)


def test_a_folder_with_strangers_alone_has_no_weights(tmp_path: Path) -> None:
    checkpoint(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="must hold its weights as safetensors, got none"):
        bundle(tmp_path / "checkpoint", tmp_path / "out")
    assert facts_of_folder(tmp_path / "checkpoint").num_parameters is None


def memory_alone(folder: Path) -> MemoryAugmentedForCausalLM:
    """Save a memory without the model in ``folder / "base"`` around which it is."""
    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = add_long_term_memory(base, LongTermMemoryConfig(segment_length=16, num_basis=16))
    model.save_pretrained(folder / "memory", memory_only=True)
    return model


def named(folder: Path, base: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))


def test_a_memory_whose_model_only_this_machine_has_is_no_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = memory_alone(tmp_path)
    for base in (str(tmp_path / "base"), str(tmp_path / "gone"), "../base"):
        named(tmp_path / "memory", base)
        assert main(["bundle", str(tmp_path / "memory"), str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"must be on the Hub, where others find it, got the folder {base!r}; load both" in error
        assert not (tmp_path / "out").exists()
    whole = bundle(model, tmp_path / "whole")
    assert "base_model" not in (whole / "README.md").read_text()
    assert sum(map(torch.Tensor.numel, load_file(whole / "model.safetensors").values())) == model.num_parameters()


def test_a_memory_of_a_model_on_the_hub_names_it(tmp_path: Path) -> None:
    model = memory_alone(tmp_path)
    named(tmp_path / "memory", "user/base")
    card = (bundle(tmp_path / "memory", tmp_path / "out") / "README.md").read_text()
    assert "base_model: user/base" in card
    assert "| made from | `user/base` |" in card
    memory = sum(parameter.numel() for parameter in model.long_term_memory.parameters())
    assert f"| parameters | {memory:,} |" in card
    assert "base_model: user/base" in write_card(tmp_path / "memory").read_text()
