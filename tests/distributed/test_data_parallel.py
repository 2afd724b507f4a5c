"""The stock Trainer on two gloo processes: loss and gradients are those of one process on the joint batch.

Part of this file is the program of those processes.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from processes import Processes
from tiny_models import Documents, causal_lm, collate
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

WORLD, ROWS, STEPS, LEARNING_RATE = 2, 2, 2, 0.1

GATED = {"memory_gate": "convolution", "sticky_memories": True, "bptt_segments": 2}


class Case(NamedTuple):
    """A model and what it reads."""

    family: str
    overrides: dict[str, Any] = {}
    length: int = 48


CASES = {
    "reformer_lsh": Case("reformer_lsh"),
    "infinite_former": Case("infinite_former"),
    "infinite_former_gated": Case("infinite_former", GATED),
    # Documents of one segment: nothing is written, and no gradient reaches the gate.
    "infinite_former_gated_short": Case("infinite_former", GATED, length=8),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "search": {"ddp_find_unused_parameters": True, "ddp_broadcast_buffers": True, "ddp_bucket_cap_mb": 1},
    "no_search": {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False},
    "static_graph": {"ddp_static_graph": True},
    "activation_checkpointing": {"activation_checkpointing": True},
}
ACCUMULATION = (1, 2)
RUNS = [
    (name, setting, accumulation)
    for name, setting, accumulation in itertools.product(CASES, SETTINGS, ACCUMULATION)
    # torch's own limit, whatever the model: the first backward of a static graph must not run under no_sync.
    if (setting, accumulation) != ("static_graph", 2)
]


class Gradients(TrainerCallback):
    """Keeps the gradients of every step, as the optimizer is about to see them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.steps.append(gradients_of(model))


Steps = tuple[list[float], list[dict[str, Tensor]]]  # the loss and the gradients of every step


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def collate_for(family: str, *, dropout: bool = False) -> Callable[[list[dict[str, Tensor]]], dict[str, Any]]:
    """Batches whose hash rotations are the same everywhere."""
    if family != "reformer_lsh" or dropout:
        return collate
    return lambda rows: collate(rows) | {"hash_seed": 7}


def joint(case: Case, accumulation: int) -> Steps:
    """Plain PyTorch in one process: every step on all rows of all processes at once."""
    model = causal_lm(case.family, **case.overrides).double()
    size = WORLD * ROWS * accumulation
    rows = Documents(size * STEPS, case.length)
    losses, gradients = [], []
    for step in range(STEPS):
        model.zero_grad()
        loss = model(**collate_for(case.family)([rows[step * size + row] for row in range(size)])).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append(gradients_of(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LEARNING_RATE * parameter.grad
    return losses, gradients


def trained(case: Case, accumulation: int, settings: dict[str, Any], *, dropout: bool = False) -> Steps:
    """The stock Trainer on these processes."""
    recorded = Gradients()
    arguments = TrainingArguments(
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=accumulation,
        max_steps=STEPS,
        train_sampling_strategy="sequential",
        optim="sgd",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    trainer = Trainer(
        model=causal_lm(case.family, dropout=dropout, **case.overrides).double(),
        args=arguments,
        train_dataset=Documents(WORLD * ROWS * accumulation * STEPS, case.length),
        data_collator=collate_for(case.family, dropout=dropout),
        callbacks=[recorded],
    )
    trainer.train()
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], recorded.steps


def errors(ours: Steps, expected: Steps) -> list[float]:
    """The largest relative error of any step's loss, and of any gradient."""
    assert [len(part) for part in (*ours, *expected)] == [STEPS] * 4
    of_loss = max(abs(a - b) / abs(b) for a, b in zip(ours[0], expected[0], strict=True))
    of_gradients = []
    for step, reference in zip(ours[1], expected[1], strict=True):
        assert step.keys() == reference.keys()
        largest = max(gradient.abs().max() for gradient in reference.values())
        of_gradients += [((step[name] - reference[name]).abs().max() / largest).item() for name in step]
    return [of_loss, max(of_gradients)]


def program() -> dict[str, Any]:
    """Every model under every setting against the joint batch; and with dropout, reversible against plain layers."""
    results: dict[str, Any] = {}
    expected = {(name, steps): joint(CASES[name], steps) for name in CASES for steps in ACCUMULATION}
    for name, setting, steps in RUNS:
        try:
            ours = trained(CASES[name], steps, SETTINGS[setting])
            results[f"{name}-{setting}-{steps}"] = errors(ours, expected[name, steps])
        except Exception:
            results[f"{name}-{setting}-{steps}"] = traceback.format_exc()
    for steps in ACCUMULATION:
        ways = ({"reversible": True}, {"reversible": False}, {"activation_checkpointing": True})
        kept, plain, checkpointed = (
            trained(
                Case("reformer_lsh", {name: value for name, value in way.items() if name == "reversible"}),
                steps,
                {name: value for name, value in way.items() if name != "reversible"},
                dropout=True,
            )
            for way in ways
        )
        results[f"dropout-reversible-{steps}"] = errors(kept, plain)
        results[f"dropout-checkpointed-{steps}"] = errors(checkpointed, plain)
        results[f"dropout-none-{steps}"] = errors(trained(CASES["reformer_lsh"], steps, {}), plain)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the processes measured."""
    with Processes(__file__, "program", tmp_path_factory.mktemp("gloo") / "run", WORLD) as processes:
        return processes.results(timeout=300)


@pytest.mark.parametrize(("name", "setting", "accumulation"), RUNS)
def test_two_processes_equal_the_joint_batch(
    results: list[dict[str, Any]], name: str, setting: str, accumulation: int
) -> None:
    for of_rank in results:
        measured = of_rank[f"{name}-{setting}-{accumulation}"]
        assert not isinstance(measured, str), measured
        of_loss, of_gradients = measured
        assert of_loss < 1e-6  # Trainer adds losses up in float32
        assert of_gradients < 1e-9


@pytest.mark.parametrize("accumulation", ACCUMULATION)
def test_with_dropout_reversible_layers_equal_plain_ones(results: list[dict[str, Any]], accumulation: int) -> None:
    for of_rank in results:
        for way in ("reversible", "checkpointed"):
            of_loss, of_gradients = of_rank[f"dropout-{way}-{accumulation}"]
            assert of_loss < 1e-6
            assert of_gradients < 1e-9
        assert min(of_rank[f"dropout-none-{accumulation}"]) > 1e-3
