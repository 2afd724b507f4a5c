"""Does the continuous memory learn to count what it can no longer see?

The sorting task of the infinity-former paper (section 4.1) at a reduced size: 1,000 symbols of 20 kinds whose
frequencies drift, a separator, then the symbols by falling frequency, of which the model predicts each from those
before it. It sees segments of 128 tokens and the 128 tokens before them; all else must come from the memory.

    python benchmarks/sorting.py run fixed --seed 0 [--steps 5000] [--set num_samples=512]    # about 25 minutes
    python benchmarks/sorting.py report

Each run adds a line to a file of runs, `report` makes the results' tables from it: runs of several hours in all can be
spread over processes and days.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from _report import RESULTS, origin, table, write
from torch import Tensor
from transformers import get_wsd_schedule

from hf_longmem import InfiniteFormerConfig, InfiniteFormerForCausalLM
from hf_longmem.data.synthetic import sorting
from hf_longmem.models.infinite_former.layer import InfiniteFormerLayer

LENGTH, SYMBOLS, SEGMENT, BATCH = 1000, 20, 128, 8
EVALUATED = 1000
WARMUP, DECAYING = 100, 0.4  # steps; the part of them in which the learning rate falls
SHOWN_EVERY = 500
VARIANTS: dict[str, dict[str, Any]] = {
    # Without memories the feed-forward part is wider, so that all variants have about as many parameters.
    "none": {"memory_layers": (), "feed_forward_size": 576},
    "fixed": {"memory_decay": 0.75},
    "uniform": {"memory_decay": "uniform", "uniform_segments": 16},
    "sticky": {"memory_decay": 0.75, "sticky_memories": True},
}


def main() -> None:
    """Train and evaluate one model, or make the tables of all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("variant", nargs="?", choices=list(VARIANTS), default="fixed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--initial", choices=["torch", "config"], default="torch", help="see `initialise`")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other fields of the config")
    parser.add_argument("--note", default="", help="what is tried, for the table of tries")
    parser.add_argument("--runs", type=Path, default=RESULTS / "sorting-runs.jsonl")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.action == "report":
        runs = [json.loads(line) for line in arguments.runs.read_text(encoding="utf-8").splitlines()]
        print(write("sorting", report(runs), arguments.results))
        return
    changes = {name: yaml.safe_load(value) for name, value in (item.split("=", 1) for item in arguments.set)}
    run = measure(
        arguments.variant, changes, arguments.seed, arguments.steps, arguments.learning_rate, arguments.initial
    )
    arguments.runs.parent.mkdir(parents=True, exist_ok=True)
    with arguments.runs.open("a", encoding="utf-8") as file:
        file.write(json.dumps(run | {"note": arguments.note}) + "\n")


def measure(
    variant: str, changes: dict[str, Any], seed: int, steps: int, learning_rate: float, initial: str = "torch"
) -> dict[str, Any]:
    """Train one model and evaluate it on unseen sequences."""
    torch.manual_seed(seed)
    model = InfiniteFormerForCausalLM(config(variant, changes))
    if initial == "torch":
        model.apply(initialise)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    started = time.process_time()
    curve = train(model, seed, steps, learning_rate)
    accuracy = evaluate(model, seed + 1_000_003, EVALUATED)
    run = {
        "variant": variant,
        "changes": changes,
        "seed": seed,
        "steps": steps,
        "learning_rate": learning_rate,
        "initial": initial,
        "parameters": parameters,
        "accuracy": accuracy,
        "curve": curve,
        "cpu_minutes": (time.process_time() - started) / 60,
    }
    print(json.dumps(run), flush=True)
    return run


def config(variant: str, changes: dict[str, Any]) -> InfiniteFormerConfig:
    """The model's config: width 96, 3 layers, 4 heads, relative positions, no dropout, no regulariser."""
    settings: dict[str, Any] = {
        "vocab_size": SYMBOLS + 1,
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "segment_length": SEGMENT,
        "position_embedding_type": "relative",
        "num_basis": 64,
        # Below the distance between the centres: wide densities are read evenly, see ops/continuous/README.md.
        "basis_widths": (0.01,),
        "num_samples": 128,
        "memory_kl_weight": 0.0,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": None,
        "eos_token_id": None,
    }
    return InfiniteFormerConfig(**(settings | VARIANTS[variant] | changes))


def initialise(module: torch.nn.Module) -> None:
    """Initialise linear layers and embeddings as torch does, not with the config's small normal numbers.

    With embeddings of deviation 1 what is written, the normalised embeddings, hardly moves while the rest learns.
    """
    if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
        module.reset_parameters()


def train(model: InfiniteFormerForCausalLM, seed: int, steps: int, learning_rate: float) -> list[list[float]]:
    """Train on fresh sequences at every step; the accuracy on the way, as [step, loss, accuracy]."""
    optimizer = torch.optim.Adam(model.parameters(), learning_rate)
    schedule = get_wsd_schedule(optimizer, WARMUP, int(DECAYING * steps), num_training_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    curve, losses = [], []
    for step in range(1, steps + 1):
        batch = sorting(BATCH, length=LENGTH, num_symbols=SYMBOLS, generator=generator).with_format("torch")[:]
        model.train()
        loss = loss_of(model, batch["input_ids"], batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % SHOWN_EVERY == 0 or step == steps:
            curve.append([step, sum(losses) / len(losses), evaluate(model, seed + 2_000_003, 100)])
            losses = []
            print(curve[-1], flush=True)
    return curve


def loss_of(model: InfiniteFormerForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """The training loss, and its gradients, of whole sequences.

    With `bptt_segments` = 1 no gradient enters a segment from a later one, and all labels lie in the last: those before
    only need to be remembered. A layer remembers what it is given, so that the last one computes only what predicts a
    label; and without a memory, nothing that is further back than layers times windows is remembered.
    """
    done = LENGTH // model.config.segment_length * model.config.segment_length
    if model.config.bptt_segments == 1:
        segments = -(-(model.config.short_term_window or 0) // model.config.segment_length)
        reach = model.config.num_hidden_layers * segments * model.config.segment_length
        first = 0 if model.config.memory_layers else max(0, done - reach)
        with torch.no_grad(), without_outputs(model.model.layers[-1]):
            memory = model.model(ids[:, first:done]).memory
        with only_last_outputs(model.model.layers[-1], SYMBOLS + 1):
            return model(ids[:, done:], labels=labels[:, done:], memory=memory).loss
    return model(ids, labels=labels).loss


@contextmanager
def without_outputs(layer: InfiniteFormerLayer) -> Iterator[None]:
    """Let a layer keep its inputs as ever, and compute nothing of its own from them but what decides what it keeps."""
    changed = {layer.self_attn: lambda hidden_states, *_: hidden_states, layer.mlp: lambda hidden_states: hidden_states}
    recall = layer.long_term_memory
    if recall is not None and not recall.sticky:
        changed[recall] = lambda hidden_states, _, memory, __: (hidden_states, memory, hidden_states[..., 0])
    with forwards(changed):
        yield


@contextmanager
def only_last_outputs(layer: InfiniteFormerLayer, kept: int) -> Iterator[None]:
    """Let a layer keep its inputs as ever, and add to no tokens but the last ``kept`` of them."""
    attend, feed = layer.self_attn.forward, layer.mlp.forward

    def attended(
        hidden_states: Tensor, keys: Tensor, values: Tensor, places: Tensor, first: int, mask: Tensor
    ) -> Tensor:
        last = (hidden_states[:, -kept:], keys, values, places[:, -kept:], first, mask[:, -kept:])
        return behind_zeros(attend(*last), hidden_states)

    def fed(hidden_states: Tensor) -> Tensor:
        return behind_zeros(feed(hidden_states[:, -kept:]), hidden_states)

    changed = {layer.self_attn: attended, layer.mlp: fed}
    if layer.long_term_memory is not None:
        recall = layer.long_term_memory.forward

        def recalled(hidden_states: Tensor, projection: Any, memory: Any, _: None) -> tuple[Tensor, Any, Tensor]:
            out_BTE, memory, divergence_BT = recall(hidden_states[:, -kept:], projection, memory)
            divergence_BT = behind_zeros(divergence_BT[..., None], hidden_states).squeeze(-1)
            return behind_zeros(out_BTE, hidden_states), memory, divergence_BT

        changed[layer.long_term_memory] = recalled
    with forwards(changed):
        yield


@contextmanager
def forwards(changed: dict[torch.nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Give modules other forwards for a while."""
    for module, forward in changed.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def behind_zeros(some_BTE: Tensor, all_BTE: Tensor) -> Tensor:
    """Put what was computed of the last tokens behind zeros for those before."""
    return torch.nn.functional.pad(some_BTE, (0, 0, all_BTE.shape[1] - some_BTE.shape[1], 0))


@torch.no_grad()
def evaluate(model: InfiniteFormerForCausalLM, seed: int, sequences: int) -> float:
    """Percent of the answers' symbols predicted right, each given those before it."""
    model.eval()
    data = sorting(sequences, length=LENGTH, num_symbols=SYMBOLS, generator=seed).with_format("torch")
    right = 0
    for batch in data.iter(batch_size=50):
        logits = model(batch["input_ids"][:, :-1], use_cache=False, logits_to_keep=SYMBOLS).logits
        right += int((logits.argmax(dim=-1) == batch["labels"][:, -SYMBOLS:]).sum())
    return 100 * right / (sequences * SYMBOLS)


def report(runs: list[dict[str, Any]]) -> str:
    """The tables of all runs: those of the task as set, and what else was tried."""
    plain = [run for run in runs if not run["changes"] and not run["note"]]
    tried = [run for run in runs if run not in plain]
    rows = []
    for variant in VARIANTS:
        of_variant = sorted((run for run in plain if run["variant"] == variant), key=lambda run: run["seed"])
        if of_variant:
            accuracies = [run["accuracy"] for run in of_variant]
            mean = f"{sum(accuracies) / len(accuracies):.1f}"
            by_seed = ", ".join(f"{run['accuracy']:.1f} ({run['seed']})" for run in of_variant)
            steps = ", ".join(str(steps) for steps in sorted({run["steps"] for run in of_variant}))
            minutes = sum(run["cpu_minutes"] for run in of_variant) / len(of_variant)
            rows.append([variant, f"{of_variant[0]['parameters']:,}", steps, mean, by_seed, f"{minutes:.0f}"])
    main_table = "No run of the task as set yet."
    if rows:
        main_table = table(["memory", "parameters", "steps", "mean", "accuracy (seed)", "CPU minutes"], rows)
    sections = [_PREFACE, origin(), main_table]
    if tried:
        lines = [
            [
                run["note"] or "-",
                run["variant"],
                ", ".join(f"{name}={value}" for name, value in run["changes"].items()) or "-",
                str(run["steps"]),
                str(run["seed"]),
                f"{run['accuracy']:.1f}",
            ]
            for run in tried
        ]
        sections += ["## What else was tried", table(["what", "memory", "changes", "steps", "seed", "accuracy"], lines)]
    return "\n\n".join(sections) + "\n"


_PREFACE = f"""# Sorting by frequency

Accuracy in percent on the {SYMBOLS} sorted symbols of {EVALUATED} unseen sequences of {LENGTH} tokens, each symbol
predicted from those before it. Width 96, 3 layers, 4 heads, relative positions, segments and short-term window of
{SEGMENT} tokens, N = 64 (one width, 0.01), M = 128, no dropout, no regulariser; torch's initial weights, Adam 1e-3
({WARMUP} steps of warm-up; a cosine to zero in the last {DECAYING:.0%} of the steps), batch {BATCH}. What
limits it is in the analysis beside this file.

Lines to compare with: guessing 17.9, counting the last 128 tokens about 35, counting everything 94 (equal counts are in
an order that cannot be known). The authors' model, patched to run, after about 2,100 steps: 34.5 without memory, 50.8
with it (one seed)."""


if __name__ == "__main__":
    main()
