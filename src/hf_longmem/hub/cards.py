"""Model cards: what a checkpoint is, how it was made, what was measured, and what to know before using it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig

from hf_longmem._errors import complaint
from hf_longmem.hub.card_texts import TEXTS, ModelText
from hf_longmem.hub.folders import open_safetensors, weight_files
from hf_longmem.models.auto import MODEL_TYPES, model_classes

CARD = "README.md"
_TEMPLATE = "model_card_template.md"
_TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}
# By their names in TrainingArguments: what a reader needs to run the training again.
_TRAINING = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "adam_beta2",
    "optim",
    "bf16",
    "fp16",
    "seed",
)
# Metrics of `longmem train` and of transformers: title, format, whether it is about memory and speed.
_METRICS: dict[str, tuple[str, str, bool]] = {
    "bits_before": ("held-out bits per {unit}, before training", "{:.3f}", False),
    "bits": ("held-out bits per {unit}", "{:.3f}", False),
    "eval_loss": ("held-out loss, nats per token", "{:.4f}", False),
    "perplexity": ("held-out perplexity", "{:.2f}", False),
    "eval_accuracy": ("held-out accuracy", "{:.4f}", False),
    "train_loss": ("mean training loss, nats per token", "{:.4f}", False),
    "tokens_per_second": ("training, tokens per second", "{:,.0f}", True),
    "train_seconds": ("training, seconds", "{:,.0f}", True),
    "train_runtime": ("training, seconds", "{:,.0f}", True),
    "peak_memory": ("peak memory of the process", "{gib:.2f} GiB", True),
    "peak_memory_cuda": ("peak memory on the accelerator", "{gib:.2f} GiB", True),
}


@dataclass(frozen=True)
class CardFacts:
    """What a card tells beyond the config; all of it may be left out, and the card then says so.

    Attributes:
        name: of the model, as its title.
        path: what to pass to ``from_pretrained``; default ``name``.
        notes: a paragraph of one's own.
        num_parameters: parameters of the model.
        data: what it was trained on, its name in the first line.
        datasets, language, license, base_model: as the Hub's metadata names them.
        command: the one that made the model.
        measured_by: the command that measured the results; default ``command``.
        unit: what bits are counted per, ``"token"`` or ``"byte"``.
        training: fields of ``TrainingArguments``, as a mapping or as that object.
        metrics: numbers by name, as `longmem train` and Trainer name them.
        tokenizer: whether one is saved with the model.
        date, machine, versions: when, where and with what it was measured.
    """

    name: str
    path: str | None = None
    notes: str | None = None
    num_parameters: int | None = None
    data: str | None = None
    datasets: tuple[str, ...] = ()
    language: str | None = None
    license: str | None = None
    base_model: str | None = None
    command: str | None = None
    measured_by: str | None = None
    unit: str = "token"
    training: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    tokenizer: bool = True
    date: str | None = None
    machine: str | None = None
    versions: str | None = None


def model_card(config: PreTrainedConfig, facts: CardFacts) -> ModelCard:
    """Fill the package's template from a model's config, its training arguments and what was measured.

    Args:
        config: the config of a model of this package.
        facts: everything that a config does not know.

    Returns:
        ModelCard: of huggingface_hub, with metadata that its ``validate()`` accepts.

    Raises:
        ValueError: the config is of another package; a metric is no finite number.
    """
    if config.model_type not in MODEL_TYPES:
        rule = f"model_card describes models of this package ({', '.join(MODEL_TYPES)})"
        raise ValueError(complaint(rule, repr(config.model_type), "write this card by hand"))
    if not isinstance(facts.metrics, Mapping):
        raise ValueError(complaint("metrics must be numbers by name", repr(facts.metrics), "write {name: number}"))
    for name, value in facts.metrics.items():
        if not _is_number(value):
            raise ValueError(complaint(f"metric {name} must be a finite number", value, "leave it out"))
    text = TEXTS[config.model_type]
    auto_class = _auto_class(config)
    measured_by = facts.measured_by or (facts.command if facts.metrics else None)
    results, speed = _measured(facts)
    return ModelCard.from_template(
        _metadata(config, facts, text, auto_class),
        template_str=resources.files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8"),
        name=facts.name,
        path=json.dumps(str(facts.path or facts.name), ensure_ascii=False),  # a literal in Python too
        about=text.about,
        notes=facts.notes,
        facts=_architecture(config, facts, text),
        auto_class=auto_class,
        tokenizer=facts.tokenizer,
        data=facts.data,
        command=facts.command,
        training=_training(facts.training),
        results=results,
        measured_by=measured_by,
        date=facts.date,
        versions=facts.versions,
        speed=speed,
        machine=facts.machine,
        limits=text.limits,
        citation=text.citation,
    )


def write_card(folder: str | Path, facts: CardFacts | None = None) -> Path:
    """Write the card of the checkpoint in ``folder`` as its ``README.md``, replacing one that is there.

    Args:
        folder: with a ``config.json`` of this package.
        facts: what the card tells; default, what is found in the folder (its name, and Trainer's results).

    Raises:
        ValueError: the checkpoint is of another package.
        OSError: there is no checkpoint.
    """
    folder = Path(folder)
    config = AutoConfig.from_pretrained(folder)
    file = folder / CARD
    model_card(config, facts or facts_of_folder(folder)).save(file)
    return file


def facts_of_folder(folder: str | Path, *, results: str | Path | None = None) -> CardFacts:
    """What a checkpoint's folder tells by itself: its name, its tokenizer, its size, its base, and what was measured.

    Args:
        folder: the checkpoint.
        results: another folder where `longmem train` or Trainer has left ``all_results.json``.
    """
    folder = Path(folder)
    file = Path(results or folder) / "all_results.json"
    metrics = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not isinstance(metrics, dict):
        raise ValueError(complaint(f"{file} must hold numbers by name", f"a {type(metrics).__name__}", "remove it"))
    saved, _ = PreTrainedConfig.get_config_dict(folder)
    return CardFacts(
        name=folder.resolve().name,
        num_parameters=_count_parameters(folder),
        base_model=name_on_hub(saved.get("base_model_name_or_path")) if isinstance(saved, dict) else None,
        metrics={name: value for name, value in metrics.items() if name in _METRICS and _is_number(value)},
        unit="byte",  # what `longmem train` counts bits per
        tokenizer=(folder / "tokenizer_config.json").is_file(),
    )


def name_on_hub(name: str | None) -> str | None:
    """Give the name of a model if it is one on the Hub; None for a folder and for no name."""
    if not name or Path(name).exists():
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def render_recipe(recipe: str | Path) -> str:
    """Give the card of a recipe: a JSON file with ``config``, the fields of a model's config, and those of `CardFacts`.

    Raises:
        ValueError: it is no such file, or names something else.
        OSError: it cannot be read.
    """
    recipe = Path(recipe)
    content = json.loads(recipe.read_text(encoding="utf-8"))
    known = {f.name for f in fields(CardFacts)}
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict) or not content.get("name"):
        raise ValueError(complaint(f"{recipe} must hold a config and a name", "neither or one", "add them"))
    unknown = sorted(set(content) - known - {"config"})
    if unknown:
        rule = f"{recipe} may hold config and {', '.join(sorted(known))}"
        raise ValueError(complaint(rule, ", ".join(unknown), "leave it out"))
    config = dict(content.pop("config"))
    model_type = config.pop("model_type", None)
    if model_type not in MODEL_TYPES:
        rule = f"the config in {recipe} must have a model_type of {', '.join(MODEL_TYPES)}"
        raise ValueError(complaint(rule, repr(model_type), "add it"))
    return str(model_card(AutoConfig.for_model(model_type, **config), CardFacts(**content)))


def _auto_class(config: PreTrainedConfig) -> str:
    """The Auto class of the checkpoint's architecture; for one that does not say, the causal language model's."""
    by_name = {name: auto for auto, (_, name) in model_classes(config.model_type).items()}
    return by_name.get((config.architectures or [""])[0], "AutoModelForCausalLM")


def _metadata(config: PreTrainedConfig, facts: CardFacts, text: ModelText, auto_class: str) -> ModelCardData:
    task = _TASKS.get(auto_class)
    results = []
    if task and facts.data and "bits" in facts.metrics:
        name = facts.datasets[0] if facts.datasets else facts.data.splitlines()[0].rstrip(".")
        results.append(
            EvalResult(
                task_type=task,
                dataset_type=facts.datasets[0] if facts.datasets else "text",
                dataset_name=name,
                dataset_split="held out",
                metric_type=f"bits_per_{facts.unit}",
                metric_name=f"bits per {facts.unit}",
                metric_value=round(facts.metrics["bits"], 4),
            )
        )
    return ModelCardData(
        language=facts.language,
        license=facts.license,
        library_name="transformers",
        pipeline_tag=task,
        base_model=facts.base_model,
        datasets=list(facts.datasets) or None,
        tags=["hf-longmem", config.model_type, *text.tags],
        model_name=facts.name if results else None,
        eval_results=results or None,
    )


def _architecture(config: PreTrainedConfig, facts: CardFacts, text: ModelText) -> list[tuple[str, str]]:
    rows = [("architecture", f"`{config.model_type}`")]
    if facts.num_parameters is not None:
        rows.append(("parameters", f"{facts.num_parameters:,}"))
    if facts.base_model is not None:
        rows.append(("made from", f"`{facts.base_model}`"))
    values = ((name, _field(config, name)) for name in text.config_fields)
    return rows + [(f"`{name}`", f"`{_spelled(value)}`") for name, value in values if value is not None]


def _field(config: Any, name: str) -> Any:
    """A field of a config, or by ``part.field`` one of a config within; None where there is none."""
    for part in name.split("."):
        config = getattr(config, part, None)
    return config


def _training(arguments: Any) -> list[tuple[str, str]]:
    values = arguments if isinstance(arguments, Mapping) else vars(arguments) if arguments is not None else {}
    rows = []
    for name in _TRAINING:
        value = values.get(name)
        if value is None or value is False or (name == "max_steps" and value <= 0):
            continue
        rows.append((f"`{name}`", _spelled(getattr(value, "value", value))))
    return rows


def _measured(facts: CardFacts) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    results, speed = list[tuple[str, str]](), list[tuple[str, str]]()
    known = [name for name in _METRICS if name in facts.metrics]
    for name in (*known, *sorted(set(facts.metrics) - set(known))):
        title, pattern, is_speed = _METRICS.get(name, (name.replace("_", " "), "{:.4g}", False))
        value = facts.metrics[name]
        row = (title.format(unit=facts.unit), pattern.format(value, gib=value / 2**30))
        (speed if is_speed else results).append(row)
    return results, speed


def _count_parameters(folder: Path) -> int | None:
    """How many numbers the weights in a folder are, by their files' headers."""
    total = 0
    for file in weight_files(folder):
        with open_safetensors(file) as weights:
            total += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return total or None


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _spelled(value: Any) -> str:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return str(value)


__all__ = ["CARD", "CardFacts", "facts_of_folder", "model_card", "name_on_hub", "render_recipe", "write_card"]
