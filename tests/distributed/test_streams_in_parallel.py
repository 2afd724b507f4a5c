"""Document streams on two gloo processes under the stock Trainer: every document is read once, by one rank, in order.

Part of this file is the program of those processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Processes
from tiny_models import causal_lm
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from hf_longmem import DataCollatorForStreams, DocumentStreams, StreamMemoryCallback
from hf_longmem.training.checkpoints import checkpoint_fault, checkpoint_world_size, last_complete_checkpoint

WORLD, ROWS, LENGTH, LEARNING_RATE = 2, 2, 12, 0.1
# The longest is read long after all others are done: three rows, one of each process among them, wait for it.
LENGTHS = (40, 5, 130, 26, 1, 12, 70, 24)
VOCABULARY = 2 + sum(LENGTHS)
OVERRIDES = {"vocab_size": VOCABULARY, "memory_gate": "convolution", "sticky_memories": True}


def documents() -> list[Tensor]:
    """Documents of which no two tokens are the same."""
    return list(torch.arange(2, VOCABULARY).split(LENGTHS))


def model(*, dropout: bool = False) -> nn.Module:
    return causal_lm("infinite_former", dropout=dropout, **OVERRIDES).double()


def trainer_of(output: str, *, streams: Any = None, model: nn.Module, **settings: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": ROWS,
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
        "optim": "sgd",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    if streams is None:
        streams = DocumentStreams(documents(), batch_size=ROWS, sequence_length=LENGTH)
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=output, **(defaults | settings)),
        data_collator=DataCollatorForStreams(),
        train_dataset=streams,
        callbacks=[StreamMemoryCallback()],
    )


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def joint(accumulation: int) -> list[float]:
    """Plain PyTorch in one process, all rows in one batch."""
    streams, collator, plain = _joint_streams(), DataCollatorForStreams(), model()
    rows = WORLD * ROWS
    batches = [collator([streams[index + row] for row in range(rows)]) for index in range(0, len(streams), rows)]
    found = []
    for first in range(0, len(batches), accumulation):
        together = batches[first : first + accumulation]
        items = sum((batch["shift_labels"] != -100).sum() for batch in together)
        plain.zero_grad()
        loss = 0.0
        for batch in together:
            part = plain(**batch, num_items_in_batch=items).loss
            part.backward()
            loss += part.item()
        found.append(loss)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= LEARNING_RATE * parameter.grad
    return found


def _joint_streams() -> DocumentStreams:
    return DocumentStreams(documents(), batch_size=WORLD * ROWS, sequence_length=LENGTH, world_size=1)


def read_by(trained: nn.Module) -> list[list[int]]:
    """Will hold, for each row of this process, the tokens that the model was given."""
    rows: list[list[int]] = [[] for _ in range(ROWS)]

    def record(_: nn.Module, __: tuple[Any, ...], given: dict[str, Any]) -> None:
        for row, tokens, real in zip(rows, given["input_ids"], given["attention_mask"].bool(), strict=True):
            row += tokens[real].tolist()

    trained.register_forward_pre_hook(record, with_kwargs=True)
    return rows


def program(output: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for accumulation, search in ((1, None), (1, False), (2, None)):
        trained = model()
        rows = read_by(trained)
        settings = {"gradient_accumulation_steps": accumulation, "ddp_find_unused_parameters": search}
        trainer = trainer_of(output, model=trained, **settings)
        trainer.train()
        results[f"losses-{accumulation}-{search}"] = losses(trainer), joint(accumulation)
        results[f"rows-{accumulation}-{search}"] = rows

    trained = model()
    rows = read_by(trained)
    streams = DocumentStreams.from_iterable(iter(documents()), batch_size=ROWS, sequence_length=LENGTH)
    steps = len(results["losses-1-None"][0])
    trainer_of(
        output, streams=streams, model=trained, max_steps=steps, accelerator_config={"dispatch_batches": False}
    ).train()
    results["rows-iterable"] = rows

    runs = []
    for resume in (None, "checkpoint-4"):
        trainer = trainer_of(
            output, model=model(dropout=True), save_strategy="steps", save_steps=4, optim="adamw_torch"
        )
        trainer.train(resume_from_checkpoint=resume and f"{output}/{resume}")
        runs.append((losses(trainer), [p.detach().flatten()[:3].tolist() for p in trainer.model.parameters()]))
    results["resumed"] = runs
    return results


def resume_alone(checkpoint: str, output: str) -> str:
    """One process tries to go on where two stopped."""
    streams = DocumentStreams(documents(), batch_size=ROWS, sequence_length=LENGTH)
    trainer = trainer_of(output, streams=streams, model=model(), resume_from_checkpoint=checkpoint)
    with pytest.raises(ValueError, match="processes") as raised:
        trainer.train(resume_from_checkpoint=checkpoint)
    return str(raised.value)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("streams") / "out"


@pytest.fixture(scope="module")
def results(output: Path) -> list[dict[str, Any]]:
    """What each of the processes saw."""
    with Processes(__file__, "program", output.with_name("run"), WORLD, output=str(output)) as processes:
        return processes.results(timeout=300)


@pytest.mark.parametrize("run", ["1-None", "1-False", "2-None", "iterable"])
def test_every_document_is_read_once_by_one_row_of_one_process_in_order(
    results: list[dict[str, Any]], run: str
) -> None:
    rows = [row for of_rank in results for row in of_rank[f"rows-{run}"]]
    assert len(rows) == WORLD * ROWS
    assert sum(map(len, rows)) == sum(LENGTHS)
    for document in documents():
        (row,) = (row for row in rows if document[0] in row)
        start = row.index(int(document[0]))
        assert row[start : start + len(document)] == document.tolist()


@pytest.mark.parametrize("run", ["1-None", "1-False", "2-None"])
def test_losses_and_memories_are_those_of_one_process(results: list[dict[str, Any]], run: str) -> None:
    for of_rank in results:
        ours, expected = of_rank[f"losses-{run}"]
        # Up to the end of the longest document, while the other process has nothing but padding.
        assert len(expected) == (11 if run.startswith("1") else 6)
        assert ours == pytest.approx(expected, rel=1e-6)


def test_two_processes_go_on_from_their_checkpoint_bit_for_bit(results: list[dict[str, Any]], output: Path) -> None:
    for of_rank in results:
        whole, again = of_rank["resumed"]
        assert again == whole
    checkpoint = output / "checkpoint-4"
    assert checkpoint_fault(checkpoint) is None
    assert checkpoint_world_size(checkpoint) == WORLD
    assert last_complete_checkpoint(output) is not None


def test_a_checkpoint_of_two_processes_is_refused_by_one(results: list[dict[str, Any]], output: Path) -> None:
    checkpoint = output / "checkpoint-4"
    before = {path: path.read_bytes() for path in checkpoint.iterdir()}
    arguments = {"checkpoint": str(checkpoint), "output": str(output.with_name("alone"))}
    with Processes(__file__, "resume_alone", output.with_name("run-alone"), **arguments) as process:
        (said,) = process.results()
    assert f"{checkpoint} has the memory of streams of 2 processes, got 1 processes" in said
    assert {path: path.read_bytes() for path in checkpoint.iterdir()} == before
