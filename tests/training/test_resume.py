"""Training that is killed, or whose disk is full, goes on where its last whole checkpoint was written, bit for bit.

Part of this file is the program of the processes that are killed.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Processes
from safetensors.torch import load_file
from tiny_models import VOCABULARY, Documents, causal_lm, collate
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_longmem import DataCollatorForStreams, DocumentStreams, StreamMemoryCallback
from hf_longmem.training.checkpoints import (
    WholeCheckpointsCallback,
    checkpoint_fault,
    checkpoint_world_size,
    last_complete_checkpoint,
)

STEPS, SAVED_EVERY = 14, 3
KINDS = ("reformer_lsh", "infinite_former", "streams")


class Journal(TrainerCallback):
    """Writes down the loss of each step at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            with self.path.open("a") as file:
                file.write(json.dumps([state.global_step, logs["loss"]]) + "\n")


class Disaster(TrainerCallback, ExportableState):
    """Ends the process, or fills its disk, at a step.

    Args:
        step: which.
        how: ``"any time"`` after the step; while its checkpoint is written, ``"in a file"`` longer than ``limit``
            bytes, or ``"before the state"``, which comes last; ``"after saving"``; or ``"disk full"``: no file can be
            longer.
    """

    def __init__(self, step: int, how: str, limit: int = 0) -> None:
        self.step, self.how, self.limit, self.due = step, how, limit, False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.due = state.global_step == self.step
        if self.due and self.how == "any time":
            threading.Timer(random.uniform(0, 0.1), kill_self).start()
        if self.due and self.how in ("in a file", "disk full"):
            # The kernel ends a process that writes beyond its limit, unless that ignores the signal, as Python does.
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL if self.how == "in a file" else signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.RLIM_INFINITY))
        if self.how == "any time" and state.global_step == STEPS - 1:
            time.sleep(60)

    def state(self) -> dict[str, Any]:
        if self.due and self.how == "before the state":
            kill_self()
        return {"args": {"step": self.step, "how": self.how}, "attributes": {}}

    def on_save(self, *_: Any, **__: Any) -> None:
        if self.due and self.how == "after saving":
            kill_self()


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(
    kind: str, output: str, journal: str, disaster: dict[str, Any] | None, resume_from: str | None, keep: int | None
) -> str | None:
    """Train, or go on from the last whole checkpoint; dropout is on, and documents come in a random order."""
    stream = kind == "streams"
    model = causal_lm("infinite_former" if stream else kind, dropout=True, seed=0)
    resume = resume_from or last_complete_checkpoint(output)
    data: Any = Documents(20)
    if stream:
        generator = torch.Generator().manual_seed(0)
        lengths = (60, 5, 100, 33, 64, 70)
        documents = [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in lengths]
        data = DocumentStreams(documents, batch_size=2, sequence_length=20)
    arguments = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=2,
        train_sampling_strategy="sequential" if stream else "random",
        max_steps=STEPS,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=SAVED_EVERY,
        save_total_limit=keep,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        data_collator=DataCollatorForStreams() if stream else collate,
        train_dataset=data,
        callbacks=[
            Journal(Path(journal)),
            WholeCheckpointsCallback(),
            *([Disaster(**disaster)] if disaster else []),
            *([StreamMemoryCallback()] if stream else []),
        ],
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return resume


def journal_of(path: Path) -> dict[int, float]:
    """The loss of each step; of a step that was done twice, both must agree."""
    losses: dict[int, float] = {}
    for line in path.read_text().splitlines():
        step, loss = json.loads(line)
        assert losses.setdefault(step, loss) == loss
    return losses


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an uninterrupted run of a kind: ``losses`` and ``out``."""
    folders: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in folders:
            folder = folders[kind] = tmp_path_factory.mktemp(kind)
            with start(kind, folder) as run:
                assert run.results() == [None]
            losses = journal_of(folder / "losses")
            assert sorted(losses) == list(range(1, STEPS + 1))
            assert len(set(losses.values())) == STEPS
        return folders[kind]

    return folder_of


def start(
    kind: str, folder: Path, *, resume_from: str | None = None, keep: int | None = None, **disaster: Any
) -> Processes:
    number = len(list(folder.glob("run-*")))
    arguments = {"output": str(folder / "out"), "journal": str(folder / "losses"), "disaster": disaster or None}
    arguments |= {"kind": kind, "resume_from": resume_from, "keep": keep}
    return Processes(__file__, "train", folder / f"run-{number}", **arguments)


def assert_goes_on(kind: str, folder: Path, whole: Path, checkpoint: str | None) -> str:
    """Resume, from this checkpoint, to the end of the uninterrupted run; gives what the process said."""
    with start(kind, folder) as run:
        (resumed,) = run.results()
    assert resumed == (None if checkpoint is None else str(folder / "out" / checkpoint))
    assert journal_of(folder / "losses") == journal_of(whole / "losses")
    ours, theirs = (load_file(path / "out" / "model.safetensors") for path in (folder, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return run.logs()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_killed_at_any_step_goes_on_bit_for_bit(
    kind: str, uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = uninterrupted(kind)
    # After the first checkpoint: killed while that is written, there is nothing to go on from.
    step = random.randrange(SAVED_EVERY + 1, STEPS - 3)
    with start(kind, tmp_path, step=step, how="any time") as run:
        assert run.exit_codes() == [-signal.SIGKILL], (step, run.logs())
    done = journal_of(tmp_path / "losses")
    assert step <= max(done) < STEPS
    last = last_complete_checkpoint(tmp_path / "out")
    assert last is not None
    assert_goes_on(kind, tmp_path, whole, Path(last).name)


# Which file of the checkpoint of step 6 is being written when the process is killed.
TORN = {
    "weights": ("in a file", "model.safetensors", "no trainer_state.json"),
    "optimizer": ("in a file", "optimizer.pt", "no trainer_state.json"),
    "state": ("before the state", None, "no trainer_state.json"),
}


@pytest.mark.parametrize(
    ("kind", "torn"),
    [("streams", torn) for torn in TORN] + [("reformer_lsh", "optimizer"), ("infinite_former", "weights")],
)
def test_a_run_killed_while_saving_goes_on_from_the_checkpoint_before(
    kind: str, torn: str, uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = uninterrupted(kind)
    how, file, fault = TORN[torn]
    limit = (whole / "out" / "checkpoint-6" / file).stat().st_size - 1000 if file else 0
    with start(kind, tmp_path, step=6, how=how, limit=limit) as run:
        assert run.exit_codes() == [-signal.SIGXFSZ if file else -signal.SIGKILL], run.logs()
    cut = tmp_path / "out" / "checkpoint-6"
    # safetensors gives a file its name when it is whole.
    assert file is None or not (cut / file).exists() or (cut / file).stat().st_size <= limit
    found = checkpoint_fault(cut)
    assert found is not None
    assert found.startswith(fault)
    said = assert_goes_on(kind, tmp_path, whole, "checkpoint-3")
    assert f"{cut}: {found}: this checkpoint is not whole and is left out" in said


@pytest.mark.parametrize("file", ["memory-rank-0.safetensors", "model.safetensors", "optimizer.pt"])
def test_a_full_disk_ends_the_run_and_loses_nothing(
    file: str, uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = uninterrupted("streams")
    limit = (whole / "out" / "checkpoint-6" / file).stat().st_size - 100
    with start("streams", tmp_path, step=6, how="disk full", limit=limit) as run:
        assert run.exit_codes() == [1]

    assert checkpoint_fault(tmp_path / "out" / "checkpoint-6") is not None
    assert not list((tmp_path / "out").rglob("*.partial"))
    assert_goes_on("streams", tmp_path, whole, "checkpoint-3")


def test_a_checkpoint_written_over_an_older_one_of_its_step_is_not_whole_before_its_end(
    uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = uninterrupted("streams")
    for step in (3, 6):
        shutil.copytree(whole / "out" / f"checkpoint-{step}", tmp_path / "out" / f"checkpoint-{step}")
    chosen = {"resume_from": str(tmp_path / "out" / "checkpoint-3")}
    with start("streams", tmp_path, step=6, how="before the state", **chosen) as run:
        assert run.exit_codes() == [-signal.SIGKILL], run.logs()
    assert checkpoint_fault(tmp_path / "out" / "checkpoint-6") == "no trainer_state.json"
    assert last_complete_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-3")


def test_where_one_checkpoint_is_kept_the_next_is_whole_before_it_is_deleted(
    uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    with start("streams", tmp_path, step=6, how="after saving", keep=1) as run:
        assert run.exit_codes() == [-signal.SIGKILL], run.logs()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-6"]
    shutil.copytree(uninterrupted("streams") / "out" / "checkpoint-3", tmp_path / "out" / "checkpoint-3")
    assert last_complete_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-6")


@pytest.fixture(scope="module")
def whole_checkpoint(uninterrupted: Callable[[str], Path]) -> Path:
    return uninterrupted("streams") / "out" / "checkpoint-6"


NEEDED = (
    "memory-rank-0.safetensors",
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
)


@pytest.mark.parametrize("name", NEEDED)
def test_a_checkpoint_without_a_file_or_with_part_of_it_is_not_whole(
    name: str, whole_checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "checkpoint-6"
    shutil.copytree(whole_checkpoint, copy)
    assert checkpoint_fault(copy) is None
    content = (copy / name).read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 2):
        (copy / name).write_bytes(content[:length])
        fault = checkpoint_fault(copy)
        assert fault is not None
        assert name in fault
    (copy / name).unlink()
    fault = checkpoint_fault(copy)
    assert fault is not None
    assert name in fault


def test_the_last_whole_checkpoint_is_the_one_with_the_highest_number(whole_checkpoint: Path, tmp_path: Path) -> None:
    assert last_complete_checkpoint(tmp_path / "nowhere") is None
    assert last_complete_checkpoint(tmp_path) is None
    for step in (6, 9, 12, 120):
        shutil.copytree(whole_checkpoint.with_name(f"checkpoint-{min(step, 12)}"), tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-new").mkdir()
    (tmp_path / "checkpoint-500").write_text("a file")
    # A folder of another step's name: somebody's copy, or two runs in one folder.
    assert checkpoint_fault(tmp_path / "checkpoint-120") == "trainer_state.json is of step 12"
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-12")
    assert checkpoint_world_size(tmp_path / "checkpoint-12") == 1
    for step in (12, 9):
        (tmp_path / f"checkpoint-{step}" / "optimizer.pt").unlink()
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
    (tmp_path / "checkpoint-6" / "scheduler.pt").unlink()
    with pytest.raises(ValueError, match=r"must hold a whole checkpoint to resume, got .*checkpoint-6: no scheduler"):
        last_complete_checkpoint(tmp_path)


def test_a_checkpoint_of_several_files_and_processes_is_looked_at_whole(whole_checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "checkpoint-6"
    shutil.copytree(whole_checkpoint, copy)
    (copy / "model.safetensors").unlink()
    causal_lm("infinite_former").save_pretrained(copy, max_shard_size="10KB")
    shards = sorted(path.name for path in copy.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert checkpoint_fault(copy) is None
    (copy / shards[1]).rename(tmp_path / shards[1])
    assert checkpoint_fault(copy) == f"no {shards[1]}"
    (tmp_path / shards[1]).rename(copy / shards[1])

    (copy / "rng_state.pth").rename(copy / "rng_state_1.pth")
    assert checkpoint_fault(copy) == "no rng_state_0.pth"
    shutil.copy(copy / "rng_state_1.pth", copy / "rng_state_0.pth")
    assert checkpoint_fault(copy) is None
    assert checkpoint_world_size(copy) == 2
    state = json.loads((copy / "trainer_state.json").read_text())
    state["stateful_callbacks"]["StreamMemoryCallback"]["attributes"]["num_memory_files"] = 2
    (copy / "trainer_state.json").write_text(json.dumps(state))
    assert checkpoint_fault(copy) == "no memory-rank-1.safetensors, the memory of its document streams"
