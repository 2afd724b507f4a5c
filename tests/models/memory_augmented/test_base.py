"""The model around which a memory is: left alone by what fails, and known again when a memory is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_longmem import LongTermMemoryConfig, MemoryAugmentedForCausalLM, add_long_term_memory
from hf_longmem.models.memory_augmented.augment import set_trainable
from hf_longmem.models.memory_augmented.base_sample import differing_weight, sample_weights

Make = Callable[..., Any]
MEMORY: dict[str, Any] = {"segment_length": 16, "num_basis": 16, "basis_widths": (0.05, 0.1), "memory_zero_init": False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": "memorry"}, "train must be one of"),
        ({"train": "last_n", "last_n": 3}, "last_n must be from 1 to the model's 2 layers, got 3"),
        ({"train": "last_n", "last_n": 0}, "last_n must be from 1"),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(base_model: Make, arguments: dict[str, Any], message: str) -> None:
    base = base_model()
    with pytest.raises(ValueError, match=message):
        add_long_term_memory(base, LongTermMemoryConfig(**MEMORY), **arguments)
    assert all(parameter.requires_grad for parameter in base.parameters())
    model = add_long_term_memory(base, LongTermMemoryConfig(**MEMORY), train="all")
    with pytest.raises(ValueError, match=message):
        set_trainable(model, **arguments)
    assert all(parameter.requires_grad for parameter in base.parameters())


def changed(base: PreTrainedModel) -> PreTrainedModel:
    """As after a step of training with a small rate: each weight by little."""
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(1 + 1e-6)
    return base


def test_a_memory_does_not_load_around_other_weights(base_model: Make, tokens: Make, tmp_path: Path) -> None:
    folder, memory = tmp_path / "base", tmp_path / "memory"
    base_model(seed=0).save_pretrained(folder)
    base_model(seed=1).save_pretrained(folder / "sub")

    def load(**arguments: Any) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folder, **arguments)

    for base in (load(subfolder="sub"), changed(load())):
        model = add_long_term_memory(base, LongTermMemoryConfig(**MEMORY))
        model.save_pretrained(memory, memory_only=True)
        with pytest.raises(ValueError, match=r"must have the weights of the model .* got others in transformer\."):
            AutoModelForCausalLM.from_pretrained(memory)
        # The way out that the message names.
        base.save_pretrained(tmp_path / "own")
        config = json.loads((memory / "config.json").read_text())
        (memory / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(tmp_path / "own")}))
        with torch.no_grad():
            again = AutoModelForCausalLM.from_pretrained(memory)
            assert torch.equal(again(tokens(1, 40)).logits, model.eval()(tokens(1, 40)).logits)


def test_a_memory_from_before_weights_were_compared_loads(base_model: Make, tmp_path: Path) -> None:
    base_model().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    add_long_term_memory(base, LongTermMemoryConfig(**MEMORY)).save_pretrained(tmp_path / "memory", memory_only=True)
    file = tmp_path / "memory" / "config.json"
    config = json.loads(file.read_text())
    del config["base_weights"]
    file.write_text(json.dumps(config))
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "memory")) is MemoryAugmentedForCausalLM
    file.write_text(json.dumps(config | {"base_weights": {"transformer.wte.weight": {"dtype": "load"}}}))
    with pytest.raises(ValueError, match="base_weights must be values of weights by name"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "memory")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16, torch.float16])
def test_another_precision_is_the_same_model(
    base_model: Make, tmp_path: Path, stored: torch.dtype, loaded: torch.dtype
) -> None:
    base_model().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=stored)
    add_long_term_memory(base, LongTermMemoryConfig(**MEMORY)).save_pretrained(tmp_path / "memory", memory_only=True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "memory", dtype=loaded)
    assert again.language_model.dtype == loaded


def test_a_sample_is_small_and_looks_everywhere(base_model: Make) -> None:
    base = base_model("llama")
    sample = sample_weights(base)
    assert len(sample) == 8
    assert {len(entry["values"]) for entry in sample.values()} == {4}
    assert differing_weight(json.loads(json.dumps(sample)), base) is None
    for name in sample:
        other = base_model("llama")
        with torch.no_grad():
            other.get_parameter(name).add_(1e-3)
        assert differing_weight(sample, other) == name
    assert sample_weights(base.to("meta")) == {}
    assert differing_weight(sample, base) is None
