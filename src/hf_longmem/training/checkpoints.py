"""Which checkpoint of an interrupted training run is whole.

Trainer writes a checkpoint's files one after another, and takes the folder with the highest number for the last
checkpoint: after a crash that may be one which is cut short.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

from accelerate.utils.constants import FSDP_MODEL_NAME
from safetensors import SafetensorError, safe_open
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, OPTIMIZER_NAME_BIN, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    logging,
)

from hf_longmem._errors import complaint
from hf_longmem.training.stream_checkpoints import memory_file

logger = logging.get_logger(__name__)

_FOLDER = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
_RANDOM_STATE = re.compile(r"rng_state(?:_(\d+))?\.pth")
_WEIGHTS = (SAFE_WEIGHTS_NAME, ADAPTER_SAFE_WEIGHTS_NAME, WEIGHTS_NAME, f"{FSDP_MODEL_NAME}.bin")
_INDICES = (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)
# What torch's distributed checkpoints (FSDP) and DeepSpeed write last into theirs.
_SHARDED = f"{FSDP_MODEL_NAME}_*/.metadata"
_DEEPSPEED = "latest"


class WholeCheckpointsCallback(TrainerCallback):
    """Keep a checkpoint that is being written over an older one of the same step from looking whole.

    A run that goes on from one of its earlier checkpoints overwrites the later ones, file by file.

    Attributes:
        writing: the checkpoint that Trainer writes now; None while it does something else.
    """

    def __init__(self) -> None:
        self.writing: Path | None = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take from an older checkpoint of this step what is written last."""
        if control.should_save:
            self.writing = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            if state.is_world_process_zero:
                (self.writing / TRAINER_STATE_NAME).unlink(missing_ok=True)

    on_epoch_end = on_evaluate = on_step_end

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """An evaluation comes between."""
        self.writing = None

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """The checkpoint is written."""
        self.writing = None


def last_complete_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Find the last checkpoint of a run that is whole; newer ones that are not are named in a warning.

    Args:
        output_dir: Trainer's.

    Returns:
        The folder, for ``trainer.train(resume_from_checkpoint=...)``; None if there is no checkpoint at all.

    Raises:
        ValueError: there are checkpoints, and none of them is whole.
    """
    found = [(int(match[1]), path) for path in _folders(output_dir) if (match := _FOLDER.fullmatch(path.name))]
    torn: list[str] = []
    for _, path in sorted(found, reverse=True):
        fault = checkpoint_fault(path)
        if fault is None:
            for other in torn:
                logger.warning(f"{other}: this checkpoint is not whole and is left out; {path} is")
            return str(path)
        torn.append(f"{path}: {fault}")
    if torn:
        rule = f"{os.fspath(output_dir)} must hold a whole checkpoint to resume"
        raise ValueError(complaint(rule, "; ".join(torn), "train anew in another folder"))
    return None


def checkpoint_fault(checkpoint: str | os.PathLike[str]) -> str | None:
    """Say what keeps training from going on exactly where a checkpoint was written; None if nothing does.

    Every file is there, and has its whole length. Those of safetensors and of ``torch.save`` are not read through.
    """
    folder = Path(checkpoint)
    try:
        return (
            _fault_of_state(folder)
            or _fault_of_weights(folder)
            or _fault_of_optimizer(folder)
            or _fault_of_processes(folder)
            or next((fault for path in sorted(folder.iterdir()) if (fault := _fault_of_file(path))), None)
        )
    except OSError as error:
        return str(error)


def checkpoint_world_size(checkpoint: str | os.PathLike[str]) -> int:
    """How many processes wrote a checkpoint, by their random states; 0 if it has none."""
    return len(_random_states(Path(checkpoint)))


def _folders(output_dir: str | os.PathLike[str]) -> list[Path]:
    return [path for path in Path(output_dir).iterdir() if path.is_dir()] if Path(output_dir).is_dir() else []


def _state(folder: Path) -> dict[str, Any]:
    state = json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    return state if isinstance(state, dict) else {}


def _fault_of_state(folder: Path) -> str | None:
    # Written last, after the rest of what the first process writes.
    if not (folder / TRAINER_STATE_NAME).is_file():
        return f"no {TRAINER_STATE_NAME}"
    try:
        step = _state(folder).get("global_step")
    except ValueError:
        return f"{TRAINER_STATE_NAME} is damaged"
    match = _FOLDER.fullmatch(folder.resolve().name)
    if match is not None and step != int(match[1]):
        return f"{TRAINER_STATE_NAME} is of step {step}"
    return None


def _fault_of_weights(folder: Path) -> str | None:
    for name in _INDICES:
        if (folder / name).is_file():
            try:
                shards = set(json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"].values())
            except (ValueError, KeyError, TypeError, AttributeError):
                return f"{name} is damaged"
            return next((f"no {shard}" for shard in sorted(shards) if not (folder / shard).is_file()), None)
    whole = any((folder / name).is_file() for name in _WEIGHTS) or any(folder.glob(_SHARDED))
    return None if whole or (folder / _DEEPSPEED).is_file() else f"no {SAFE_WEIGHTS_NAME}"


def _fault_of_optimizer(folder: Path) -> str | None:
    if (folder / _DEEPSPEED).is_file():
        return None
    if not any((folder / name).is_file() for name in (OPTIMIZER_NAME, OPTIMIZER_NAME_BIN)):
        if not any(folder.glob("optimizer_*")):
            return f"no {OPTIMIZER_NAME}"
        if not any(folder.glob("optimizer_*/.metadata")):
            return "its sharded optimizer is cut short"
    return None if (folder / SCHEDULER_NAME).is_file() else f"no {SCHEDULER_NAME}"


def _fault_of_processes(folder: Path) -> str | None:
    ranks = _random_states(folder)
    if not ranks:
        return "no random states, rng_state.pth"
    if ranks != list(range(len(ranks))):
        missing = next(rank for rank in range(len(ranks)) if rank not in ranks)
        return f"no rng_state_{missing}.pth"
    for callback in _state(folder).get("stateful_callbacks", {}).values():
        for saved in callback if isinstance(callback, list) else [callback]:
            for rank in range(saved.get("attributes", {}).get("num_memory_files", 0)):
                if not memory_file(folder, rank).is_file():
                    return f"no {memory_file(folder, rank).name}, the memory of its document streams"
                if rank not in ranks:
                    return f"no rng_state_{rank}.pth"
    return None


def _random_states(folder: Path) -> list[int]:
    matches = [match for path in folder.iterdir() if (match := _RANDOM_STATE.fullmatch(path.name))]
    return sorted(int(match[1] or 0) for match in matches)


def _fault_of_file(path: Path) -> str | None:
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt"):
                return None
        except (SafetensorError, OSError):
            return f"{path.name} is cut short or damaged"
    if path.suffix in (".pt", ".pth", ".bin") and path.name != "training_args.bin":
        try:
            # The table of contents, at the end of what torch.save writes.
            with zipfile.ZipFile(path):
                return None
        except zipfile.BadZipFile:
            return f"{path.name} is cut short or damaged"
    return None


__all__ = ["WholeCheckpointsCallback", "checkpoint_fault", "checkpoint_world_size", "last_complete_checkpoint"]
