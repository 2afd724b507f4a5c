"""The example runs, alone and on two processes, goes on from what it saved, and is the training of `longmem train`.

Part of this file is the program of the processes.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from processes import Processes
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_longmem import InfiniteFormerForCausalLM, ReformerLSHForCausalLM
from hf_longmem.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {"hidden_size": 16, "num_attention_heads": 2, "initializer_range": 0.1}
FAMILIES = ("reformer_lsh", "infinite_former")
STEPS, SAVED = 6, 4


def program(arguments: list[str]) -> list[float]:
    spec = importlib.util.spec_from_file_location("train_with_accelerate", EXAMPLES / "train_with_accelerate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(arguments)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Run the example on so many processes; returns every step's loss."""
    for number, length in enumerate((90, 30, 60, 10)):
        (tmp_path / f"{number}.txt").write_text(f"Document {number}. " * length, encoding="utf-8")
    texts = [str(path) for path in sorted(tmp_path.glob("*.txt"))]

    def start(output: Path, world_size: int = 1, **options: Any) -> list[float]:
        given = {"max_steps": STEPS, "save_steps": SAVED, "sequence_length": 64, "output_dir": output} | options
        flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        number = len(list(tmp_path.glob("run-*")))
        arguments = [*flags, "--text", *texts]
        with Processes(__file__, "program", tmp_path / f"run-{number}", world_size, arguments=arguments) as processes:
            losses = processes.results()
        assert all(of_rank == losses[0] for of_rank in losses)
        return losses[0]

    return start


@pytest.mark.parametrize("family", FAMILIES)
def test_it_trains_saves_and_goes_on_bit_for_bit(family: str, run: Any, tmp_path: Path) -> None:
    options = {"model_type": family, "config": json.dumps(TINY | {"hidden_dropout_prob": 0.1}), "batch_size": 2}
    whole, again = tmp_path / "whole", tmp_path / "again"
    losses = run(whole, **options)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    assert run(again, resume=whole / f"step-{SAVED}", **options) == losses[SAVED:]
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (again, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert AutoModelForCausalLM.from_pretrained(whole).config.model_type == family


def test_it_is_the_training_of_longmem_train(run: Any, tmp_path: Path) -> None:
    losses = run(tmp_path / "example", model_type="infinite_former", config=json.dumps(TINY), batch_size=2)
    flags = (
        "train --model_type infinite_former --hidden_size 16 --num_attention_heads 2 --config_overrides "
        "initializer_range=0.1 --sequence_length 64 --per_device_train_batch_size 2 --logging_steps 1 --disable_tqdm "
        f"true --max_steps {STEPS} --max_new_tokens 0 --no_do_eval --use_cpu --output_dir {tmp_path / 'command'} --text"
    )
    assert main([*flags.split(), *(str(path) for path in sorted(tmp_path.glob("*.txt")))]) == 0
    state = json.loads((tmp_path / "command" / "trainer_state.json").read_text(encoding="utf-8"))
    assert losses == pytest.approx([entry["loss"] for entry in state["log_history"] if "loss" in entry], rel=1e-5)


def test_two_processes_with_accumulation_train_as_one_does_and_go_on_bit_for_bit(run: Any, tmp_path: Path) -> None:
    options = {"model_type": "infinite_former", "config": json.dumps(TINY), "gradient_accumulation_steps": 2}
    alone = run(tmp_path / "alone", batch_size=2, **options)
    losses = run(tmp_path / "both", world_size=2, batch_size=1, **options)
    assert losses == pytest.approx(alone, rel=1e-5)
    again = run(tmp_path / "again", 2, batch_size=1, resume=tmp_path / "both" / f"step-{SAVED}", **options)
    assert again == losses[SAVED:]


@pytest.mark.parametrize("name", ["accelerate_ddp.yaml", "accelerate_fsdp2.yaml", "accelerate_deepspeed_zero2.yaml"])
def test_accelerate_reads_the_config_files(name: str) -> None:
    config = load_config_from_file(str(EXAMPLES / name))
    assert config.num_processes > 1
    assert config.distributed_type.value in name.upper().replace("DDP", "MULTI_GPU")
    written = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))
    assert all(getattr(config, key) is not None for key in written)


def test_the_classes_to_shard_and_the_deepspeed_file_exist() -> None:
    fsdp = load_config_from_file(str(EXAMPLES / "accelerate_fsdp2.yaml")).fsdp_config
    sharded = {*ReformerLSHForCausalLM._no_split_modules, *InfiniteFormerForCausalLM._no_split_modules}
    assert set(fsdp["fsdp_transformer_layer_cls_to_wrap"].split(",")) == sharded
    deepspeed = load_config_from_file(str(EXAMPLES / "accelerate_deepspeed_zero2.yaml")).deepspeed_config
    file = EXAMPLES.parent / deepspeed["deepspeed_config_file"]
    assert json.loads(file.read_text(encoding="utf-8"))["zero_optimization"]["stage"] == 2
