"""What `longmem train` trains on: documents as packed sequences, or as streams for models with a memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from datasets import DatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from hf_longmem._errors import complaint
from hf_longmem.cli.arguments import DataArguments, LanguageModelingArguments
from hf_longmem.cli.errors import CommandError, user_mistakes
from hf_longmem.cli.first_run import BUILT_IN_EVAL_TOKENS, BUILT_IN_TRAIN_TOKENS
from hf_longmem.data.collators import DataCollatorForLongSequences
from hf_longmem.data.stream_collator import DataCollatorForStreams
from hf_longmem.data.streams import DocumentStreams
from hf_longmem.data.text import pack_documents, tokenize_documents


class TrainingData(NamedTuple):
    """What goes into Trainer.

    train, held_out: data sets.
    collator: makes batches of either.
    streams: whether they are document streams.
    num_tokens: how many tokens of text each of the two has.
    beginning: the first tokens of the held-out text.
    """

    train: Any
    held_out: Any
    collator: Any
    streams: bool
    num_tokens: tuple[int, int]
    beginning: list[int]


def training_data(
    documents: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    data: DataArguments,
    training: LanguageModelingArguments,
) -> TrainingData:
    """Tokenise the documents and arrange them; settings of Trainer that streams ask for are made.

    Raises:
        CommandError: the settings do not fit together, or a part of the text is too short to predict a token of it.
    """
    has_memory = "memory" in inspect.signature(model.forward).parameters
    if data.streams and not has_memory:
        rule = "document streams need a model with a memory"
        raise CommandError(complaint(rule, model.config.model_type, "leave --streams out"))
    length = data.sequence_length
    built_in = data.text is None and data.dataset is None
    most_train, most_held_out = (
        samples if samples is not None or not built_in else max(1, tokens // length)
        for samples, tokens in (
            (data.max_train_samples, BUILT_IN_TRAIN_TOKENS),
            (data.max_eval_samples, BUILT_IN_EVAL_TOKENS),
        )
    )
    # The held-out text in one order whatever the seed, so that runs are compared on the same text.
    seed = training.seed if training.data_seed is None else training.data_seed
    parts = (("train", most_train, seed), ("held_out", most_held_out, 0))
    with user_mistakes(ValueError):
        if has_memory and data.streams is not False:
            return _streams(documents, tokenizer, length, parts, training)
        train, held_out = (
            pack_documents(documents[name], tokenizer, length, max_sequences=most, seed=drawn)
            for name, most, drawn in parts
        )
    _check_predictions(train["input_ids"], held_out["input_ids"], tokenizer, training)
    return TrainingData(
        train,
        held_out,
        DataCollatorForLongSequences(tokenizer),
        streams=False,
        num_tokens=(sum(map(len, train["input_ids"])), sum(map(len, held_out["input_ids"]))),
        beginning=held_out[0]["input_ids"],
    )


def _streams(
    documents: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    parts: tuple[tuple[str, int | None, int], ...],
    training: LanguageModelingArguments,
) -> TrainingData:
    if training.dataloader_num_workers:
        rule = "document streams are read in the process that trains"
        received = f"dataloader_num_workers {training.dataloader_num_workers}"
        raise CommandError(complaint(rule, received, "leave it out"))
    training.train_sampling_strategy = "sequential"
    training.label_names = ["shift_labels"]
    train, held_out = (
        tokenize_documents(documents[name], tokenizer, max_tokens=None if most is None else most * length, seed=drawn)
        for name, most, drawn in parts
    )
    _check_predictions(train, held_out, tokenizer, training)
    batch_sizes = (training.per_device_train_batch_size, training.per_device_eval_batch_size)
    streams = [
        DocumentStreams(
            tokens, batch_size=batch_size, sequence_length=length, world_size=training.world_size, balanced=True
        )
        for tokens, batch_size in zip((train, held_out), batch_sizes, strict=True)
    ]
    return TrainingData(
        streams[0],
        streams[1],
        DataCollatorForStreams(pad_token_id=tokenizer.pad_token_id or 0),
        streams=True,
        num_tokens=(sum(map(len, train)), sum(map(len, held_out))),
        beginning=held_out[0].tolist(),
    )


def _check_predictions(
    train: Iterable[Any], held_out: Iterable[Any], tokenizer: PreTrainedTokenizerBase, training: TrainingArguments
) -> None:
    for name, rows, used in (("training", train, training.do_train), ("held-out", held_out, training.do_eval)):
        # The first token of a row is not predicted, and a mark of the end stands for no text.
        if used and not any((np.asarray(row[1:]) != tokenizer.eos_token_id).any() for row in rows):
            rule = f"the {name} text must have two tokens one after another, to predict the second"
            fix = "give more text, or change --held_out_fraction or --sequence_length"
            raise CommandError(complaint(rule, "fewer", fix))
