"""What the arguments of `longmem train` stand for: documents, tokenizer, model, prompt, the checkpoint to resume."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_longmem._errors import complaint
from hf_longmem.cli import first_run
from hf_longmem.cli.arguments import (
    DataArguments,
    LanguageModelingArguments,
    ModelArguments,
    RunArguments,
)
from hf_longmem.cli.errors import CommandError, user_mistakes
from hf_longmem.data.text import load_documents, python_documents, read_documents, split_documents
from hf_longmem.training.checkpoints import checkpoint_fault, checkpoint_world_size, last_complete_checkpoint

PROMPT_TOKENS = 256
NEW_TOKENS = 200
# Where a model with a memory has its settings; they are its checkpoint's.
_WITH_MEMORY = "memory_augmented"


def checkpoint_to_resume(training: LanguageModelingArguments, run_arguments: RunArguments) -> str | None:
    """Refuse an output directory with something in it, unless the user asked to go on there."""
    output = Path(str(training.output_dir))
    resume = training.resume_from_checkpoint
    if resume is not None and resume.lower() not in ("true", "false"):
        if not (Path(resume) / "trainer_state.json").is_file():
            raise CommandError(
                complaint("resume_from_checkpoint must be a checkpoint folder", resume, "it has no trainer_state.json")
            )
        fault = checkpoint_fault(resume)
        if fault is not None:
            fix = "name another, or begin from its weights with --model_name_or_path"
            raise CommandError(complaint(f"{resume} must be whole to resume", fault, fix))
        return _of_as_many_processes(resume, training)
    if resume is not None and resume.lower() == "true":
        with user_mistakes(ValueError):
            last = last_complete_checkpoint(output)
        if last is None:
            raise CommandError(
                complaint(f"{output} must hold a checkpoint to resume", "none", "train without resuming")
            )
        return _of_as_many_processes(last, training)
    if output.exists() and not output.is_dir():
        raise CommandError(complaint("output_dir must be a directory", output, "name another --output_dir"))
    if training.do_train and not run_arguments.overwrite and output.is_dir() and any(output.iterdir()):
        fix = "name another --output_dir, or pass --overwrite or --resume_from_checkpoint true"
        raise CommandError(complaint("output_dir must be empty", f"{output} with files in it", fix))
    return None


def _of_as_many_processes(checkpoint: str, training: LanguageModelingArguments) -> str:
    # Trainer would go on, and skip too much of the data or too little.
    processes = checkpoint_world_size(checkpoint)
    if processes != training.world_size:
        fix = f"start {processes}, or begin from its weights with --model_name_or_path {checkpoint}"
        rule = f"{checkpoint} was written by {processes} processes and goes on with as many"
        raise CommandError(complaint(rule, training.world_size, fix))
    return checkpoint


def documents(data: DataArguments) -> DatasetDict:
    if data.text is not None and data.dataset is not None:
        raise CommandError(complaint("the text comes from one place", "text and dataset", "give one of the two"))
    with user_mistakes(ValueError, OSError, DatasetsError):
        if data.dataset is not None:
            return load_documents(
                data.dataset,
                data.dataset_config,
                text_column=data.text_column,
                held_out_fraction=data.held_out_fraction,
            )
        documents = python_documents() if data.text is None else read_documents(data.text)
        return split_documents(documents, data.held_out_fraction)


def description(data: DataArguments) -> tuple[str, list[str]]:
    """Where the text is from, in one line for people, and the names of data sets on the Hub."""
    if data.dataset is not None:
        config = f" ({data.dataset_config})" if data.dataset_config else ""
        on_hub = not Path(data.dataset).exists()
        name = data.dataset if on_hub else Path(data.dataset).name
        return f"The data set {name}{config}.", [name] if on_hub else []
    if data.text is not None:
        return f"The text files {', '.join(Path(text).name for text in data.text)}.", []
    return "Python's own documentation and standard library.", []


def tokenizer(model_arguments: ModelArguments) -> PreTrainedTokenizerBase:
    source = model_arguments.tokenizer_name or model_arguments.model_name_or_path
    if source is None:
        return ByT5Tokenizer()
    with user_mistakes(OSError, ValueError, prefix=f"tokenizer {source}: "):
        tokenizer = AutoTokenizer.from_pretrained(source)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def model(model_arguments: ModelArguments, data: DataArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    name = model_arguments.model_name_or_path
    given = model_arguments.config_values()
    mistakes = (ValueError, TypeError, AttributeError, OSError, RuntimeError, SafetensorError, StrictDataclassError)
    if name is None:
        kind = model_arguments.model_type
        if kind not in CONFIG_MAPPING:
            raise CommandError(complaint("model_type must be known to transformers", kind, "for instance reformer_lsh"))
        _refuse_unknown(given, CONFIG_MAPPING[kind])
        values = {
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }
        if hasattr(CONFIG_MAPPING[kind](), "max_position_embeddings"):
            values["max_position_embeddings"] = data.sequence_length
        with user_mistakes(*mistakes):
            config = AutoConfig.for_model(kind, **(values | first_run.CONFIG.get(kind, {}) | given))
            model = AutoModelForCausalLM.from_config(config)
    else:
        with user_mistakes(*mistakes, prefix=f"{name}: "):
            config = AutoConfig.from_pretrained(name)
            _refuse_unknown(given, type(config))
            config = AutoConfig.from_pretrained(name, **given)
            model = AutoModelForCausalLM.from_pretrained(name, config=config)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and data.sequence_length > longest:
        raise CommandError(
            complaint(
                "sequence_length must not exceed max_position_embeddings",
                f"{data.sequence_length} > {longest}",
                f"use --sequence_length {longest} or less",
            )
        )
    if len(tokenizer) > config.vocab_size:
        raise CommandError(
            complaint(
                "vocab_size must cover the tokenizer", f"{config.vocab_size} < {len(tokenizer)}", "use its tokenizer"
            )
        )
    return model


def _refuse_unknown(given: dict[str, Any], config_class: Any) -> None:
    default = config_class()
    for name in given:
        if default.model_type == _WITH_MEMORY and _is_fixed(name, default):
            rule = f"a {_WITH_MEMORY} checkpoint fixes the sizes of its model and the settings of its memory"
            raise CommandError(complaint(rule, name, "leave it out, or make another with add_long_term_memory"))
        if not hasattr(default, name):
            raise CommandError(complaint(f"{default.model_type} models have no such setting", name, "leave it out"))


def _is_fixed(name: str, config: Any) -> bool:
    inner = getattr(type(config), name, None)
    return hasattr(config.memory_config, name) or (isinstance(inner, property) and inner.fset is None)


def prompt(
    run_arguments: RunArguments, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, held_out: list[int]
) -> tuple[torch.Tensor, int]:
    """The tokens to continue, of shape [1, T], and how many to generate; checked before the time that training takes.

    By default both fit the model: the prompt is the start of the held-out text, or of its first document.
    """
    longest = getattr(model.config, "max_position_embeddings", None)
    asked = run_arguments.max_new_tokens
    if run_arguments.prompt is None:
        most = NEW_TOKENS if longest is None else min(NEW_TOKENS, longest // 2)
        room = PROMPT_TOKENS if longest is None else min(PROMPT_TOKENS, longest - (most if asked is None else asked))
        tokens = _first_document(held_out, tokenizer)[: max(room, 0)]
    else:
        tokens = tokenizer(run_arguments.prompt, add_special_tokens=False)["input_ids"]
        most = NEW_TOKENS if longest is None else max(min(NEW_TOKENS, longest - len(tokens)), 1)
    new = most if asked is None else asked
    if not tokens or (longest is not None and len(tokens) + new > longest):
        rule = f"a prompt of at least one token and max_new_tokens must fit max_position_embeddings, {longest}"
        raise CommandError(complaint(rule, f"{len(tokens)} and {new}", "change --prompt or --max_new_tokens"))
    return torch.tensor([tokens]), new


def _first_document(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What stands before the mark that ends a document, and after those that end empty ones."""
    text = itertools.dropwhile(lambda token: token == tokenizer.eos_token_id, tokens)
    return list(itertools.takewhile(lambda token: token != tokenizer.eos_token_id, text))
