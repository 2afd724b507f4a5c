"""Checkpoints in both published layouts, with random weights, are loaded, converted, and converted back."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, ReformerConfig

import hf_longmem
from hf_longmem import (
    ReformerLSHByteTokenizer,
    ReformerLSHConfig,
    ReformerLSHForCausalLM,
    ReformerLSHForMaskedLM,
    ReformerLSHForSequenceClassification,
    ReformerLSHModel,
)
from hf_longmem.cli.errors import CommandError
from hf_longmem.cli.main import main
from hf_longmem.hub.convert_reformer import from_reformer, to_reformer
from hf_longmem.models.reformer_lsh.reformer_checkpoints import ARCHITECTURES, weights_from_reformer

# The content of the published config.json files, with fields that the class does not know any more.
ENWIK8: dict[str, Any] = {
    "architectures": ["ReformerModelWithLMHead"],
    "attention_head_size": 128,
    "attention_probs_dropout_prob": 0.2,
    "attn_layers": ["local", "local", "lsh", "local"] * 3,
    "axial_norm_std": 1.0,
    "axial_pos_embds": True,
    "axial_pos_embds_dim": [256, 768],
    "axial_pos_shape": [128, 512],
    "chunk_size_feed_forward": 0,
    "chunk_size_lm_head": 0,
    "eos_token_id": 2,
    "feed_forward_size": 4096,
    "hash_seed": None,
    "hidden_act": "relu",
    "hidden_dropout_prob": 0.2,
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "is_decoder": True,
    "layer_norm_eps": 1e-12,
    "local_attention_probs_dropout_prob": 0.2,
    "local_attn_chunk_length": 128,
    "local_num_chunks_after": 0,
    "local_num_chunks_before": 1,
    "lsh_attention_probs_dropout_prob": 0.1,
    "lsh_attn_chunk_length": 256,
    "lsh_num_chunks_after": 0,
    "lsh_num_chunks_before": 1,
    "max_position_embeddings": 65536,
    "model_type": "reformer",
    "num_attention_heads": 8,
    "num_buckets": 512,
    "num_hashes": 4,
    "num_hidden_layers": 12,
    "output_past": True,
    "pad_token_id": 0,
    "sinusoidal_pos_embds": False,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 100}},
    "vocab_size": 258,
}
CRIME_AND_PUNISHMENT: dict[str, Any] = ENWIK8 | {
    "attention_head_size": 64,
    "attention_probs_dropout_prob": 0.1,
    "attn_layers": ["local", "lsh"] * 3,
    "axial_pos_embds_dim": [64, 192],
    "axial_pos_shape": [512, 1024],
    "feed_forward_size": 512,
    "hidden_dropout_prob": 0.05,
    "hidden_size": 256,
    "intermediate_size": 512,
    "local_attention_probs_dropout_prob": 0.05,
    "local_attn_chunk_length": 64,
    "lsh_attention_probs_dropout_prob": 0.0,
    "lsh_attn_chunk_length": 64,
    "max_position_embeddings": 524288,
    "num_attention_heads": 2,
    "num_buckets": [64, 128],
    "num_hashes": 1,
    "num_hidden_layers": 6,
    "vocab_size": 320,
}
# One period of its layers: 0.4 GB less, and every kind of tensor still in it.
ENWIK8_SHORT = ENWIK8 | {"attn_layers": ENWIK8["attn_layers"][:4], "num_hidden_layers": 4}
PUBLISHED = {"enwik8": ENWIK8, "crime and punishment": CRIME_AND_PUNISHMENT}
TINY = CRIME_AND_PUNISHMENT | {
    "hidden_size": 32,
    "axial_pos_embds_dim": [8, 24],
    "axial_pos_shape": [8, 32],
    "max_position_embeddings": 256,
    "num_buckets": [2, 4],
    "feed_forward_size": 48,
    "attention_head_size": 16,
    "vocab_size": 60,
}
Save = Callable[..., tuple[Path, Any]]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Save transformers' model of a published layout, every parameter random, with the published config.json."""

    def make(content: dict[str, Any] = TINY, name: str = "ReformerModelWithLMHead", **changes: Any) -> tuple[Path, Any]:
        shard = {"max_shard_size": changes.pop("max_shard_size")} if "max_shard_size" in changes else {}
        content = content | {"architectures": [name]} | changes
        torch.manual_seed(0)
        model = getattr(transformers, name)(ReformerConfig.from_dict(content)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.1)
        folder = tmp_path / "reformer"
        model.save_pretrained(folder, **shard)
        (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
        return folder, model

    return make


def ids(content: dict[str, Any], length: int) -> torch.Tensor:
    return torch.randint(2, content["vocab_size"], (2, length), generator=torch.Generator().manual_seed(1))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(change(tensors), file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_become_ours(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published), encoding="utf-8")
    config = ReformerLSHConfig.from_pretrained(tmp_path)
    for field, value in published.items():
        if field in ("model_type", "architectures", "chunk_size_lm_head") or not hasattr(config, field):
            continue
        if field == "hash_seed":
            value = 0
        ours = getattr(config, field)
        assert (list(ours) if isinstance(ours, tuple) else ours) == value, field
    assert (config.lsh_candidates, config.round_merge, config.local_candidates) == ("chunk", "sum", "chunk")
    assert (config.stream_merge, config.position_embedding_type) == ("concat", "axial")
    assert config.architectures == ["ReformerLSHForCausalLM"]
    assert config.num_positions == published["max_position_embeddings"]
    assert type(transformers.AutoConfig.from_pretrained(tmp_path)) is ReformerConfig


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_weight_of_the_published_models_has_its_place_and_shape(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]), encoding="utf-8")
    with torch.device("meta"):
        theirs = transformers.ReformerModelWithLMHead(ReformerConfig.from_pretrained(tmp_path))
        ours = ReformerLSHForCausalLM(ReformerLSHConfig.from_pretrained(tmp_path))
    renamed = {key: tensor.shape for key, tensor in weights_from_reformer(theirs.state_dict()).items()}
    assert renamed == {key: tensor.shape for key, tensor in ours.state_dict().items()}


@pytest.mark.parametrize(("content", "length"), [(ENWIK8_SHORT, 128), (CRIME_AND_PUNISHMENT, 64)])
@torch.no_grad()
def test_published_layouts_load_convert_and_go_back(
    save: Save, tmp_path: Path, content: dict[str, Any], length: int
) -> None:
    folder, theirs = save(content)
    # Within one chunk both attend to everything, whatever the rotations.
    batch = ids(content, length)
    expected = theirs(batch).logits
    loaded = ReformerLSHForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(loaded(batch).logits, expected, atol=1e-4, rtol=1e-4)
    assert loaded.config.name_or_path == str(folder)
    del loaded

    done = from_reformer(folder, tmp_path / "ours")
    assert done.architecture == "ReformerLSHForCausalLM"
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(ours) is ReformerLSHForCausalLM
    torch.testing.assert_close(ours(batch).logits, expected, atol=1e-4, rtol=1e-4)
    del ours

    assert to_reformer(tmp_path / "ours", tmp_path / "back").architecture == "ReformerModelWithLMHead"
    back, loading = transformers.ReformerModelWithLMHead.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    weights = theirs.state_dict()
    weights["lm_head.bias"] = weights["lm_head.decoder.bias"]
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, weights.pop(name)), name
    assert not weights
    changed = {"architectures", "transformers_version", "dtype", "hash_seed", "_name_or_path"}
    before, after = (model.config.to_dict() for model in (theirs, back))
    assert {k: v for k, v in after.items() if k not in changed} == {
        k: v for k, v in before.items() if k not in changed and k in after
    }
    for written in (tmp_path / "ours", tmp_path / "back"):
        assert not [path for path in written.iterdir() if path.suffix in (".bin", ".pt", ".pkl")]


@pytest.mark.parametrize(("theirs_name", "ours_name"), ARCHITECTURES.items())
@torch.no_grad()
def test_every_head_goes_there_and_back(save: Save, tmp_path: Path, theirs_name: str, ours_name: str) -> None:
    changes = {"is_decoder": theirs_name == "ReformerModelWithLMHead"}
    if theirs_name == "ReformerForSequenceClassification":
        changes |= {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    folder, theirs = save(name=theirs_name, **changes)
    assert from_reformer(folder, tmp_path / "ours").architecture == ours_name
    ours = getattr(hf_longmem, ours_name).from_pretrained(tmp_path / "ours")
    assert ours.config.num_labels == theirs.config.num_labels
    assert to_reformer(tmp_path / "ours", tmp_path / "back").architecture == theirs_name
    back = getattr(transformers, theirs_name).from_pretrained(tmp_path / "back")
    batch = ids(TINY, 50)
    outputs = 2 if theirs_name == "ReformerForQuestionAnswering" else 1
    for again, before, first in zip(*(model(batch)[:outputs] for model in (back, theirs, ours)), strict=True):
        assert torch.equal(again, before)
        torch.testing.assert_close(first, before, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_bias_that_counts_is_the_decoders_and_in_old_checkpoints_the_heads(save: Save, tmp_path: Path) -> None:
    folder, theirs = save()
    assert not torch.equal(theirs.lm_head.bias, theirs.lm_head.decoder.bias)
    assert torch.equal(ReformerLSHForCausalLM.from_pretrained(folder).lm_head.bias, theirs.lm_head.decoder.bias)
    old = {f"reformer.encoder.layers.1.attention.self_attention.{kind}mask_value_float32" for kind in ("", "self_")}

    def as_it_was(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del tensors["lm_head.decoder.bias"]
        return tensors | {name: torch.tensor(-1e5) for name in old}

    rewrite(folder, as_it_was)
    loaded, loading = ReformerLSHForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert torch.equal(loaded.lm_head.bias, theirs.lm_head.bias)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    rewrite(folder, lambda tensors: {name: t for name, t in tensors.items() if name != "lm_head.bias"})
    with pytest.raises(ValueError, match=r"must hold every weight of its model, got none for lm_head\.bias"):
        from_reformer(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_pickle_is_read_without_running_what_is_in_it(save: Save, tmp_path: Path) -> None:
    folder, theirs = save()
    (folder / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), folder / "pytorch_model.bin")
    loaded = ReformerLSHForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.model.embed_tokens.weight, theirs.reformer.embeddings.word_embeddings.weight)
    from_reformer(folder, tmp_path / "ours")
    assert [path.name for path in (tmp_path / "ours").glob("*model*")] == ["model.safetensors"]
    with pytest.raises(ValueError, match="weights_only must be True"):
        ReformerLSHForCausalLM.from_pretrained(folder, weights_only=False)

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    for content in (pickle.dumps({"lm_head.bias": Evil()}), b"nothing of the kind"):
        (folder / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(OSError, match=r"tensors only, got a pickle that is not; get a checkpoint in safetensors"):
            ReformerLSHForCausalLM.from_pretrained(folder)
    torch.save({"lm_head.bias": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="tensors only"):
        ReformerLSHForCausalLM.from_pretrained(folder)
    assert not (tmp_path / "ran").exists()


def test_damaged_or_infinite_weights_are_refused(save: Save) -> None:
    folder, _ = save()
    rewrite(folder, lambda tensors: tensors | {"lm_head.decoder.bias": torch.full((60,), torch.nan)})
    with pytest.raises(ValueError, match=r"must be finite, got NaN or infinity in lm_head\.bias"):
        ReformerLSHForCausalLM.from_pretrained(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(OSError, match="must be whole"):
        ReformerLSHForCausalLM.from_pretrained(folder)


@torch.no_grad()
def test_a_decoder_checkpoint_is_refused_by_the_masked_head_unless_told(save: Save) -> None:
    folder, theirs = save()
    with pytest.raises(ValueError, match=r"is_decoder=False, got True; pass is_decoder=False"):
        ReformerLSHForMaskedLM.from_pretrained(folder)
    loaded = ReformerLSHForMaskedLM.from_pretrained(folder, is_decoder=False)
    assert torch.equal(loaded.lm_head.weight, theirs.lm_head.decoder.weight)
    assert torch.isfinite(loaded(ids(TINY, 100)).logits).all()
    # As does the model without a head, which transformers refuses only in its masked class.
    assert ReformerLSHModel.from_pretrained(folder).config.is_decoder


@torch.no_grad()
def test_a_checkpoint_of_one_head_starts_another(save: Save) -> None:
    folder, theirs = save()
    model, loading = ReformerLSHForSequenceClassification.from_pretrained(
        folder, num_labels=4, classifier_dropout=0.3, output_loading_info=True
    )
    assert {name.split(".")[0] for name in loading["missing_keys"]} == {"dense", "score"}
    assert model(ids(TINY, 30)).logits.shape == (2, 4)
    assert model.config.classifier_dropout == 0.3
    assert torch.equal(model.model.norm.weight, theirs.reformer.encoder.layer_norm.weight)


@torch.no_grad()
def test_loading_takes_the_usual_arguments(save: Save) -> None:
    folder, theirs = save(max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    longer = ReformerLSHForCausalLM.from_pretrained(folder, axial_pos_shape=[16, 32], max_position_embeddings=512)
    assert longer(ids(TINY, 400)).logits.shape == (2, 400, 60)
    for ours, their in zip(
        longer.model.position_embeddings.weights, theirs.reformer.embeddings.position_embeddings.weights, strict=True
    ):
        assert torch.equal(ours[:8], their[:8])
    half = ReformerLSHForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert half.lm_head.weight.dtype == torch.bfloat16
    assert half.config.dtype == torch.bfloat16
    learned, _ = save(axial_pos_embds=False)
    assert ReformerLSHForCausalLM.from_pretrained(learned).config.position_embedding_type == "learned"
    model = ReformerLSHForCausalLM.from_pretrained(learned)
    assert model.generate(ids(TINY, 70), max_new_tokens=3, min_new_tokens=3).shape == (2, 73)


def test_generation_settings_come_along(save: Save, tmp_path: Path) -> None:
    folder, theirs = save()
    theirs.generation_config.update(do_sample=True, top_k=7, max_length=100)
    theirs.generation_config.save_pretrained(folder)
    loaded = ReformerLSHForCausalLM.from_pretrained(folder).generation_config
    from_reformer(folder, tmp_path / "ours")
    to_reformer(tmp_path / "ours", tmp_path / "back")
    written = [transformers.GenerationConfig.from_pretrained(tmp_path / name) for name in ("ours", "back")]
    for settings in (loaded, *written):
        assert (settings.do_sample, settings.top_k, settings.max_length, settings.eos_token_id) == (True, 7, 100, 2)


def test_positions_beyond_the_grid_of_a_checkpoint_do_not_exist(save: Save) -> None:
    folder, _ = save(max_position_embeddings=4096)
    model = ReformerLSHForCausalLM.from_pretrained(folder)
    assert model.config.max_position_embeddings == model.config.num_positions == 256
    with pytest.raises(ValueError, match="from 1 to 256 tokens"):
        model(ids(TINY, 257))


def test_tokenizers_come_along_and_bytes_where_enwik8_has_none(save: Save, tmp_path: Path) -> None:
    folder, _ = save()
    vocab = {"<pad>": 0, "</s>": 1, "<unk>": 2, "▁": 3, "a": 4, "b": 5, "▁a": 6}
    transformers.ReformerTokenizer(vocab=vocab, merges=[("▁", "a")]).save_pretrained(folder)
    assert from_reformer(folder, tmp_path / "ours").tokenizer == "ReformerTokenizer"
    loaded = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert loaded("ab a")["input_ids"] == [6, 5, 6]
    assert to_reformer(tmp_path / "ours", tmp_path / "back").tokenizer == "ReformerTokenizer"
    assert AutoTokenizer.from_pretrained(tmp_path / "back")("ab a")["input_ids"] == [6, 5, 6]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert from_reformer(folder, tmp_path / "without").tokenizer is None
    bytes_folder, _ = save(vocab_size=258)
    assert from_reformer(bytes_folder, tmp_path / "bytes").tokenizer == "ReformerLSHByteTokenizer"
    assert type(AutoTokenizer.from_pretrained(tmp_path / "bytes")) is ReformerLSHByteTokenizer
    to_reformer(tmp_path / "bytes", tmp_path / "bytes back")
    assert type(AutoTokenizer.from_pretrained(tmp_path / "bytes back")) is ReformerLSHByteTokenizer


def test_the_command_converts_both_ways(save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, theirs = save(vocab_size=258)
    ours, back = str(tmp_path / "ours"), str(tmp_path / "back")
    assert main(["convert", str(folder), ours]) == 0
    printed = capsys.readouterr().out.splitlines()
    count = f"{theirs.num_parameters() - 258:,}"
    assert printed[-2:] == [
        f"{ours}: ReformerLSHForCausalLM, {count} parameters",
        "tokenizer: ReformerLSHByteTokenizer",
    ]
    assert main(["convert", ours, back, "--to", "reformer"]) == 0
    assert "ReformerModelWithLMHead" in capsys.readouterr().out
    assert torch.equal(
        transformers.ReformerModelWithLMHead.from_pretrained(back).lm_head.decoder.weight, theirs.lm_head.decoder.weight
    )
    for arguments, message in (
        ([str(folder), ours], "the destination must be empty, got"),
        ([str(folder), str(folder / "config.json")], "the destination must be a folder, got"),
        ([ours, str(tmp_path / "new")], "must be a checkpoint of transformers' Reformer (model_type 'reformer'), got"),
        ([str(folder), str(tmp_path / "new"), "--to", "reformer"], "must be a checkpoint of reformer_lsh"),
        ([str(tmp_path), str(tmp_path / "new")], "config.json"),
        ([str(folder), str(tmp_path / "new"), "--to", "gpt2"], "invalid choice: 'gpt2'"),
        ([str(folder)], "DST"),
    ):
        capsys.readouterr()
        assert main(["convert", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("longmem convert: error: ")
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lsh_candidates": "bucket"}, "needs lsh_candidates='chunk', got 'bucket'"),
        ({"round_merge": "union"}, "needs round_merge='sum', got 'union'"),
        ({"stream_merge": "mean"}, "needs stream_merge='concat', got 'mean'"),
        ({"position_embedding_type": "rotary"}, "has learned positions, or axial ones of two axes, got rotary"),
        ({"axial_pos_shape": [2, 8, 16], "axial_pos_embds_dim": [4, 4, 8]}, "got 3 axes"),
    ],
)
def test_models_that_transformers_cannot_run_are_not_written_for_it(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    rules = {"lsh_candidates": "chunk", "round_merge": "sum", "local_candidates": "chunk", "stream_merge": "concat"}
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "attn_layers": ["lsh"], "vocab_size": 60}
    config = ReformerLSHConfig(**(sizes | {"max_position_embeddings": 256} | rules | changes))
    ReformerLSHForCausalLM(config).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=message):
        to_reformer(tmp_path / "ours", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_heads_that_transformers_does_not_have_are_refused(tmp_path: Path) -> None:
    rules = {"lsh_candidates": "chunk", "round_merge": "sum", "local_candidates": "chunk", "stream_merge": "concat"}
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "attn_layers": ["lsh"], "vocab_size": 60}
    config = ReformerLSHConfig(**sizes, **rules, is_decoder=False)
    hf_longmem.ReformerLSHForTokenClassification(config).save_pretrained(tmp_path / "tokens")
    with pytest.raises(ValueError, match=r"must be one of ReformerLSHModel, .*, got ReformerLSHForTokenClassification"):
        to_reformer(tmp_path / "tokens", tmp_path / "back")
    ReformerLSHForSequenceClassification(config).save_pretrained(tmp_path / "classes")
    with pytest.raises(ValueError, match="classifier_pooling='first' and classifier_activation='tanh', got 'mean' and"):
        to_reformer(tmp_path / "classes", tmp_path / "back")


def test_a_mistake_in_the_arguments_is_a_command_error() -> None:
    from hf_longmem.cli.convert import run

    with pytest.raises(CommandError, match="required"):
        run([])
