"""The command line and the file of `longmem train` mean the same, and mistakes in either are one clear line."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
import yaml
from transformers import TrainingArguments

from hf_longmem.cli.arguments import LanguageModelingArguments, parse
from hf_longmem.cli.errors import CommandError
from hf_longmem.cli.main import main


def test_help_lists_all_of_training_arguments_and_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    printed = capsys.readouterr().out
    fields = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    ours = ["text", "dataset", "sequence_length", "hidden_size", "attn_layers", "num_hashes", "overwrite", "prompt"]
    assert [name for name in [*fields, *ours] if f"--{name}" not in printed] == []


def test_our_training_arguments_change_defaults_only() -> None:
    theirs = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    ours = {field.name: field for field in dataclasses.fields(LanguageModelingArguments)}
    assert list(ours) == list(theirs)
    assert all(ours[name].metadata == theirs[name].metadata for name in theirs)
    assert LanguageModelingArguments.__post_init__ is TrainingArguments.__post_init__


def test_flags_reach_their_group() -> None:
    model, data, run, training = parse(
        shlex.split(
            "--attn-layers local lsh --num_hashes 8 --text a.txt b.txt --overwrite --learning_rate 1e-4 --no_do_train "
            "--config_overrides round_merge=sum axial_pos_shape=[4,8] reversible=false"
        )
    )
    assert model.config_values() == {
        "attn_layers": ["local", "lsh"],
        "num_hashes": 8,
        "round_merge": "sum",
        "axial_pos_shape": [4, 8],
        "reversible": False,
    }
    assert data.text == ["a.txt", "b.txt"]
    assert run.overwrite
    assert (training.learning_rate, training.do_train, training.do_eval) == (1e-4, False, True)


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_file_means_what_its_flags_mean_and_flags_win(tmp_path: Path, suffix: str) -> None:
    values = {
        "attn_layers": ["lsh", "local"],
        "hidden_size": 48,
        "prompt": "two words",
        "learning_rate": "1e-4",
        "do_eval": False,
        "lr_scheduler_kwargs": {"num_cycles": 0.25},
        "max_steps": -1,
        "seed": None,
    }
    path = tmp_path / f"run{suffix}"
    path.write_text((json.dumps if suffix == ".json" else yaml.safe_dump)(values), encoding="utf-8")
    model, _, run, training = parse([str(path), "--hidden_size", "64"])
    assert model.config_values() == {"attn_layers": ["lsh", "local"], "hidden_size": 64}
    assert run.prompt == "two words"
    assert (training.learning_rate, training.do_eval, training.max_steps, training.seed) == (1e-4, False, -1, 42)
    assert training.lr_scheduler_kwargs == {"num_cycles": 0.25}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--hiden_size 3", "unknown argument --hiden_size; did you mean --hidden_size?"),
        ("--hidden 3", "unknown argument --hidden;"),
        ("stray", "unknown argument stray;"),
        ("--hidden_size wide", "argument --hidden_size/--hidden-size: invalid int value: 'wide'"),
        ("--num_hashes", "argument --num_hashes/--num-hashes: expected one argument"),
        ("--config_overrides num_hashes", "config_overrides must be NAME=VALUE, got num_hashes"),
        ("--config_overrides axial_pos_shape=[4", "config_overrides axial_pos_shape: "),
        ("--eval_strategy sometimes", "invalid choice: 'sometimes'"),
        ("gone.yaml", "gone.yaml: [Errno 2]"),
    ],
)
def test_mistakes_are_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("longmem train: error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '{"hidden_size": ', "a.json: Expecting value"),
        ("a.yaml", "[1, 2]", "a.yaml must hold names and values, got list"),
        ("a.yaml", "", "a.yaml must hold names and values, got NoneType"),
        ("a.yaml", "hiden_size: 3", "unknown argument --hiden_size; did you mean --hidden_size?"),
        ("a.yml", "hidden_size: [3, 4]", "unknown argument 4"),
    ],
)
def test_mistakes_in_a_file_are_one_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(CommandError) as caught:
        parse([str(tmp_path / name)])
    assert message in str(caught.value)
