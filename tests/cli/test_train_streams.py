"""`longmem train` with a model that has a memory: documents are read as streams."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longmem import streaming_perplexity
from hf_longmem.cli.arguments import parse
from hf_longmem.cli.main import main
from hf_longmem.data.text import read_documents, split_documents

TINY = shlex.split(
    "--model_type infinite_former --hidden_size 16 --num_attention_heads 2 --segment_length 16 --num_basis 16 "
    "--sequence_length 48 --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --max_new_tokens 3 --use_cpu "
    "--config_overrides basis_widths=[0.05,0.1] --logging_steps 5 --save_total_limit 9"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(5):
        (folder / f"{number}.txt").write_text(f"Document {number}. " * (20 + 9 * number), encoding="utf-8")
    return [str(path) for path in sorted(folder.iterdir())]


def trains(arguments: list[str], corpus: list[str], output: Path) -> dict[str, Any]:
    assert main(["train", *arguments, "--text", *corpus, "--output_dir", str(output)]) == 0
    return json.loads((output / "all_results.json").read_text(encoding="utf-8"))


def log(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]


def test_documents_are_streams_and_every_byte_is_scored(
    corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--memory_decay uniform --sticky_memories true --num_hidden_layers 1 --num_train_epochs 4"
    results = trains([*TINY, *flags.split(), "--save_steps", "8"], corpus, tmp_path / "out")
    printed = capsys.readouterr().out
    assert re.search(r"held-out bits per byte: [\d.]+ before, [\d.]+ after", printed)
    assert results["bits"] < results["bits_before"] - 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    config = model.config
    assert (config.model_type, config.num_hidden_layers, config.segment_length) == ("infinite_former", 1, 16)
    assert (config.memory_decay, config.sticky_memories, config.basis_widths) == ("uniform", True, (0.05, 0.1))
    # Trainer switches the cache off for training; what is saved is for use.
    assert config.use_cache
    assert (tmp_path / "out" / "checkpoint-8" / "memory-rank-0.safetensors").is_file()

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    nats = num_bytes = 0.0
    for text in split_documents(read_documents(corpus))["held_out"]["text"]:
        found = streaming_perplexity(model, tokenizer(text)["input_ids"], progress=False)
        nats, num_bytes = nats + found.mean_nll * found.num_tokens, num_bytes + len(text.encode()) - 1
    assert results["bits"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-4)

    lines = [line for line in log(tmp_path / "out") if "loss" in line]
    assert lines
    for line in lines:
        assert line.keys() >= {"bits_per_byte", "memory_loss", "tokens_per_second", "peak_memory_gib"}


def test_a_run_of_streams_resumes_bit_for_bit(corpus: list[str], tmp_path: Path) -> None:
    steps = [*TINY, "--max_steps", "7", "--lr_scheduler_type", "constant", "--gradient_accumulation_steps", "2"]
    trains([*steps, "--save_steps", "3"], corpus, tmp_path / "whole")
    (tmp_path / "parts").mkdir()
    (tmp_path / "whole" / "checkpoint-3").rename(tmp_path / "parts" / "checkpoint-3")
    resume = ["--resume_from_checkpoint", str(tmp_path / "parts" / "checkpoint-3")]
    trains([*steps, *resume], corpus, tmp_path / "again")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_streams_can_be_left(corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trains([*TINY, "--streams", "false", "--max_steps", "1", "--save_steps", "1"], corpus, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("memory-rank-*"))
    for flags, message in (
        ("--model_type reformer_lsh --streams true", "document streams need a model with a memory, got reformer_lsh"),
        ("--model_type gpt2 --streams true", "document streams need a model with a memory, got gpt2"),
        ("--model_type infinite_former --dataloader_num_workers 2", "in the process that trains, got dataloader_num_w"),
        ("--model_type infinite_former --num_hashes 2", "infinite_former models have no such setting, got num_hashes"),
        ("--model_type infinite_former --memory_decay 2", "between 0 and 1, got 2"),
        ("--model_type infinite_former --memory_decay often", "must be 'uniform' or a number"),
    ):
        arguments = ["train", *flags.split(), "--text", *corpus, "--output_dir", str(tmp_path / "new"), "--use_cpu"]
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_defaults_are_those_of_the_model_type_and_flags_win() -> None:
    _, data, _, training = parse([])
    assert (data.sequence_length, training.per_device_train_batch_size) == (4096, 1)
    _, data, _, training = parse(["--model_type", "infinite_former"])
    assert (data.sequence_length, training.per_device_train_batch_size) == (256, 8)
    _, data, _, training = parse(["--model_type", "infinite_former", "--sequence_length", "4096"])
    assert (data.sequence_length, training.per_device_train_batch_size) == (4096, 8)
    _, data, _, training = parse(["--model_type", "infinite_former", "--model_name_or_path", "trained"])
    assert (data.sequence_length, training.per_device_train_batch_size) == (4096, 1)


def test_flags_of_the_memory() -> None:
    flags = "--memory_decay 0.5 --sticky_memories false --memory_layers 0 2 --memory_kl_weight 0 --bptt_segments 2"
    model, *_ = parse(flags.split())
    assert model.config_values() == {
        "memory_decay": 0.5,
        "sticky_memories": False,
        "memory_layers": [0, 2],
        "memory_kl_weight": 0.0,
        "bptt_segments": 2,
    }
    model, *_ = parse(["--memory_decay", "uniform"])
    assert model.config_values() == {"memory_decay": "uniform"}


def test_help_says_what_holds_where_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    ours = capsys.readouterr().out.partition("\ntraining: every argument")[0]
    assert "that of the model type)" in " ".join(ours.split())
    assert "(default: None)" not in " ".join(ours.split())
