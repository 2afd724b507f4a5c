"""What log lines say besides the loss, against the same numbers computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_longmem import (
    BitsPerByte,
    DataCollatorForStreams,
    DocumentStreams,
    InfiniteFormerConfig,
    InfiniteFormerForCausalLM,
    LogMetricsCallback,
    ReformerLSHConfig,
    ReformerLSHForCausalLM,
    token_nll,
)

TEXTS = ["Grüße an alle. " * 9, "short", "a longer one " * 5, "and another one, " * 7]


def tiny_model() -> InfiniteFormerForCausalLM:
    torch.manual_seed(0)
    config = InfiniteFormerConfig(
        vocab_size=384,
        hidden_size=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        segment_length=16,
        num_basis=16,
        basis_widths=(0.05, 0.1),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        memory_kl_weight=0.5,
    )
    return InfiniteFormerForCausalLM(config)


def streams(batch_size: int = 2) -> DocumentStreams:
    ids = [ByT5Tokenizer()(text)["input_ids"] for text in TEXTS]
    return DocumentStreams(ids, batch_size=batch_size, sequence_length=24)


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Trainer]:
    """Make a Trainer of the tiny model on document streams; keyword arguments override its settings."""

    def make(*, model: Any = None, callbacks: Any = None, trainer_settings: Any = None, **settings: Any) -> Trainer:
        defaults: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "train_sampling_strategy": "sequential",
            "max_steps": 4,
            "logging_steps": 2,
            "gradient_accumulation_steps": 2,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "label_names": ["shift_labels"],
        }
        data = {"data_collator": DataCollatorForStreams(), "train_dataset": streams(), "eval_dataset": streams()}
        return Trainer(
            tiny_model() if model is None else model,
            TrainingArguments(**(defaults | settings)),
            callbacks=[LogMetricsCallback(ByT5Tokenizer())] if callbacks is None else callbacks,
            **(data | (trainer_settings or {})),
        )

    return make


def lines(trainer: Trainer, name: str) -> list[dict[str, float]]:
    return [line for line in trainer.state.log_history if name in line]


def test_a_training_line_says_the_means_over_its_tokens(trainer: Callable[..., Trainer]) -> None:
    # Nothing is learned, so that one model can be asked for both lines.
    run = trainer(learning_rate=0.0, include_num_input_tokens_seen=True)
    run.train()
    model = tiny_model().train()
    data, collator, memory = streams(), DataCollatorForStreams(), None
    logged = lines(run, "loss")
    assert len(logged) == 2
    for number, line in enumerate(logged):
        nats = remembered = count = num_bytes = 0.0
        for time in range(4 * number, 4 * number + 4):
            batch = collator([data[2 * time], data[2 * time + 1]])
            labels = batch["shift_labels"]
            outputs = model(**(batch | {"memory": memory}))
            memory, real = outputs.memory, int((labels != -100).sum())
            nats += (outputs.loss - 0.5 * outputs.memory_loss).item() * real
            remembered += outputs.memory_loss.item() * real
            count += real
            # ByT5's ids from 3 to 258 are bytes; what is left of the batch is ends of texts and nothing.
            num_bytes += int(((labels >= 3) & (labels < 259)).sum())
        assert line["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
        assert line["memory_loss"] == pytest.approx(remembered / count, rel=1e-5)
        assert line["tokens_per_second"] > 0
        assert 0.01 < line["peak_memory_gib"] < 1000


def test_an_evaluation_says_what_the_metric_says(trainer: Callable[..., Trainer]) -> None:
    metric = BitsPerByte(ByT5Tokenizer())
    settings = {
        "preprocess_logits_for_metrics": token_nll,
        "compute_metrics": lambda p: {
            "exact": metric.compute(predictions=p.predictions, references=p.label_ids)["bits_per_byte"]
        },
    }
    run = trainer(
        trainer_settings=settings,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="best",
        metric_for_best_model="eval_bits_per_byte",
        greater_is_better=False,
    )
    run.train()
    evaluations = lines(run, "eval_loss")
    assert len(evaluations) == 4
    for line in evaluations:
        assert line["eval_bits_per_byte"] == pytest.approx(line["eval_exact"], rel=1e-5)
        assert line["eval_memory_loss"] > 0
        assert "eval_tokens_per_second" not in line
        assert "bits_per_byte" not in line
    assert run.state.best_metric == min(line["eval_bits_per_byte"] for line in evaluations)


class Seen(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def test_what_comes_later_sees_them(trainer: Callable[..., Trainer]) -> None:
    seen = Seen()
    trainer(callbacks=[LogMetricsCallback(), seen]).train()
    assert "bits_per_byte" in seen.logs[0]
    # The line at the end is Trainer's own.
    assert "train_loss" in seen.logs[-1]
    assert "bits_per_byte" not in seen.logs[-1]


def test_time_stands_still_while_something_else_is_done(trainer: Callable[..., Trainer]) -> None:
    class Slow(TrainerCallback):
        pauses = 0

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert callback._since is None
            self.pauses += 1

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert (callback._since is None) == (state.global_step % 2 == 0)

    callback, slow = LogMetricsCallback(), Slow()
    trainer(callbacks=[callback, slow], eval_strategy="steps", eval_steps=2, logging_steps=1).train()
    assert slow.pauses == 2


def test_a_model_without_memory_and_other_labels(trainer: Callable[..., Trainer]) -> None:
    torch.manual_seed(0)
    settings = {"vocab_size": 60, "hidden_size": 16, "num_attention_heads": 2, "attn_layers": ["local"]}
    model = ReformerLSHForCausalLM(ReformerLSHConfig(**settings))
    ids = torch.randint(3, 60, (16, 20), generator=torch.Generator().manual_seed(0))
    data = {"data_collator": None, "train_dataset": [{"input_ids": row, "labels": row} for row in ids]}
    run = trainer(
        model=model, callbacks=[LogMetricsCallback()], trainer_settings=data, label_names=None, logging_steps=1
    )
    run.train()
    for line in lines(run, "loss"):
        assert line["bits_per_byte"] == pytest.approx(line["loss"] / math.log(2), rel=1e-5)
        assert "memory_loss" not in line


def test_label_smoothing_has_no_bits(trainer: Callable[..., Trainer]) -> None:
    run = trainer(label_smoothing_factor=0.1)
    run.train()
    for line in lines(run, "loss"):
        assert "bits_per_byte" not in line
        assert line["memory_loss"] > 0
        assert line["tokens_per_second"] > 0


def test_the_model_is_left_as_it_was(trainer: Callable[..., Trainer]) -> None:
    run = trainer()
    run.train()
    assert not run.model._forward_hooks
    assert "eval_bits_per_byte" not in run.evaluate()


def test_a_batch_without_a_label_counts_for_nothing(trainer: Callable[..., Trainer]) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
    rows = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(3, 23), torch.tensor([5]))]
    with torch.no_grad():
        expected = model(input_ids=rows[0]["input_ids"][None], labels=rows[0]["labels"][None]).loss.item()
        assert model(input_ids=rows[1]["input_ids"][None], labels=rows[1]["labels"][None]).loss.isnan()
    run = trainer(
        model=model,
        callbacks=[LogMetricsCallback()],
        trainer_settings={"data_collator": None, "train_dataset": rows[:1], "eval_dataset": rows},
        label_names=None,
        learning_rate=0.0,
        per_device_eval_batch_size=1,
        eval_strategy="steps",
        eval_steps=2,
    )
    run.train()
    for line in lines(run, "eval_bits_per_byte"):
        assert line["eval_bits_per_byte"] == pytest.approx(expected / math.log(2), rel=1e-5)


def test_training_again_after_an_interruption_counts_once(trainer: Callable[..., Trainer]) -> None:
    class Interrupts(TrainerCallback):
        armed = True

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.armed:
                self.armed = False
                raise KeyboardInterrupt

    run = trainer(callbacks=[LogMetricsCallback(ByT5Tokenizer()), Interrupts()], learning_rate=0.0)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.train()
    assert not run.model._forward_hooks
