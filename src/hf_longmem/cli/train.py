"""`longmem train`: train a causal language model on text, evaluate, save, check what was saved, generate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    get_scheduler,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME

import hf_longmem  # noqa: F401 (registers the architectures)
from hf_longmem.cli import inputs
from hf_longmem.cli.arguments import parse
from hf_longmem.cli.errors import CommandError, user_mistakes
from hf_longmem.cli.training_data import TrainingData, training_data
from hf_longmem.hub.training_card import write_training_card
from hf_longmem.training.callbacks import StreamMemoryCallback
from hf_longmem.training.checkpoints import WholeCheckpointsCallback
from hf_longmem.training.evaluate_metrics import BitsPerByte, token_nll
from hf_longmem.training.log_metrics import LogMetricsCallback
from hf_longmem.training.peak_memory import peak_memory

# Bits: a reloaded model must give the loss it had; far above float noise, far below any real difference.
SAME_LOSS = 1e-4


def run(arguments: Sequence[str]) -> None:
    """Run the command.

    Args:
        arguments: the command line after ``longmem train``.

    Raises:
        CommandError: a mistake of the user's, or a run whose result is not to be trusted.
    """
    model_arguments, data_arguments, run_arguments, training = parse(arguments)
    checkpoint = inputs.checkpoint_to_resume(training, run_arguments)
    set_seed(training.seed)
    documents = inputs.documents(data_arguments)
    tokenizer = inputs.tokenizer(model_arguments)
    model = inputs.model(model_arguments, data_arguments, tokenizer)
    data = training_data(documents, tokenizer, model, data_arguments, training)
    prompt, max_new_tokens = inputs.prompt(run_arguments, tokenizer, model, data.beginning)
    whole = WholeCheckpointsCallback()
    callbacks: list[TrainerCallback] = [LogMetricsCallback(tokenizer), whole]
    if data.streams:
        callbacks.append(StreamMemoryCallback(checkpoint))
    config: Any = model.config
    use_cache = config.use_cache
    with user_mistakes(ValueError, TypeError, OSError, ImportError, RuntimeError):
        # Something must be installed, started or writable for these arguments, or they do not fit together.
        trainer = _trainer(model, training, data, tokenizer, callbacks)
        _try_optimizer(training, model)
    say: Callable[[str], None] = print if trainer.is_world_process_zero() else lambda text: None
    say(_description(documents, data, model))

    results: dict[str, float] = {}
    if training.do_eval:
        # Of a copy: what Trainer has evaluated it would, on several processes, train in each of them for itself.
        untrained = _trainer(copy.deepcopy(model), training, data, tokenizer, callbacks=[])
        results["bits_before"] = _held_out_bits(untrained)
        del untrained
        say(f"held-out bits per byte before training: {results['bits_before']:.3f}")
    if training.do_train:
        results |= _train(trainer, checkpoint, whole)
    if training.do_eval:
        results["bits"] = _held_out_bits(trainer)
        if not math.isfinite(results["bits"]):
            raise CommandError("the loss on the held-out text is not finite; try a lower --learning_rate", status=1)
    if training.do_train:
        # Trainer switches it off for training, and would leave it off in what is saved.
        config.use_cache = use_cache
        trainer.save_model()
        trainer.save_state()
        model = _reloaded(trainer, data, tokenizer, results.get("bits"))
        trainer.save_metrics("all", results, combined=False)
        if trainer.is_world_process_zero():
            source, datasets = inputs.description(data_arguments)
            text = "\n* ".join([f"{source}\n", *_sizes(documents, data).splitlines()])
            write_training_card(trainer, arguments, data=text, datasets=datasets, metrics=results, unit="byte")
    if max_new_tokens > 0 and trainer.is_world_process_zero():
        say(_continuation(model, tokenizer, prompt, max_new_tokens))
    say(_summary(results, training.output_dir if training.do_train else None))


def _trainer(
    model: PreTrainedModel,
    training: TrainingArguments,
    data: TrainingData,
    tokenizer: PreTrainedTokenizerBase,
    callbacks: list[TrainerCallback],
) -> Trainer:
    metric = BitsPerByte(tokenizer)

    def compute_metrics(prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        metric.add_batch(predictions=prediction.predictions, references=prediction.label_ids)
        return metric.compute() if compute_result else {}

    return Trainer(
        model=model,
        args=training,
        data_collator=data.collator,
        train_dataset=data.train,
        eval_dataset=data.held_out,
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=partial(token_nll, shifted=data.streams),
        callbacks=callbacks,
    )


def _try_optimizer(training: TrainingArguments, model: PreTrainedModel) -> None:
    """Raise now what Trainer would raise when it starts to train."""
    optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(training, model)
    # Some are made for a model's own parameters.
    if not {"params", "model", "optimizer_dict"} & set(settings):
        optimizer = optimizer_class([torch.nn.Parameter(torch.zeros(1))], **settings)
        specific: Any = training.lr_scheduler_kwargs
        get_scheduler(training.lr_scheduler_type, optimizer, 1, 2, scheduler_specific_kwargs=specific)


def _train(trainer: Trainer, checkpoint: str | None, whole: WholeCheckpointsCallback) -> dict[str, float]:
    seen_before = 0
    if checkpoint is not None:
        seen_before = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME)).num_input_tokens_seen
    try:
        seconds = trainer.train(resume_from_checkpoint=checkpoint).metrics["train_runtime"]
    except (OSError, RuntimeError, SafetensorError) as error:
        if whole.writing is None:
            raise
        advice = "make room on the disk, then go on with --resume_from_checkpoint true"
        raise CommandError(f"{whole.writing} could not be written: {error}; {advice}", status=1) from error
    except KeyError as error:
        if "metric_for_best_model" not in str(error):
            raise
        raise CommandError(str(error.args[0])) from error
    results = {"train_seconds": seconds, **peak_memory()}
    if tokens := trainer.state.num_input_tokens_seen - seen_before:
        results["tokens_per_second"] = tokens / seconds
    return results


def _held_out_bits(trainer: Trainer) -> float:
    return trainer.evaluate()["eval_bits_per_byte"]


def _reloaded(
    trainer: Trainer, data: TrainingData, tokenizer: PreTrainedTokenizerBase, bits: float | None
) -> PreTrainedModel:
    """Load what was saved as any user would, and compare its loss with the trained model's."""
    output = str(trainer.args.output_dir)
    # One process saves.
    trainer.accelerator.wait_for_everyone()
    model = AutoModelForCausalLM.from_pretrained(output)
    check = _trainer(model, trainer.args, data, tokenizer, callbacks=[])
    if bits is not None:
        again = _held_out_bits(check)
        # Written so that a loss that is not a number fails too.
        if not abs(again - bits) <= SAME_LOSS:
            raise CommandError(
                f"the model saved in {output} has another loss: {again:.6f} bits, not {bits:.6f}", status=1
            )
    return model


def _continuation(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: torch.Tensor, max_new_tokens: int
) -> str:
    prompt = prompt.to(model.device)
    generate: Callable[..., torch.Tensor] = model.eval().generate
    output = generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=0.7,
        pad_token_id=tokenizer.pad_token_id,
    )
    asked, answered = (tokenizer.decode(part) for part in (prompt[0], output[0, prompt.shape[1] :]))
    return f"--- prompt\n{asked}\n--- continuation\n{answered}\n---"


def _description(documents: DatasetDict, data: TrainingData, model: PreTrainedModel) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{_sizes(documents, data)}\nmodel: {model.config.model_type}, {parameters:,} parameters"


def _sizes(documents: DatasetDict, data: TrainingData) -> str:
    lines = []
    titles = (("train", "training text"), ("held_out", "held-out text"))
    for (split, title), tokens in zip(titles, data.num_tokens, strict=True):
        size = sum(len(text.encode("utf-8")) for text in documents[split]["text"])
        lines.append(f"{title}: {len(documents[split])} documents, {size:,} bytes; {tokens:,} tokens of it used")
    return "\n".join(lines)


def _summary(results: dict[str, float], output: str | None) -> str:
    lines = []
    if "bits" in results:
        lines.append(f"held-out bits per byte: {results['bits_before']:.3f} before, {results['bits']:.3f} after")
    if "tokens_per_second" in results:
        lines.append(f"tokens per second: {results['tokens_per_second']:,.0f}")
    for name, title in (("peak_memory", "peak memory"), ("peak_memory_cuda", "peak memory on the accelerator")):
        if name in results:
            lines.append(f"{title}: {results[name] / 2**30:.2f} GiB")
    if output is not None:
        same = ", which gives the same loss when loaded again" if "bits" in results else ""
        lines.append(f"saved: {output}{same}")
        lines.append(f"to use it: import hf_longmem, then AutoModelForCausalLM.from_pretrained({output!r})")
    return "\n".join(lines)
