"""Each feature of the stock Trainer that users reach for, run once on a tiny model of both families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, VOCABULARY, Documents, causal_lm, collate
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

Make = Callable[..., Trainer]
families = pytest.mark.parametrize("family", FAMILIES)


class Gradients(TrainerCallback):
    """Keeps the gradients of the last step."""

    def __init__(self) -> None:
        self.last: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.last = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.fixture
def trainer_of(tmp_path: Path) -> Make:
    """Make a Trainer that reads one tiny document after another; keyword arguments are TrainingArguments'."""

    def make(
        model: PreTrainedModel,
        *,
        callbacks: Any = (),
        rotations: int | None = None,
        documents: int = 16,
        **options: Any,
    ) -> Trainer:
        settings: dict[str, Any] = {
            "per_device_train_batch_size": 2,
            "max_steps": 2,
            "learning_rate": 1e-2,
            "train_sampling_strategy": "sequential",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
        }
        fixed = {} if rotations is None or model.config.model_type != "reformer_lsh" else {"hash_seed": rotations}
        return Trainer(
            model=model,
            args=TrainingArguments(output_dir=str(tmp_path / "out"), **(settings | options)),
            data_collator=lambda rows: collate(rows) | fixed,
            train_dataset=Documents(documents),
            eval_dataset=Documents(4),
            callbacks=list(callbacks),
        )

    return make


def losses(trainer: Trainer, key: str = "loss") -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@families
def test_accumulated_gradients_are_those_of_the_larger_batch(family: str, trainer_of: Make) -> None:
    runs = []
    for rows, accumulation in ((4, 1), (2, 2), (1, 4)):
        recorded = Gradients()
        settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
        trainer = trainer_of(causal_lm(family).double(), callbacks=[recorded], rotations=3, max_steps=1, **settings)
        trainer.train()
        runs.append((losses(trainer), recorded.last))
    for loss, gradients in runs[1:]:
        assert loss == pytest.approx(runs[0][0], rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, runs[0][1][name], atol=1e-12, rtol=1e-9)


@families
def test_bf16_keeps_the_weights_in_float32_and_the_loss_close(family: str, trainer_of: Make) -> None:
    runs = []
    for bf16 in (False, True):
        trainer = trainer_of(causal_lm(family), rotations=3, bf16=bf16, max_steps=6, documents=2)
        trainer.train()
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
        runs.append(losses(trainer))
    assert runs[0] != runs[1]
    assert runs[1] == pytest.approx(runs[0], rel=0.03)
    assert runs[1][-1] < runs[1][0]


@families
def test_a_compiled_model_trains_and_is_saved_as_itself(family: str, trainer_of: Make, tmp_path: Path) -> None:
    runs = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        torch._dynamo.reset()
        trainer = trainer_of(causal_lm(family), rotations=3, **options)
        # As long as each other, and two segments: every other shape is compiled anew.
        trainer.train_dataset = Documents(4, length=16, even=True)
        trainer.train()
        runs.append(losses(trainer))
        assert isinstance(trainer.model_wrapped, torch._dynamo.OptimizedModule) == bool(options)
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert loaded.keys() == causal_lm(family).state_dict().keys()


@families
def test_activation_checkpointing_changes_no_number(family: str, trainer_of: Make) -> None:
    runs = []
    for options in ({}, {"activation_checkpointing": True}):
        trainer = trainer_of(causal_lm(family, dropout=True), **options)
        trainer.train()
        runs.append(losses(trainer))
        assert trainer.model.is_activation_checkpointing == bool(options)
    assert runs[1] == pytest.approx(runs[0], rel=1e-6)


@families
@pytest.mark.parametrize("accumulation", [1, 2])
def test_label_smoothing_is_cross_entropy_with_smoothed_next_tokens(
    family: str, accumulation: int, trainer_of: Make
) -> None:
    epsilon, model = 0.2, causal_lm(family)
    rows = collate([Documents(16)[row] for row in range(2 * accumulation)])
    given = {name: rows[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        given |= {"hash_seed": 3} if family == "reformer_lsh" else {}
        log_probabilities = model(**given).logits[:, :-1].log_softmax(-1)
    target = rows["labels"][:, 1:]
    counted = target != -100
    right = log_probabilities.gather(-1, target.clamp(min=0)[..., None])[..., 0][counted]
    expected = -((1 - epsilon) * right + epsilon / VOCABULARY * log_probabilities.sum(-1)[counted]).mean().item()

    settings = {"label_smoothing_factor": epsilon, "gradient_accumulation_steps": accumulation}
    trainer = trainer_of(model, rotations=3, max_steps=1, **settings)
    trainer.train()
    assert losses(trainer) == pytest.approx([expected], rel=1e-5)


@families
def test_evaluation_early_stopping_and_the_best_model_at_the_end(family: str, trainer_of: Make, tmp_path: Path) -> None:
    trainer = trainer_of(
        causal_lm(family),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        max_steps=40,
        # A rate that soon makes the model worse.
        learning_rate=0.3,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        documents=200,
    )
    trainer.train()
    found = losses(trainer, "eval_loss")
    best = min(found)
    assert trainer.state.global_step < 40
    assert len(found) == found.index(best) + 3
    assert trainer.state.best_model_checkpoint == str(tmp_path / "out" / f"checkpoint-{found.index(best) + 1}")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6)


@families
def test_evaluation_is_the_mean_over_all_tokens_and_gathers_logits_alone(family: str, trainer_of: Make) -> None:
    model = causal_lm(family).eval()
    trainer = trainer_of(model, per_device_eval_batch_size=4)
    predicted = trainer.predict(Documents(4))
    batch = collate([Documents(4)[row] for row in range(4)])
    with torch.no_grad():
        outputs = model(**batch)
    assert predicted.metrics["test_loss"] == pytest.approx(outputs.loss.item(), rel=1e-6)
    assert predicted.predictions.shape == outputs.logits.shape
