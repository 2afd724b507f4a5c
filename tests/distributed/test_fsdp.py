"""FSDP2 as transformers has it built in: sharded over two gloo processes, trained, saved, and loaded by one process.

Part of this file is the program of those processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Processes
from tiny_models import FAMILIES, Documents, causal_lm, collate
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from hf_longmem import DataCollatorForStreams, DocumentStreams

WORLD, ROWS, STEPS = 2, 2, 3
# Rows are at different places of their segments, and one process has padding alone in the end.
STREAMED = (40, 5, 90, 26, 13)


def batches(family: str) -> Any:
    return lambda rows: collate(rows) | ({"hash_seed": 7} if family == "reformer_lsh" else {})


def trained(family: str, model: Any, output: str, rows: int, **settings: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=rows,
        max_steps=5 if family == "streams" else STEPS,
        train_sampling_strategy="sequential",
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    size = WORLD * ROWS * STEPS * arguments.gradient_accumulation_steps
    data: Any = Documents(size)
    if family == "streams":
        documents = [Documents(1, length, even=True)[0]["input_ids"] for length in STREAMED]
        data = DocumentStreams(documents, batch_size=rows, sequence_length=20)
    collator = DataCollatorForStreams() if family == "streams" else batches(family)
    trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=collator)
    trainer.train()
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def program(saved: str) -> dict[str, Any]:
    """Train what ``saved`` holds, sharded, and save it beside."""
    results: dict[str, Any] = {}
    for family in FAMILIES:
        for accumulation in (1, 2):
            config = DistributedConfig(fsdp_size=WORLD)
            model = AutoModelForCausalLM.from_pretrained(f"{saved}/{family}", distributed_config=config)
            sharded = [isinstance(parameter, DTensor) for parameter in model.parameters()]
            settings = {"gradient_accumulation_steps": accumulation, "save_only_model": True}
            trainer = trained(family, model, f"{saved}/out", ROWS, **settings)
            trainer.save_model(f"{saved}/{family}-{accumulation}")
            results[f"{family}-{accumulation}"] = {"losses": losses(trainer), "sharded": all(sharded)}
    config = DistributedConfig(fsdp_size=WORLD)
    model = AutoModelForCausalLM.from_pretrained(f"{saved}/infinite_former", distributed_config=config)
    results["streams"] = losses(trained("streams", model, f"{saved}/out", ROWS, save_only_model=True))
    return results


def alone(saved: str) -> dict[str, Any]:
    """The same training in one process."""
    results: dict[str, Any] = {}
    for family in FAMILIES:
        for accumulation in (1, 2):
            model = AutoModelForCausalLM.from_pretrained(f"{saved}/{family}")
            settings = {"gradient_accumulation_steps": accumulation}
            trainer = trained(family, model, f"{saved}/out", WORLD * ROWS, **settings)
            trainer.save_model(f"{saved}/{family}-{accumulation}-alone")
            results[f"{family}-{accumulation}"] = losses(trainer)
    model = AutoModelForCausalLM.from_pretrained(f"{saved}/infinite_former")
    results["streams"] = losses(trained("streams", model, f"{saved}/out", WORLD * ROWS))
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], dict[str, Any]]:
    """The folder with what was saved, and what each of the processes, and one alone, measured."""
    folder = tmp_path_factory.mktemp("fsdp")
    for family in FAMILIES:
        causal_lm(family).save_pretrained(folder / family)
    with Processes(__file__, "program", folder / "run", WORLD, saved=str(folder)) as processes:
        together = processes.results(timeout=300)
    with Processes(__file__, "alone", folder / "run-alone", saved=str(folder)) as process:
        return folder, together, process.results(timeout=300)[0]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_shards_trains_saves_and_is_loaded_by_one_process(runs: Any, family: str, accumulation: int) -> None:
    folder, together, plain = runs
    for of_rank in together:
        assert of_rank[f"{family}-{accumulation}"]["sharded"]
        assert of_rank[f"{family}-{accumulation}"]["losses"] == pytest.approx(
            plain[f"{family}-{accumulation}"], rel=1e-5
        )
    ids = collate([Documents(2)[0]])["input_ids"]
    logits = []
    for name in (f"{family}-{accumulation}", f"{family}-{accumulation}-alone", family):
        with torch.no_grad():
            logits.append(AutoModelForCausalLM.from_pretrained(folder / name).eval()(ids).logits)
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits[0], logits[2], atol=1e-3)


def test_document_streams_train_a_model_in_shards(runs: Any) -> None:
    _, together, plain = runs
    assert len(plain["streams"]) == 5
    for of_rank in together:
        assert of_rank["streams"] == pytest.approx(plain["streams"], rel=1e-5)
