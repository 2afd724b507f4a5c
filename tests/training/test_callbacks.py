"""The memory of document streams in checkpoints, and what log lines say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_longmem import (
    DataCollatorForStreams,
    DocumentStreams,
    InfiniteFormerConfig,
    InfiniteFormerForCausalLM,
    ReformerLSHConfig,
    ReformerLSHForCausalLM,
    StreamMemoryCallback,
)

MEMORY = "memory-rank-0.safetensors"
TINY = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "segment_length": 16,
    "num_basis": 16,
    "basis_widths": (0.05, 0.1),
    "sticky_memories": True,
}


def tiny_model(**overrides: Any) -> InfiniteFormerForCausalLM:
    torch.manual_seed(0)
    return InfiniteFormerForCausalLM(InfiniteFormerConfig(**(TINY | overrides)))


def streams(seed: int = 0, batch_size: int = 2) -> DocumentStreams:
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(2, 60, (length,), generator=generator) for length in (100, 33, 65, 130)]
    return DocumentStreams(documents, batch_size=batch_size, sequence_length=24)


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Trainer]:
    """Make a Trainer of the tiny model on document streams; keyword arguments override its settings."""

    def make(*, model: Any = None, callback: Any = None, data: Any = None, **settings: Any) -> Trainer:
        defaults: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "train_sampling_strategy": "sequential",
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "steps",
            "save_steps": 3,
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }
        return Trainer(
            tiny_model() if model is None else model,
            TrainingArguments(**(defaults | settings)),
            data_collator=DataCollatorForStreams(),
            train_dataset=streams() if data is None else data,
            eval_dataset=streams(1),
            callbacks=[StreamMemoryCallback() if callback is None else callback],
        )

    return make


def losses(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_is_the_uninterrupted_one(
    trainer: Callable[..., Trainer], tmp_path: Path, accumulation: int
) -> None:
    whole = trainer(gradient_accumulation_steps=accumulation)
    whole.train()
    checkpoints = sorted((tmp_path / "out").glob("checkpoint-*"))
    steps = whole.state.max_steps
    assert len(checkpoints) == -(-steps // 3) >= 4
    for checkpoint in checkpoints:
        # Dropout is on: the random numbers go on too.
        again = trainer(gradient_accumulation_steps=accumulation)
        again.train(resume_from_checkpoint=str(checkpoint))
        assert losses(again) == losses(whole)
        assert all(
            torch.equal(mine, theirs)
            for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True)
        )


def test_a_run_that_was_interrupted_goes_on_in_the_same_trainer(
    trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    class Interrupt(TrainerCallback):
        step = 5

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == self.step:
                raise KeyboardInterrupt

    whole = trainer()
    whole.train()
    again, interrupt = trainer(), Interrupt()
    again.add_callback(interrupt)
    with pytest.raises(KeyboardInterrupt):
        again.train()
    interrupt.step = 0
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert losses(again) == losses(whole)


def test_an_iterable_is_resumed_too(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(2, 60, (length,), generator=generator) for length in (100, 33, 65, 130)]

    def data() -> Any:
        return DocumentStreams.from_iterable(documents, batch_size=2, sequence_length=24)

    whole = trainer(data=data(), max_steps=7)
    whole.train()
    again = trainer(data=data(), max_steps=7)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert losses(again) == losses(whole)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_iterable_is_not_resumed_where_trainer_would_lose_its_place(
    trainer: Callable[..., Trainer], tmp_path: Path, accumulation: int
) -> None:
    def data() -> Any:
        return DocumentStreams.from_iterable(
            lambda: iter([range(2, 50), range(2, 32)]), batch_size=1, sequence_length=24
        )

    settings = {"per_device_train_batch_size": 1, "save_steps": 1, "gradient_accumulation_steps": accumulation}
    whole = trainer(data=data(), max_steps=6, **settings)
    whole.train()
    for step in range(1, 6):
        again = trainer(data=data(), max_steps=6, **settings)
        checkpoint = str(tmp_path / "out" / f"checkpoint-{step}")
        if step * accumulation > 4:
            with pytest.raises(ValueError, match=f"resumed in its first epoch, got step {step}, in a later one"):
                again.train(resume_from_checkpoint=checkpoint)
        else:
            again.train(resume_from_checkpoint=checkpoint)
            assert losses(again) == losses(whole)


def test_the_memory_saved_is_the_one_after_the_step_whatever_is_evaluated(
    trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    saved = []
    for settings in ({}, {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}):
        # A data loader draws a random number when it begins, so that with dropout evaluation would show.
        model = tiny_model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        trainer(model=model, max_steps=3, **settings).train()
        file = tmp_path / "out" / "checkpoint-3" / MEMORY
        saved.append(load_file(file))
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        assert metadata == {"format": "hf_longmem.stream_memory.1", "num_batches": "3", "world_size": "1"}
        assert not list(file.parent.glob("*.partial"))
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    assert saved[0]["0"].tolist() == [72, 24]
    state = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["StreamMemoryCallback"]["attributes"] == {"num_memory_files": 1}


def test_a_checkpoint_that_was_moved_is_named(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    whole = trainer(max_steps=7)
    whole.train()
    moved = str(shutil.move(tmp_path / "out" / "checkpoint-3", tmp_path / "moved"))
    with pytest.raises(ValueError, match=r"checkpoint-3, which is none; name that one: StreamMemoryCallback\(resume"):
        trainer(max_steps=7).train(resume_from_checkpoint=moved)
    for callback, named in ((StreamMemoryCallback(resume_from=moved), None), (None, moved)):
        again = trainer(max_steps=7, callback=callback, resume_from_checkpoint=named)
        again.train(resume_from_checkpoint=moved)
        assert losses(again) == losses(whole)


def test_the_memory_of_another_run_is_refused(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    trainer(max_steps=7).train()
    shutil.move(tmp_path / "out" / "checkpoint-3", tmp_path / "moved")
    trainer(max_steps=7, learning_rate=1e-3).train()
    with pytest.raises(ValueError, match="checkpoint-3, which is of another run"):
        trainer(max_steps=7).train(resume_from_checkpoint=str(tmp_path / "moved"))


def test_a_checkpoint_without_its_memory_is_refused_only_where_it_matters(
    trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    whole = trainer(save_steps=1)
    whole.train()
    per_epoch = whole.state.max_steps // 2
    for step in (per_epoch - 1, per_epoch):
        (tmp_path / "out" / f"checkpoint-{step}" / MEMORY).unlink()
    middle, between = (str(tmp_path / "out" / f"checkpoint-{step}") for step in (per_epoch - 1, per_epoch))
    before = sorted(path.name for path in Path(middle).iterdir())
    rule = f"got batch {per_epoch - 1} after 0 batches; .*checkpoint-{per_epoch - 1} must hold the memory"
    with pytest.raises(ValueError, match=f"{rule}.*, got no {MEMORY}; resume from a checkpoint that"):
        trainer(save_steps=1).train(resume_from_checkpoint=middle)
    assert sorted(path.name for path in Path(middle).iterdir()) == before
    again = trainer(save_steps=1)
    again.train(resume_from_checkpoint=between)
    assert losses(again) == losses(whole)


def test_resuming_without_the_callback_is_refused(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    trainer(max_steps=4).train()
    again = trainer(max_steps=7)
    again.remove_callback(StreamMemoryCallback)
    with pytest.raises(ValueError, match=r"got batch 3 after 0 batches; .* restore the memory first"):
        again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))


def edit(file: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], Any]) -> None:
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    change(tensors, metadata)
    save_file(tensors, file, metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, metadata: metadata.update(world_size="2"), "of streams of 2 processes, got 1 processes"),
        (lambda tensors, metadata: metadata.update(format="other"), "must hold the memory of streams, got format"),
        (lambda tensors, metadata: tensors.popitem(), "must be of this model and batch size"),
        (lambda tensors, metadata: tensors.update({"0": torch.zeros(3, dtype=torch.int64)}), "tensors of .2, 3. rows"),
    ],
)
def test_a_memory_that_does_not_fit_is_refused(
    trainer: Callable[..., Trainer], tmp_path: Path, change: Callable[..., Any], message: str
) -> None:
    trainer(max_steps=4).train()
    checkpoint = tmp_path / "out" / "checkpoint-3"
    edit(checkpoint / MEMORY, change)
    with pytest.raises(ValueError, match=message):
        trainer(max_steps=7).train(resume_from_checkpoint=str(checkpoint))


def test_a_torn_memory_is_refused(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    trainer(max_steps=4).train()
    file = tmp_path / "out" / "checkpoint-3" / MEMORY
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(OSError, match="must be whole, got a damaged file"):
        trainer(max_steps=7).train(resume_from_checkpoint=str(file.parent))


def test_a_memory_that_cannot_be_written_leaves_no_half_file(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    class InTheWay(StreamMemoryCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (tmp_path / "out" / "checkpoint-3" / MEMORY).mkdir()
            super().on_save(args, state, control, **kwargs)

    with pytest.raises(OSError, match=MEMORY):
        trainer(max_steps=4, callback=InTheWay()).train()
    assert not list((tmp_path / "out" / "checkpoint-3").glob("*.partial"))


def test_callbacks_are_restored_from_a_checkpoint(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    whole = trainer(max_steps=7)
    whole.train()
    again = trainer(max_steps=7, restore_callback_states_from_checkpoint=True)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert losses(again) == losses(whole)


def test_streams_need_their_collator_and_a_model_with_memory(trainer: Callable[..., Trainer]) -> None:
    wrong = trainer(max_steps=1)
    wrong.data_collator = lambda items: {}
    with pytest.raises(ValueError, match=r"got function; pass data_collator=DataCollatorForStreams\(\)"):
        wrong.train()
    config = ReformerLSHConfig(vocab_size=60, hidden_size=16, num_attention_heads=2, attn_layers=["local"])
    model = ReformerLSHForCausalLM(config)
    with pytest.raises(ValueError, match="whose forward takes memory, got ReformerLSHForCausalLM; use DataCollatorFor"):
        trainer(model=model, max_steps=1, remove_unused_columns=False).train()


def test_training_without_streams_has_no_memory_to_save(tmp_path: Path) -> None:
    data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
    settings = {"output_dir": str(tmp_path), "report_to": "none", "disable_tqdm": True, "max_steps": 1}
    callback = StreamMemoryCallback()
    Trainer(tiny_model(), TrainingArguments(**settings), train_dataset=data, callbacks=[callback]).train()
    assert not list(tmp_path.rglob("memory-*"))
    assert callback.state() == {"args": {"resume_from": None}, "attributes": {"num_memory_files": 0}}
