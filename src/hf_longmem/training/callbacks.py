"""Callbacks for the stock Trainer: the memory of document streams in checkpoints, and what a log line should say."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_longmem._errors import complaint
from hf_longmem.models.stream_memory import CarriedMemory, MemoryCollator, MemoryStreams
from hf_longmem.training.stream_checkpoints import load_carried_memory, save_carried_memory


class StreamMemoryCallback(TrainerCallback, ExportableState):
    """Save the memory of the training streams in every checkpoint, and go on with it when training is resumed.

    Each process writes ``checkpoint-<step>/memory-rank-<rank>.safetensors`` before the rest of the checkpoint, so that
    older ones are deleted only after it; ``trainer_state.json`` says under ``stateful_callbacks`` how many such files
    make it complete (``num_memory_files``). A resumed run with the same documents, batch size and number of processes
    gives, step by step, the numbers of one that was never interrupted. In the middle of an epoch a checkpoint without
    its memory, or of another number of processes, is refused with the first batch; between two epochs nothing is
    remembered, and anything goes. The memory of evaluation streams is its own, and is not saved.

    Args:
        resume_from: the checkpoint given to ``trainer.train(resume_from_checkpoint=...)``, where it lies outside
            ``output_dir`` and ``TrainingArguments.resume_from_checkpoint`` does not name it.

    Raises:
        ValueError: streams with another collator, or with a model whose ``forward`` takes no ``memory``; an iterable's
            streams resumed in another epoch than the first.
    """

    def __init__(self, resume_from: str | os.PathLike[str] | None = None) -> None:
        self.resume_from = None if resume_from is None else os.fspath(resume_from)
        self.num_memory_files = 0
        self._carried: CarriedMemory | None = None
        self._saved: int | None = None

    def state(self) -> dict[str, Any]:
        """What ``trainer_state.json`` keeps of it."""
        return {"args": {"resume_from": None}, "attributes": {"num_memory_files": self.num_memory_files}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Find the training streams, and restore their memory if training is resumed."""
        loader, model = kwargs["train_dataloader"], kwargs["model"]
        streams, collator = loader.dataset, loader.collate_fn
        # Accelerate and Trainer wrap both.
        while not isinstance(streams, MemoryStreams) and hasattr(streams, "dataset"):
            streams = streams.dataset
        collator = getattr(collator, "data_collator", collator)
        self._carried, self.num_memory_files, self._saved = None, 0, None
        if not isinstance(streams, MemoryStreams):
            return
        if not isinstance(collator, MemoryCollator):
            received = type(collator).__name__
            fix = "pass data_collator=DataCollatorForStreams()"
            raise ValueError(complaint("document streams need their own collator", received, fix))
        takes = model.get_base_model() if hasattr(model, "get_base_model") else model
        if "memory" not in inspect.signature(takes.forward).parameters:
            rule = "document streams need a model whose forward takes memory"
            fix = "use DataCollatorForLongSequences on packed documents"
            raise ValueError(complaint(rule, type(takes).__name__, fix))
        self._carried, self.num_memory_files = collator.carried(streams), args.world_size
        if state.global_step > 0:
            self._restore(args, state, model, args.per_device_train_batch_size)
            if not hasattr(streams, "__len__"):
                self._check_epoch(args, state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write this process's memory, if the checkpoint of this step comes next."""
        if control.should_save:
            self._save(args, state)

    on_epoch_end = on_step_end

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write this process's memory, if nobody knew before that the checkpoint would be written."""
        if self._saved != state.global_step:
            self._save(args, state)

    def _save(self, args: TrainingArguments, state: TrainerState) -> None:
        if self._carried is not None and not args.save_only_model:
            folder = _checkpoint(args, state)
            save_carried_memory(folder, self._carried, rank=args.process_index, world_size=args.world_size)
            self._saved = state.global_step

    def _restore(self, args: TrainingArguments, state: TrainerState, model: Any, batch_size: int) -> None:
        carried: Any = self._carried
        carried.restore(0, None)
        named = args.resume_from_checkpoint
        named = None if named is None or str(named).lower() in ("true", "false") else named
        folder = Path(self.resume_from or named or _checkpoint(args, state))
        try:
            _check_same_run(folder, state)
            load_carried_memory(
                folder, carried, model, batch_size=batch_size, rank=args.process_index, world_size=args.world_size
            )
        except (FileNotFoundError, ValueError) as error:
            # Whether it matters depends on the batch that comes next: between epochs documents start anew.
            carried.advice = str(error)

    def _check_epoch(self, args: TrainingArguments, state: TrainerState) -> None:
        # To Trainer all steps on a data set without a length are one epoch: it would skip past the end of the first.
        skipped = state.global_step * args.gradient_accumulation_steps
        if not args.ignore_data_skip and self._carried is not None and 0 < self._carried.num_batches < skipped:
            rule = "training on an iterable is resumed in its first epoch"
            fix = "let the iterable give the documents again and again, as one epoch, or use DocumentStreams(...)"
            raise ValueError(complaint(rule, f"step {state.global_step}, in a later one", fix))


def _check_same_run(folder: Path, state: TrainerState) -> None:
    file = folder / TRAINER_STATE_NAME
    saved = TrainerState.load_from_json(str(file)).log_history if file.is_file() else None
    # As text, for a loss that is not a number does not equal itself.
    if json.dumps(saved) != json.dumps(state.log_history):
        rule = "the memory must come from the checkpoint that is resumed"
        received = f"{folder}, which is {'none' if saved is None else 'of another run'}"
        raise ValueError(complaint(rule, received, "name that one: StreamMemoryCallback(resume_from=...)"))


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


__all__ = ["StreamMemoryCallback"]
