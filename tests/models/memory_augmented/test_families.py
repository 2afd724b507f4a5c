"""Eight families of language models: each takes a memory, trains, is saved and loaded both ways, and generates."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    MambaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_longmem
from hf_longmem import (
    LongTermMemoryConfig,
    MemoryAugmentedConfig,
    MemoryAugmentedForCausalLM,
    add_long_term_memory,
    memory_parameter_groups,
    set_trainable,
)
from hf_longmem.models.memory_augmented.attachment import find_decoder_layers

Make = Callable[..., Any]
FAMILIES = ("gpt2", "llama", "qwen3", "mistral", "gpt_neox", "opt", "phi", "gemma")
MEMORY: dict[str, Any] = {"segment_length": 16, "num_basis": 16, "basis_widths": (0.05, 0.1)}


def greedy(model: Any, ids: torch.Tensor, tokens: int = 4) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=tokens, do_sample=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_augment_train_save_load_both_ways_and_generate(
    base_model: Make, tokens: Make, family: str, tmp_path: Path
) -> None:
    base_model(family).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    names, weights = list(base.state_dict()), copy.deepcopy(base.state_dict())
    ids, short = tokens(2, 36), tokens(2, 10)
    with torch.no_grad():
        logits, continued = base(short).logits, greedy(base, short)

    model = add_long_term_memory(base, LongTermMemoryConfig(**MEMORY), train="memory")
    assert model.language_model is base
    assert list(base.state_dict()) == names
    with torch.no_grad():
        assert torch.equal(model(short).logits, logits)
        assert torch.equal(base(short).logits, logits)
    assert torch.equal(greedy(model, short), continued)

    optimizer = torch.optim.AdamW(memory_parameter_groups(model, 1e-3, memory_lr=3e-2))
    losses = []
    for _ in range(3):
        loss = model.train()(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert all(torch.equal(weights[name], now) for name, now in base.state_dict().items())

    model.eval()
    with torch.no_grad():
        trained = model(ids).logits
    for memory_only in (True, False):
        folder = tmp_path / str(memory_only)
        model.save_pretrained(folder, memory_only=memory_only)
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            assert memory_only == all(name.startswith("long_term_memory.") for name in file.keys())  # noqa: SIM118
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert type(loaded) is MemoryAugmentedForCausalLM
        assert not loaded.training
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, trained)
        assert torch.equal(greedy(loaded, ids), greedy(model, ids))


def test_any_base_config_survives_saving(base_model: Make, tmp_path: Path) -> None:
    model = add_long_term_memory(base_model("gemma"), LongTermMemoryConfig(**MEMORY, memory_layers=(1,)))
    model.config.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is MemoryAugmentedConfig
    assert type(config.base_config) is type(base_model("gemma").config)
    assert type(config.memory_config) is LongTermMemoryConfig
    assert config.memory_config.memory_layers == (1,)
    assert (config.layers_path, config.attention_name) == ("model.layers", "self_attn")
    built = AutoModelForCausalLM.from_config(config)
    assert {n: p.shape for n, p in built.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert not built.long_term_memory.layers["1"].o_proj.weight.any()


def test_a_memory_checkpoint_without_its_model_says_so(base_model: Make, tmp_path: Path) -> None:
    model = add_long_term_memory(base_model(), LongTermMemoryConfig(**MEMORY))
    with pytest.raises(ValueError, match="memory_only needs the name or path"):
        model.save_pretrained(tmp_path / "memory", memory_only=True)
    base_model().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = add_long_term_memory(base, LongTermMemoryConfig(**MEMORY))
    model.save_pretrained(tmp_path / "memory", memory_only=True)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(OSError, match="must be where it came from"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "memory")
    base_model(num_hidden_layers=3).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="must have num_hidden_layers=2"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "memory")


def test_a_memory_checkpoint_trusts_no_more_of_its_model_than_its_weights(base_model: Make, tmp_path: Path) -> None:
    base_model().save_pretrained(tmp_path / "base")
    model = add_long_term_memory(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LongTermMemoryConfig(**MEMORY)
    )
    model.save_pretrained(tmp_path / "memory", memory_only=True)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path / "memory", attn_implementation="eager")
    assert eager.language_model.config._attn_implementation == "eager"

    file = tmp_path / "memory" / "config.json"
    content = file.read_text()
    file.write_text(json.dumps(json.loads(content) | {"base_model_name_or_path": str(tmp_path / "memory")}))
    with pytest.raises(ValueError, match="must have no memory of its own"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "memory")
    file.write_text(content)

    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attn_implementation": "somebody/kernel"}))
    with pytest.raises(ValueError, match="must not be code to be fetched"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "memory")


def test_a_memory_of_resized_embeddings_does_not_load_with_others(base_model: Make, tmp_path: Path) -> None:
    base_model().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = add_long_term_memory(base, LongTermMemoryConfig(**MEMORY))
    model.resize_token_embeddings(70)
    model.save_pretrained(tmp_path / "memory", memory_only=True)
    with pytest.raises(ValueError, match="must have vocab_size=70"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "memory")


@pytest.mark.parametrize("variant", [None, "half"])
def test_a_memory_in_shards_loads_with_its_model(
    base_model: Make, tokens: Make, tmp_path: Path, variant: str | None
) -> None:
    base_model().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model, ids = add_long_term_memory(base, LongTermMemoryConfig(**MEMORY)), tokens(1, 40)
    model.save_pretrained(tmp_path / "memory", memory_only=True, max_shard_size="9KB", variant=variant)
    assert len(list((tmp_path / "memory").glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "memory", variant=variant)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("base_config", {"n_layer": 10**12}),
        ("base_config", {"n_layer": 2**17}),
        ("base_config", {"vocab_size": 10**12}),
        ("base_config", {"n_embd": 10**9}),
        ("memory_config", {"num_attention_heads": 10**12}),
        ("memory_config", {"num_attention_heads": 2**20, "attention_head_size": 2**20}),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_allocated(
    base_model: Make, tmp_path: Path, part: str, changes: dict[str, int]
) -> None:
    add_long_term_memory(base_model(), LongTermMemoryConfig(**MEMORY)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {part: content[part] | changes}))
    for load in (AutoConfig, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=r"must have at most .* (layers|parameters)"):
            load.from_pretrained(tmp_path)


def test_a_damaged_memory_checkpoint_is_refused(base_model: Make, tmp_path: Path) -> None:
    base_model().save_pretrained(tmp_path / "base")
    model = add_long_term_memory(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LongTermMemoryConfig(**MEMORY)
    )
    model.save_pretrained(tmp_path / "memory", memory_only=True)
    file = tmp_path / "memory" / "model.safetensors"
    weights, whole = load_file(file), file.read_bytes()
    broken = weights | {"long_term_memory.layers.0.o_proj.weight": torch.full((32, 32), torch.nan)}
    for name, tensors, message in (
        ("not finite", broken, "must be finite"),
        ("incomplete", {n: t for n, t in weights.items() if "o_proj" not in n}, "must be that of its config"),
    ):
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path / "memory")
        assert name
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OSError, match="must be whole"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "memory")


def test_weights_of_the_given_model_are_never_initialised_anew(base_model: Make) -> None:
    base = base_model("llama")
    # As an adapter does: a module that transformers has never seen.
    base.model.layers[0].self_attn.q_proj.added = nn.Linear(4, 4)
    before = copy.deepcopy(base.state_dict())
    add_long_term_memory(base, LongTermMemoryConfig(**MEMORY))
    assert all(torch.equal(before[name], weight) for name, weight in base.state_dict().items())


def test_what_is_trained(base_model: Make) -> None:
    for train, last_n, base_layers in (
        ("memory", 1, []),
        ("last_n", 1, [1]),
        ("last_n", 2, [0, 1]),
        ("all", 1, [0, 1]),
    ):
        model = add_long_term_memory(base_model(), LongTermMemoryConfig(**MEMORY), train=train, last_n=last_n)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert all(p.requires_grad for p in model.long_term_memory.parameters())
        layers = {int(name.split(".h.")[1].split(".")[0]) for name in trained if ".h." in name}
        assert layers == set(base_layers)
        assert ("language_model.transformer.wte.weight" in trained) == (train == "all")
    with pytest.raises(ValueError, match="train must be one of"):
        set_trainable(model, "some")
    with pytest.raises(ValueError, match="last_n must be from 1 to the model's 2 layers"):
        set_trainable(model, "last_n", last_n=3)


def test_optimizer_groups_hold_every_trained_parameter_once(base_model: Make) -> None:
    model = add_long_term_memory(base_model(), LongTermMemoryConfig(**MEMORY, memory_gate="convolution"), train="all")
    memory, decayed, plain = memory_parameter_groups(model, 1e-4, memory_lr=1e-2, weight_decay=0.1)
    assert [g["lr"] for g in (memory, decayed, plain)] == [1e-2, 1e-4, 1e-4]
    assert [g["weight_decay"] for g in (memory, decayed, plain)] == [0, 0.1, 0]
    together = [id(p) for group in (memory, decayed, plain) for p in group["params"]]
    assert sorted(together) == sorted(id(p) for p in model.parameters())
    assert {id(p) for p in memory["params"]} == {id(p) for p in model.long_term_memory.parameters()}
    assert all(p.dim() == 1 for p in plain["params"])
    (only,) = memory_parameter_groups(add_long_term_memory(base_model(), LongTermMemoryConfig(**MEMORY)), 1e-3)
    assert only["lr"] == 1e-3
    with pytest.raises(ValueError, match="some parameters must be trainable"):
        memory_parameter_groups(model.requires_grad_(False), 1e-3)


def test_models_that_do_not_fit_are_refused_in_plain_words(base_model: Make) -> None:
    memory = LongTermMemoryConfig(**MEMORY)
    sizes = {"vocab_size": 30, "num_hidden_layers": 2, "hidden_size": 16}
    mamba = AutoModelForCausalLM.from_config(MambaConfig(**sizes, state_size=4))
    with pytest.raises(ValueError, match=r"one list of decoder layers, .* a MambaForCausalLM without one"):
        add_long_term_memory(mamba, memory)
    t5 = T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    with pytest.raises(ValueError, match="must be a decoder alone"):
        add_long_term_memory(T5ForConditionalGeneration(t5), memory)
    with pytest.raises(ValueError, match="must be a causal language model"):
        add_long_term_memory(GPT2Model(GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=30)), memory)
    with pytest.raises(ValueError, match="segment_length must be at most the model's 32 positions, got 64"):
        add_long_term_memory(base_model(), LongTermMemoryConfig(**(MEMORY | {"segment_length": 64})))
    with pytest.raises(ValueError, match="use window_length=16"):
        add_long_term_memory(base_model(), LongTermMemoryConfig(**MEMORY, window_length=17))
    with pytest.raises(ValueError, match=r"layers with attention, \[0, 1\], got \[2\]"):
        add_long_term_memory(base_model(), LongTermMemoryConfig(**MEMORY, memory_layers=(2,)))
    with pytest.raises(ValueError, match=r"'transformer.layers', which is not there"):
        add_long_term_memory(base_model(), memory, layers="transformer.layers")
    with pytest.raises(ValueError, match=r"must have one attention module, got none; .* ln_1, attn, ln_2, mlp"):
        add_long_term_memory(base_model(), memory, layers="transformer.h", attention="self_attn")
    with pytest.raises(ValueError, match="can have one long-term memory"):
        add_long_term_memory(add_long_term_memory(base_model(), memory), memory)
    base = base_model()
    add_long_term_memory(base, memory)
    with pytest.raises(ValueError, match="can have one long-term memory"):
        add_long_term_memory(base, memory)


class Twins(nn.Module):
    """Two lists of layers, of which only a name can tell which is meant."""

    def __init__(self, base: GPT2LMHeadModel) -> None:
        super().__init__()
        self.first, self.second = base.transformer.h, copy.deepcopy(base.transformer.h)


def test_a_path_decides_where_structure_cannot(base_model: Make) -> None:
    twins = Twins(base_model())
    with pytest.raises(ValueError, match="first and second; give the list's name"):
        find_decoder_layers(twins)
    found = find_decoder_layers(twins, "second")
    assert found.layers[0] is twins.second[0]
    assert (found.attention_name, found.with_attention) == ("attn", (0, 1))


def test_a_model_that_takes_neither_positions_nor_other_arguments_works_too(tokens: Make) -> None:
    torch.manual_seed(0)
    bloom = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=2)).eval()
    model, ids = add_long_term_memory(bloom, LongTermMemoryConfig(**MEMORY, memory_zero_init=False)), tokens(2, 40)
    assert model.config.memory.window_length == 16
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    with torch.no_grad():
        padded, alone = model(ids, attention_mask=mask).logits[0, 13:], model(ids[:1, 13:]).logits[0]
    torch.testing.assert_close(padded, alone, atol=2e-5, rtol=2e-5)
    # Nor do its layers hand on what a recomputation would need.
    model.train().activation_checkpointing_enable()
    with pytest.raises(ValueError, match="layers that hand their keyword arguments on"):
        model(ids)


def test_resized_embeddings_are_saved_and_loaded(base_model: Make, tokens: Make, tmp_path: Path) -> None:
    model = add_long_term_memory(base_model("llama"), LongTermMemoryConfig(**MEMORY))
    model.resize_token_embeddings(70)
    assert model.config.vocab_size == 70
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["base_config"]["vocab_size"] == 70
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(tokens(1, 40)).logits, model(tokens(1, 40)).logits)


def test_the_family_is_public() -> None:
    assert isinstance(AutoConfig.for_model("memory_augmented"), MemoryAugmentedConfig)
    for name in ("LongTermMemoryConfig", "MemoryAugmentedConfig", "MemoryAugmentedForCausalLM", "add_long_term_memory"):
        assert name in hf_longmem.__all__
        assert getattr(hf_longmem, name)
