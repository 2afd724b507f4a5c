"""The arguments of `longmem train`: three groups of our own, and all of transformers' `TrainingArguments`."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser, TrainingArguments

from hf_longmem._errors import complaint
from hf_longmem.cli.errors import CommandError, CommandParser, user_mistakes
from hf_longmem.cli.first_run import BUILT_IN_EVAL_TOKENS, BUILT_IN_TRAIN_TOKENS, FLAGS


def _help(text: str, default: str = "the checkpoint's, or that of the model type") -> dict[str, str]:
    """The help of a field whose own default is None; it says what holds then, instead of None."""
    return {"help": f"{text} (default: {default})%(default).0s"}


@dataclass
class ModelArguments:
    """Which model to train. A field left out keeps the value of the checkpoint, or the default of the model type."""

    _argument_group_name = "model"

    model_name_or_path: str | None = field(
        default=None, metadata=_help("Continue from this checkpoint, a folder or a name on the Hub.", "none")
    )
    model_type: str = field(
        default="reformer_lsh",
        metadata={
            "help": "Without a checkpoint: train this architecture from scratch; reformer_lsh, infinite_former, or any "
            "other model type of transformers."
        },
    )
    tokenizer_name: str | None = field(
        default=None, metadata=_help("A tokenizer's folder or name.", "the checkpoint's, or else bytes (ByT5)")
    )
    hidden_size: int | None = field(default=None, metadata=_help("Width of the model."))
    num_hidden_layers: int | None = field(
        default=None, metadata=_help("Layers; of reformer_lsh, attn_layers says how many.")
    )
    num_attention_heads: int | None = field(default=None, metadata=_help("Heads."))
    feed_forward_size: int | None = field(default=None, metadata=_help("Width inside a feed-forward layer."))
    position_embedding_type: str | None = field(
        default=None, metadata=_help("Of reformer_lsh axial, learned or rotary; of infinite_former rotary or relative.")
    )
    max_position_embeddings: int | None = field(
        default=None,
        metadata=_help(
            "Longest sequence the model can read, where it has a limit.", "the checkpoint's, or sequence_length"
        ),
    )
    attn_layers: list[str] | None = field(
        default=None, metadata=_help("reformer_lsh: attention of each layer, for instance: local lsh local lsh.")
    )
    num_hashes: int | None = field(default=None, metadata=_help("reformer_lsh: hash rounds."))
    num_buckets: int | None = field(default=None, metadata=_help("reformer_lsh: hash buckets of a round, even."))
    lsh_attn_chunk_length: int | None = field(
        default=None, metadata=_help("reformer_lsh: chunk length of LSH attention.")
    )
    local_attn_chunk_length: int | None = field(
        default=None, metadata=_help("reformer_lsh: chunk length of local attention.")
    )
    segment_length: int | None = field(
        default=None, metadata=_help("infinite_former: tokens that are written to the memory at once.")
    )
    short_term_window: int | None = field(
        default=None, metadata=_help("infinite_former: tokens before its segment that a token attends to directly.")
    )
    num_basis: int | None = field(default=None, metadata=_help("infinite_former: basis functions of a memory."))
    num_samples: int | None = field(
        default=None, metadata=_help("infinite_former: at how many points the past is sampled when it is contracted.")
    )
    memory_layers: list[int] | None = field(
        default=None, metadata=_help("infinite_former: which layers have a memory, for instance: 1 3.")
    )
    memory_decay: str | None = field(
        default=None, metadata=_help("infinite_former: share of the line that the past keeps at a write, or uniform.")
    )
    sticky_memories: bool | None = field(
        default=None, metadata=_help("infinite_former: true samples the past where attention went.")
    )
    memory_kl_weight: float | None = field(
        default=None, metadata=_help("infinite_former: weight of the memory's regulariser in the loss.")
    )
    bptt_segments: int | None = field(
        default=None, metadata=_help("infinite_former: segments that gradients flow through.")
    )
    config_overrides: list[str] | None = field(
        default=None,
        metadata=_help(
            "Any other fields of the config, as NAME=VALUE, for instance: round_merge=sum reversible=false.", "none"
        ),
    )

    def config_values(self) -> dict[str, Any]:
        """The config fields that were given, by name."""
        own = ("model_name_or_path", "model_type", "tokenizer_name", "config_overrides")
        flags = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in own}
        values = {name: value for name, value in flags.items() if value is not None}
        if self.memory_decay is not None:
            # A number, or a word.
            values["memory_decay"] = yaml.safe_load(self.memory_decay)
        for override in self.config_overrides or ():
            name, equals, value = override.partition("=")
            if not equals or not name:
                raise CommandError(
                    complaint("config_overrides must be NAME=VALUE", override, "for instance num_hashes=8")
                )
            with user_mistakes(yaml.YAMLError, prefix=f"config_overrides {name}: "):
                values[name] = yaml.safe_load(value)
        return values


@dataclass
class DataArguments:
    """Which text to train on. The default is Python's own documentation and standard library."""

    _argument_group_name = "data"

    text: list[str] | None = field(
        default=None,
        metadata=_help(
            "Text files in UTF-8, one document each; whole ones are held out, of a single one its end.",
            "Python's own text",
        ),
    )
    dataset: str | None = field(
        default=None, metadata=_help("A text data set: a name on the Hub, or a folder (datasets library).", "none")
    )
    dataset_config: str | None = field(default=None, metadata=_help("The data set's configuration.", "its own"))
    text_column: str = field(default="text", metadata={"help": "The data set's column with the text."})
    streams: bool | None = field(
        default=None,
        metadata=_help(
            "true reads documents whole, piece by piece, and the memory goes from one training step to the next; false "
            "joins documents and cuts them into sequences.",
            "true for models with a memory",
        ),
    )
    sequence_length: int = field(
        default=4096,
        metadata={
            "help": "Tokens of a training sequence; of streams, of a row in a step, and 256 for infinite_former."
        },
    )
    held_out_fraction: float = field(default=0.05, metadata={"help": "Part of the documents to hold out."})
    max_train_samples: int | None = field(
        default=None,
        metadata=_help("Most sequences to train on.", f"all, of the built-in text {BUILT_IN_TRAIN_TOKENS:,} tokens"),
    )
    max_eval_samples: int | None = field(
        default=None,
        metadata=_help("Most sequences to evaluate on.", f"all, of the built-in text {BUILT_IN_EVAL_TOKENS:,} tokens"),
    )

    def __post_init__(self) -> None:
        for name in ("sequence_length", "max_train_samples", "max_eval_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(complaint(f"{name} must be at least 1", value, "use a positive number"))


@dataclass
class RunArguments:
    """What happens around training."""

    _argument_group_name = "run"

    overwrite: bool = field(
        default=False,
        metadata={"help": "Write into an output_dir that is not empty, replacing files of the same name."},
    )
    prompt: str | None = field(
        default=None, metadata=_help("Text to continue at the end.", "the start of the held-out text")
    )
    max_new_tokens: int | None = field(
        default=None,
        metadata=_help("Tokens to generate at the end; 0 generates nothing.", "200, at most half of its positions"),
    )


def _default(name: str, value: Any) -> Any:
    """The field of TrainingArguments with another default, and the same help."""
    return field(default=value, metadata=dict(TrainingArguments.__dataclass_fields__[name].metadata))


@dataclass
class LanguageModelingArguments(TrainingArguments):
    """TrainingArguments with defaults for a small model and long sequences."""

    _argument_group_name = "training: every argument of transformers' TrainingArguments"

    output_dir: str | None = _default("output_dir", "longmem-demo")
    do_train: bool = _default("do_train", True)
    do_eval: bool = _default("do_eval", True)
    per_device_train_batch_size: int = _default("per_device_train_batch_size", 1)
    per_device_eval_batch_size: int = _default("per_device_eval_batch_size", 1)
    num_train_epochs: float = _default("num_train_epochs", 1.0)
    learning_rate: float = _default("learning_rate", 3e-3)
    lr_scheduler_type: str = _default("lr_scheduler_type", "cosine")
    warmup_steps: float = _default("warmup_steps", 0.05)
    weight_decay: float = _default("weight_decay", 0.1)
    adam_beta2: float = _default("adam_beta2", 0.95)
    logging_steps: float = _default("logging_steps", 50)
    save_total_limit: int | None = _default("save_total_limit", 2)
    include_num_input_tokens_seen: str | bool = _default("include_num_input_tokens_seen", True)
    dataloader_pin_memory: bool = _default("dataloader_pin_memory", False)


_RANGES = (
    ("per_device_train_batch_size", 1, math.inf),
    ("per_device_eval_batch_size", 1, math.inf),
    ("gradient_accumulation_steps", 1, math.inf),
    ("dataloader_num_workers", 0, math.inf),
    ("learning_rate", 0, math.inf),
    # What NumPy takes.
    ("seed", 0, 2**32 - 1),
    ("data_seed", 0, 2**32 - 1),
)


class _Parser(CommandParser, HfArgumentParser):
    """HfArgumentParser whose complaints are the command's."""


def parse(arguments: Sequence[str]) -> tuple[ModelArguments, DataArguments, RunArguments, LanguageModelingArguments]:
    """Parse the command line of `longmem train`.

    The first argument may be a ``.json``, ``.yaml`` or ``.yml`` file, with the flags' names; flags after it win.

    Raises:
        CommandError: an argument is unknown or has a wrong value, or the file cannot be read.
    """
    groups: tuple[Any, ...] = (ModelArguments, DataArguments, RunArguments, LanguageModelingArguments)
    parser = _Parser(
        list(groups),
        prog="longmem train",
        usage="longmem train [FILE.json|FILE.yaml] [--ARGUMENT VALUE ...]",
        description="Train a causal language model on text with the stock Trainer, evaluate it on held-out documents "
        "before and after, save it, check that the saved model gives the same loss, and generate a continuation.",
        allow_abbrev=False,
    )
    arguments = list(arguments)
    if arguments and arguments[0].endswith((".json", ".yaml", ".yml")):
        arguments = _flags_of_file(Path(arguments[0])) + arguments[1:]
    chosen, _ = parser.parse_known_args(arguments)
    if chosen.model_name_or_path is None:
        parser.set_defaults(**FLAGS.get(chosen.model_type, {}))
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [f.name for group in groups for f in dataclasses.fields(group) if f.init]
        near = difflib.get_close_matches(unknown[0].split("=")[0].lstrip("-").replace("-", "_"), known, n=1)
        hint = f"did you mean --{near[0]}?" if near else "see longmem train --help"
        raise CommandError(f"unknown argument {unknown[0]}; {hint}")
    values = vars(namespace)
    with user_mistakes(ValueError, TypeError, ImportError):
        model, data, run, training = (
            group(**{f.name: values[f.name] for f in dataclasses.fields(group) if f.init}) for group in groups
        )
    _check_ranges(training)
    return model, data, run, training


def _check_ranges(training: TrainingArguments) -> None:
    """Of values that `TrainingArguments` takes as they are, and that something would trip over later."""
    for name, least, most in _RANGES:
        value = getattr(training, name)
        if value is not None and not least <= value <= most:
            rule = f"{name} must be {f'at least {least}' if most == math.inf else f'from {least} to {most}'}"
            raise CommandError(complaint(rule, value, "see longmem train --help"))


def _flags_of_file(path: Path) -> list[str]:
    # Spelled as flags, so that a value in a file is read, checked and complained about exactly as on the command line.
    with user_mistakes(OSError, UnicodeDecodeError, ValueError, yaml.YAMLError, prefix=f"{path}: "):
        content = path.read_text(encoding="utf-8")
        values = json.loads(content) if path.suffix == ".json" else yaml.safe_load(content)
    if not isinstance(values, dict):
        raise CommandError(
            complaint(f"{path} must hold names and values", type(values).__name__, "write NAME: VALUE lines")
        )
    flags: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        items = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        flags += [f"--{name}", *map(str, items)]
    return flags
