"""The model card of a training run, written beside the model."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCard
from transformers import Trainer

from hf_longmem._version import __version__
from hf_longmem.hub.cards import CardFacts, name_on_hub, write_card
from hf_longmem.models.auto import MODEL_TYPES

_SECRET = ("--hub_token", "--hub-token", "--push_to_hub_token", "--push-to-hub-token")


def write_training_card(
    trainer: Trainer,
    arguments: Sequence[str],
    *,
    data: str,
    datasets: Sequence[str] = (),
    metrics: Mapping[str, float],
    unit: str = "token",
) -> Path | None:
    """Write what a run of `longmem train` was and gave as ``README.md`` in its output folder; push it if the run does.

    Args:
        trainer: the trainer, after training and saving.
        arguments: the command line after ``longmem train``; a token in it is not written.
        data: what the model was trained on; the first line names it.
        datasets: names of the data sets on the Hub.
        metrics: the results, by the names that `model_card` knows.
        unit: what bits are counted per.

    Returns:
        The card's file; None for a model of another package, whose card stays Trainer's.
    """
    model: Any = trainer.model
    if model.config.model_type not in MODEL_TYPES:
        return None
    folder = Path(str(trainer.args.output_dir))
    repository = trainer.hub_model_id if trainer.args.push_to_hub else None
    facts = CardFacts(
        name=repository.rpartition("/")[2] if repository else folder.resolve().name,
        path=repository,
        num_parameters=model.num_parameters(),
        data=data,
        datasets=tuple(datasets),
        base_model=name_on_hub(getattr(model.config, "base_model_name_or_path", None)),
        command=shlex.join(["longmem", "train", *_without_secrets(arguments)]),
        unit=unit,
        training=trainer.args,
        metrics=dict(metrics),
        tokenizer=trainer.processing_class is not None,
        date=str(datetime.date.today()),
        machine=machine(),
        versions=versions(),
    )
    file = write_card(folder, facts)
    if repository:
        ModelCard.load(file).push_to_hub(repository, token=trainer.args.hub_token)
    return file


def versions() -> str:
    """Versions of what computes."""
    return f"hf-longmem {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"


def machine() -> str:
    """Processor or accelerator, cores and threads."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = platform.processor() or platform.machine()
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
        device = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), device)
    return f"{device}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {platform.system()}"


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if kept and kept[-1] in _SECRET:
            argument = "..."
        elif equals and name in _SECRET:
            argument = f"{name}=..."
        kept.append(argument)
    return kept


__all__ = ["machine", "versions", "write_training_card"]
