"""The ways of loading that users try give the right model, or transformers' own message."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import causal_lm
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_longmem.models.auto import model_classes

FAMILIES = ("reformer_lsh", "infinite_former")
IDS = torch.arange(2, 39)[None]


def heads(family: str) -> list[type[PreTrainedModel]]:
    classes = [place for auto, place in model_classes(family).items() if auto != "AutoConfig"]
    return [getattr(importlib.import_module(module), name) for module, name in classes]


HEADS = [pytest.param(head, id=head.__name__) for family in FAMILIES for head in heads(family)]


def make(head: type[PreTrainedModel], **changes: Any) -> PreTrainedModel:
    """A model of any head, whose weights are those of no initialisation."""
    family = "reformer_lsh" if "Reformer" in head.__name__ else "infinite_former"
    config = causal_lm(family, **changes).config
    if "MaskedLM" in head.__name__:
        config = type(config)(**{**config.to_diff_dict(), "is_decoder": False, "lsh_num_chunks_after": 1})
    torch.manual_seed(1)
    model = head(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def output(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS)[0]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"device_map": "auto"},
        {"device_map": {"": "cpu"}},
        {"low_cpu_mem_usage": True},
        {"dtype": "auto"},
        {"attn_implementation": "eager"},
    ],
    ids=str,
)
def test_an_option_that_changes_no_number_changes_none(
    head: type[PreTrainedModel], options: dict[str, Any], tmp_path: Path
) -> None:
    model = make(head)
    model.save_pretrained(tmp_path)
    loaded = head.from_pretrained(tmp_path, **options)
    assert torch.equal(output(loaded), output(model))
    buffers = dict(loaded.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("size", ["3KB", "20KB"])
def test_shards_hold_the_same_model(head: type[PreTrainedModel], size: str, tmp_path: Path) -> None:
    model = make(head)
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded, report = head.from_pretrained(tmp_path, output_loading_info=True, device_map="auto")
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(output(loaded), output(model))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_of_the_width_gives_nearly_the_same(
    head: type[PreTrainedModel], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make(head)
    model.save_pretrained(tmp_path)
    loaded = head.from_pretrained(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    near = output(loaded)
    assert near.dtype == dtype
    expected = output(model)
    # The same weights, rounded, computed in full width: what is left is the arithmetic's error. Where it moves a vector
    # over the border of two buckets, that token attends to others: hence nine of ten numbers.
    rounded = head.from_pretrained(tmp_path, dtype=dtype).float()
    error = (near.float() - output(rounded)).abs().flatten()
    assert error.quantile(0.9) < 0.02 * expected.abs().max()
    for name, buffer in loaded.named_buffers():
        assert bool(torch.isfinite(buffer).all()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_saved_in_bfloat16_comes_back_in_it_and_generates(family: str, tmp_path: Path) -> None:
    causal_lm(family).to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    settings = {"max_new_tokens": 8, "do_sample": False}
    assert loaded.generate(IDS, **settings).shape == (1, IDS.shape[1] + 8)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("reformer_lsh", {}),
        ("infinite_former", {}),
        ("infinite_former", {"position_embedding_type": "relative", "memory_gate": "convolution"}),
    ],
    ids=str,
)
def test_linear_layers_in_eight_bits_give_nearly_the_same(family: str, changes: dict[str, Any]) -> None:
    model = causal_lm(family, **changes).eval()
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    assert "DynamicQuantizedLinear" in repr(quantised.model.layers)
    expected = output(model)
    error = (output(quantised) - expected).abs().flatten()
    assert error.quantile(0.9) < 0.05 * expected.abs().max()
    assert quantised.generate(IDS, max_new_tokens=8, do_sample=False).shape == (1, IDS.shape[1] + 8)


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_embeddings_stay_tied(family: str, tmp_path: Path) -> None:
    model = causal_lm(family, tie_word_embeddings=True).eval()
    model.save_pretrained(tmp_path, max_shard_size="3KB")
    for options in ({}, {"device_map": "auto"}, {"low_cpu_mem_usage": True}):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
        assert torch.equal(output(loaded), output(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_on_disk_are_read_when_they_are_needed(family: str, tmp_path: Path) -> None:
    model = causal_lm(family).eval()
    model.save_pretrained(tmp_path / "model")
    device_map = {"model": "cpu", "lm_head": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    # A layer whose weights come and go is called as it is, where others are merged with the next: other roundings.
    torch.testing.assert_close(output(loaded), output(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_what_is_missing_is_reported_and_initialised(head: type[PreTrainedModel], tmp_path: Path) -> None:
    model = make(head)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    gone = [name for name in weights if "layers.1." in name]
    assert gone
    kept = {name: tensor for name, tensor in weights.items() if name not in gone} | {"surprise": torch.ones(2)}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for options in ({}, {"device_map": "auto"}, {"dtype": torch.bfloat16}):
        loaded, report = head.from_pretrained(tmp_path, output_loading_info=True, **options)
        assert sorted(report["missing_keys"]) == sorted(gone)
        assert list(report["unexpected_keys"]) == ["surprise"]
        assert bool(torch.isfinite(output(loaded)).all())
        state = loaded.state_dict()
        for name in gone:
            # A norm's or bias's start is a constant; what is drawn is neither zero nor as large as unset memory.
            assert float(state[name].float().abs().max()) < 10, name
        for name in weights.keys() - set(gone):
            torch.testing.assert_close(state[name].float(), weights[name], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_shape_is_refused_unless_told(family: str, tmp_path: Path) -> None:
    causal_lm(family).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"lm_head.weight|ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(tmp_path, vocab_size=50)
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, vocab_size=50, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert {name for name, *_ in report["mismatched_keys"]} >= {"lm_head.weight"}
    assert bool(torch.isfinite(output(loaded)).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_or_damaged_shard_is_named(family: str, tmp_path: Path) -> None:
    causal_lm(family).save_pretrained(tmp_path, max_shard_size="20KB")
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    content = last.read_bytes()
    last.write_bytes(content[:-3])
    with pytest.raises(OSError, match="must be whole, got a damaged one"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    last.unlink()
    with pytest.raises((OSError, ValueError), match=last.name):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for content in (index.read_text()[:-9], "[]", "{}", ""):
        index.write_text(content)
        with pytest.raises(OSError, match=r"index.json must be whole, got a damaged one .*; download or copy it again"):
            AutoModelForCausalLM.from_pretrained(tmp_path)
