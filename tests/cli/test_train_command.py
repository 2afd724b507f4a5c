"""`longmem train` does the whole job on a small scale, and refuses what it must without touching a file."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, GPT2Config, GPT2LMHeadModel

from hf_longmem import LongTermMemoryConfig, add_long_term_memory
from hf_longmem.cli import inputs
from hf_longmem.cli import train as train_command
from hf_longmem.cli.errors import CommandError
from hf_longmem.cli.main import main

TINY = shlex.split(
    "--hidden_size 16 --num_attention_heads 2 --attn_layers local lsh --num_hashes 2 --sequence_length 128 "
    "--lsh_attn_chunk_length 16 --local_attn_chunk_length 16 --max_new_tokens 3 --use_cpu --logging_steps 1000"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"Document {number}. " * (60 + number), encoding="utf-8")
    return ["--text", *(str(path) for path in sorted(folder.iterdir()))]


@pytest.fixture(scope="module")
def trained(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trained")
    assert main(["train", *TINY, *corpus, "--num_train_epochs", "4", "--output_dir", str(output)]) == 0
    return output


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("longmem train: error: ")
    return error.removeprefix("longmem train: error: ")


def test_training_lowers_the_held_out_loss_and_reports_it(
    corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "folder"
    assert main(["train", *TINY, *corpus, "--num_train_epochs", "4", "--output_dir", str(output)]) == 0
    printed = capsys.readouterr().out
    before, after = map(float, re.search(r"bits per byte: ([\d.]+) before, ([\d.]+) after", printed).groups())
    assert 8 < before < 9
    assert after < before - 1
    results = json.loads((output / "all_results.json").read_text(encoding="utf-8"))
    assert (round(results["bits_before"], 3), round(results["bits"], 3)) == (before, after)
    assert results["tokens_per_second"] > 0
    assert results["peak_memory"] > 2**26
    assert "4 documents" not in printed
    assert "training text: 3 documents" in printed
    assert "held-out text: 1 documents" in printed
    assert "--- continuation" in printed


def test_what_is_saved_is_what_the_auto_classes_load(trained: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert model.config.model_type == "reformer_lsh"
    assert model.config.max_position_embeddings == 128
    assert len(tokenizer) == model.config.vocab_size
    assert (trained / "model.safetensors").is_file()
    logits = model(**tokenizer("Document 1. Doc", return_tensors="pt", add_special_tokens=False)).logits
    assert logits.isfinite().all()


def test_the_same_seed_trains_the_same_model(corpus: list[str], trained: Path, tmp_path: Path) -> None:
    assert main(["train", *TINY, *corpus, "--num_train_epochs", "4", "--output_dir", str(tmp_path / "again")]) == 0
    first, second = (load_file(folder / "model.safetensors") for folder in (trained, tmp_path / "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_training_goes_on_from_a_checkpoint_with_its_own_settings(
    corpus: list[str], trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--sequence_length", "100", "--max_new_tokens", "0", "--use_cpu", "--num_hashes", "3", *corpus]
    output = tmp_path / "on"
    assert main(["train", "--model_name_or_path", str(trained), *arguments, "--output_dir", str(output)]) == 0
    before = float(re.search(r"before training: ([\d.]+)", capsys.readouterr().out).group(1))
    assert before < 7
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    assert (config["hidden_size"], config["num_hashes"]) == (16, 3)


def test_evaluation_alone_writes_nothing(
    corpus: list[str], trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(trained)
    settings = "--sequence_length 128 --no_do_train --use_cpu --prompt Docu --max_new_tokens 2"
    paths = ["--model_name_or_path", str(trained), *corpus, "--output_dir", str(trained)]
    assert main(["train", *shlex.split(settings), *paths]) == 0
    printed = capsys.readouterr().out
    expected = json.loads((trained / "all_results.json").read_text(encoding="utf-8"))["bits"]
    assert f"{expected:.3f} after" in printed
    assert "--- prompt\nDocu\n" in printed
    assert contents(trained) == before


def test_an_output_directory_with_files_is_refused_and_left_as_it_is(
    corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").write_text("precious")
    error = fails([*TINY, *corpus, "--output_dir", str(tmp_path)], capsys)
    assert error.startswith(f"output_dir must be empty, got {tmp_path} with files in it; ")
    assert contents(tmp_path) == {"model.safetensors": b"precious"}
    error = fails([*TINY, *corpus, "--output_dir", str(tmp_path / "model.safetensors")], capsys)
    assert error.startswith("output_dir must be a directory")


def test_overwrite_writes_into_a_directory_and_keeps_other_files(corpus: list[str], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["train", *TINY, *corpus, "--max_steps", "1", "--overwrite", "--output_dir", str(tmp_path)]) == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "model.safetensors").is_file()


def test_a_run_resumes_from_its_last_checkpoint(
    corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    steps = [*TINY, *corpus, "--lr_scheduler_type", "constant", "--warmup_steps", "0", "--save_steps", "3"]
    assert main(["train", *steps, "--max_steps", "6", "--output_dir", str(whole)]) == 0
    assert main(["train", *steps, "--max_steps", "3", "--output_dir", str(parts)]) == 0
    resume = ["--resume_from_checkpoint", "true", "--max_steps", "6", "--output_dir", str(parts)]
    assert main(["train", *steps, *resume]) == 0
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, parts))
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)
    capsys.readouterr()
    gone = [*TINY, *corpus, "--resume_from_checkpoint", str(tmp_path / "gone")]
    assert "must be a checkpoint folder" in fails(gone, capsys)
    none = [*TINY, *corpus, "--resume_from_checkpoint", "true", "--output_dir", str(tmp_path / "none")]
    assert "must hold a checkpoint to resume" in fails(none, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--num_buckets 63", "num_buckets must be even, got 63; use 62 or 64"),
        ("--hidden_size 17", "hidden_size must be divisible by num_attention_heads"),
        ("--attn_layers local global", "attn_layers may hold only 'lsh' and 'local', got 'global'"),
        ("--max_position_embeddings 64", "sequence_length must not exceed max_position_embeddings, got 128 > 64"),
        ("--config_overrides vocab_size=9", "vocab_size must cover the tokenizer, got 9 < 384"),
        ("--config_overrides n_hashes=9", "reformer_lsh models have no such setting, got n_hashes"),
        ("--config_overrides hidden_act=nope", "hidden_act must be an activation"),
        ("--model_type reformer_hsl", "model_type must be known to transformers, got reformer_hsl"),
        ("--sequence_length 0", "sequence_length must be at least 1, got 0"),
        ("--max_train_samples 0", "max_train_samples must be at least 1, got 0"),
        ("--dataset some/name", "the text comes from one place, got text and dataset"),
        ("--held_out_fraction 1", "held_out_fraction must be in (0, 1), got 1.0"),
        ("--per_device_train_batch_size 0", "per_device_train_batch_size must be at least 1, got 0"),
        ("--per_device_eval_batch_size 0", "per_device_eval_batch_size must be at least 1, got 0"),
        ("--gradient_accumulation_steps 0", "gradient_accumulation_steps must be at least 1, got 0"),
        ("--learning_rate -1", "learning_rate must be at least 0, got -1.0"),
        ("--adam_beta2 2", "Invalid beta parameter at index 1: 2.0"),
        ("--lr_scheduler_type cosine_with_min_lr", "One of min_lr or min_lr_rate should be set"),
        ("--seed -1", "seed must be from 0 to 4294967295, got -1"),
        ("--report_to nobody", "nobody is not supported"),
        ("--fsdp full_shard", "fsdp only works in distributed training"),
        ("--max_new_tokens 128", "max_new_tokens must fit max_position_embeddings, 128, got 0 and 128"),
    ],
)
def test_impossible_settings_are_one_clear_line(
    arguments: str, message: str, corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert message in fails([*TINY, *corpus, *arguments.split(), "--output_dir", str(output)], capsys)
    assert contents(output) == {}


def test_an_output_directory_that_cannot_be_made_is_one_clear_line(
    corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert "file" in fails([*TINY, *corpus, "--output_dir", str(tmp_path / "file" / "out")], capsys)


def test_a_metric_that_nobody_computes_is_one_clear_line(
    corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["eval_strategy", "steps", "eval_steps", "1", "save_strategy", "best", "metric_for_best_model", "bits"]
    often = [f"--{name}={value}" for name, value in zip(settings[::2], settings[1::2], strict=True)]
    error = fails([*TINY, *corpus, *often, "--disable_tqdm=true", "--output_dir", str(tmp_path / "out")], capsys)
    assert "'eval_bits', which is not found" in error
    assert "eval_bits_per_byte" in error


def test_text_that_cannot_be_read_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"Fl\xfcsse")
    output = ["--output_dir", str(tmp_path / "out")]
    for name, reason in (("gone", "got no such file"), ("empty", "got an empty file"), ("latin", "must be UTF-8")):
        assert reason in fails([*TINY, "--text", str(tmp_path / f"{name}.txt"), *output], capsys)
    assert "no-such-set" in fails([*TINY, "--dataset", str(tmp_path / "no-such-set"), *output], capsys)
    (tmp_path / "tiny.txt").write_text("hello world, yes")
    tiny = ["--text", str(tmp_path / "tiny.txt"), *output]
    memory = shlex.split("--model_type infinite_former --hidden_size 16 --num_attention_heads 2 --use_cpu")
    for settings in (TINY, [*TINY, "--held_out_fraction", "0.03"], memory):
        assert fails([*settings, *tiny], capsys).startswith(
            "the held-out text must have two tokens one after another, to predict the second, got fewer; give more text"
        )
    assert fails([*TINY, *tiny, "--held_out_fraction", "0.99"], capsys).startswith("the training text must have two")
    assert not (tmp_path / "out").exists()


def damaged(trained: Path, folder: Path, damage: str) -> Path:
    folder.mkdir()
    for path in trained.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    weights = folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "missing":
        weights.unlink()
    else:
        tensors = load_file(weights)
        tensors["lm_head.weight"][3, 4] = float("nan")
        save_file(tensors, weights, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("damage", ["truncated", "missing", "nan"])
def test_a_damaged_checkpoint_is_one_clear_line(
    damage: str, corpus: list[str], trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = damaged(trained, tmp_path / "damaged", damage)
    before = contents(folder)
    output = tmp_path / "out"
    arguments = ["--model_name_or_path", str(folder), "--sequence_length", "128", *corpus, "--output_dir", str(output)]
    error = fails(arguments, capsys)
    assert str(folder) in error
    assert {"truncated": "incomplete", "missing": "model.safetensors", "nan": "lm_head.weight"}[damage] in error
    assert contents(folder) == before
    assert contents(output) == {}


def test_a_saved_model_with_another_loss_ends_the_command(
    corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = AutoModelForCausalLM.from_pretrained

    def load_altered(*arguments: object, **options: object) -> object:
        model = load(*arguments, **options)
        torch.nn.init.normal_(model.lm_head.weight)
        return model

    monkeypatch.setattr(train_command.AutoModelForCausalLM, "from_pretrained", load_altered)
    assert main(["train", *TINY, *corpus, "--max_steps", "1", "--output_dir", str(tmp_path / "out")]) == 1
    assert "has another loss" in capsys.readouterr().err


def test_a_diverged_run_ends_the_command(corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diverging = ["--learning_rate", "1e30", "--warmup_steps", "0", "--max_grad_norm", "0", "--max_steps", "4"]
    assert main(["train", *TINY, *corpus, *diverging, "--output_dir", str(tmp_path / "out")]) == 1
    assert "not finite" in capsys.readouterr().err


def test_another_architecture_of_transformers_trains_by_the_same_command(corpus: list[str], tmp_path: Path) -> None:
    settings = (
        "--model_type gpt2 --hidden_size 16 --num_attention_heads 2 --config_overrides n_layer=1 "
        "--sequence_length 128 --max_steps 1 --max_new_tokens 2 --use_cpu"
    )
    assert main(["train", *shlex.split(settings), *corpus, "--output_dir", str(tmp_path / "out")]) == 0


def test_a_memorys_settings_are_its_checkpoints(
    corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = GPT2LMHeadModel(GPT2Config(vocab_size=384, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    add_long_term_memory(base, LongTermMemoryConfig(segment_length=8, num_basis=8)).save_pretrained(tmp_path / "memory")
    ByT5Tokenizer().save_pretrained(tmp_path / "memory")
    common = ["--model_name_or_path", str(tmp_path / "memory"), *corpus, "--output_dir", str(tmp_path / "out")]
    for name, value in (
        ("segment_length", "16"),
        ("num_basis", "16"),
        ("memory_decay", "uniform"),
        ("sticky_memories", "true"),
        ("hidden_size", "32"),
        ("num_hidden_layers", "2"),
    ):
        error = fails([*common, f"--{name}", value], capsys)
        assert error.endswith(
            "a memory_augmented checkpoint fixes the sizes of its model and the settings of its memory, "
            f"got {name}; leave it out, or make another with add_long_term_memory"
        )
    assert "no such setting, got num_hashes" in fails([*common, "--num_hashes", "2"], capsys)


def prompted(tokens: list[int], positions: int, **given: Any) -> tuple[list[int], int]:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=384, n_embd=8, n_layer=1, n_head=1, n_positions=positions))
    found, count = inputs.prompt(inputs.RunArguments(**given), ByT5Tokenizer(), model, tokens)
    return found[0].tolist(), count


@pytest.mark.parametrize("positions", [1, 2, 63, 64, 128, 399, 4096])
def test_by_default_the_prompt_and_what_follows_fit(positions: int) -> None:
    tokens, count = prompted([5] * 5000, positions)
    assert 1 <= len(tokens) <= 256
    assert len(tokens) + count <= positions
    assert count == min(200, positions // 2)
    if positions > 2:
        assert prompted([5] * 5000, positions, prompt="ab")[1] == min(200, positions - 2)
    with pytest.raises(CommandError, match=f"must fit max_position_embeddings, {positions}, got 0 and {positions}"):
        prompted([5] * 5000, positions, max_new_tokens=positions)
    with pytest.raises(CommandError, match=f"got {positions} and 1"):
        prompted([], positions, prompt="a" * positions)


def test_the_prompt_ends_before_the_mark_of_a_documents_end() -> None:
    end = ByT5Tokenizer().eos_token_id
    for tokens in ([7, 8, end, 9], [end, end, 7, 8, end], [7, 8]):
        assert prompted(tokens, 64, max_new_tokens=3) == ([7, 8], 3)
