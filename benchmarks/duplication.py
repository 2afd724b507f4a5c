"""Does LSH attention learn to look things up, and does it need as many hash rounds as it was trained with?

The duplication task of the Reformer paper (section 5): ``0w0w``, where only the second ``w`` counts. A one-layer model
is trained with full attention and with 1, 2 and 4 hash rounds, and each is evaluated with full attention and with 8, 4,
2 and 1 rounds, for both rules of which keys a query may see.

    python benchmarks/duplication.py [--steps 1000] [--candidates bucket:8 chunk:16]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _report import RESULTS, origin, table, write
from transformers import Trainer, TrainingArguments, set_seed

from hf_longmem import ReformerLSHConfig, ReformerLSHForCausalLM
from hf_longmem.data.synthetic import duplication

FULL = "full"
TRAINED = (FULL, 1, 2, 4)
EVALUATED = (FULL, 8, 4, 2, 1)
# A run has learned the task when its training loss, averaged over this many steps, falls below this.
LEARNED_LOSS, LEARNED_STEPS = 0.1, 25


def main() -> None:
    """Train and evaluate every cell and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--chunk_length", type=int, default=32)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--evaluated", type=int, default=1000, help="sequences a cell is evaluated on")
    parser.add_argument("--candidates", nargs="+", default=["bucket:8", "chunk:16"], help="RULE:BUCKETS")
    parser.add_argument("--trained", nargs="+", default=[str(rounds) for rounds in TRAINED])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    sections = []
    for spelled in arguments.candidates:
        rule, buckets = spelled.split(":")
        rows = []
        for rounds in (int(spelled) if spelled.isdigit() else spelled for spelled in arguments.trained):
            model, learned, seconds = train(arguments, rule, int(buckets), rounds)
            cells = [f"{accuracy(arguments, model, rule, int(buckets), number):.2f}" for number in EVALUATED]
            rows.append([str(rounds), *cells, learned, f"{seconds:.0f}"])
            print(spelled, rows[-1], flush=True)
        header = ["trained with", *(f"evaluated: {rounds}" for rounds in EVALUATED), "learned after", "seconds"]
        sections.append(f"## Candidates `{rule}`, {buckets} buckets\n\n{table(header, rows)}")
    path = write("duplication", "\n\n".join([_preface(arguments), *sections]) + "\n", arguments.results)
    print(path)


def config(arguments: argparse.Namespace, rule: str, buckets: int, rounds: int | str) -> ReformerLSHConfig:
    """The model's config; "full" is the same layer with one chunk that covers the whole sequence."""
    attention: dict[str, Any] = {
        "lsh_candidates": rule,
        "num_buckets": buckets,
        "num_hashes": rounds,
        "lsh_attn_chunk_length": arguments.chunk_length,
    }
    if rounds == FULL:
        attention |= {"lsh_candidates": "chunk", "num_hashes": 1, "lsh_attn_chunk_length": arguments.length}
    return ReformerLSHConfig(
        vocab_size=128,
        hidden_size=arguments.hidden_size,
        attn_layers=["lsh"],
        num_attention_heads=4,
        position_embedding_type="learned",
        max_position_embeddings=arguments.length,
        hidden_dropout_prob=0.0,
        **attention,
    )


def train(
    arguments: argparse.Namespace, rule: str, buckets: int, rounds: int | str
) -> tuple[ReformerLSHForCausalLM, str, float]:
    """Train one model; also the step at which it had learned, and the seconds it took."""
    set_seed(arguments.seed)
    model = ReformerLSHForCausalLM(config(arguments, rule, buckets, rounds))
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch_size,
            learning_rate=1e-3,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=arguments.warmup,
            logging_steps=min(LEARNED_STEPS, arguments.steps),
            save_strategy="no",
            disable_tqdm=True,
            log_level="error",
            seed=arguments.seed,
            dataloader_pin_memory=False,
        )
        rows = arguments.steps * arguments.batch_size
        data = duplication(rows, length=arguments.length, generator=arguments.seed)
        trainer = Trainer(model=model, args=settings, train_dataset=data)
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
    losses = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    learned = next((f"{step} steps" for step, loss in losses if loss < LEARNED_LOSS), f"not (loss {losses[-1][1]:.2f})")
    return model, learned, seconds


@torch.no_grad()
def accuracy(
    arguments: argparse.Namespace, model: ReformerLSHForCausalLM, rule: str, buckets: int, rounds: int | str
) -> float:
    """Percent of the second word predicted right, by the same weights with another attention."""
    evaluated = ReformerLSHForCausalLM(config(arguments, rule, buckets, rounds)).eval()
    evaluated.load_state_dict(model.state_dict())
    evaluated.to(model.device)
    # Another seed than training's: no row was seen.
    data = duplication(arguments.evaluated, length=arguments.length, generator=arguments.seed + 1_000_003)
    right = counted = 0
    for batch in data.with_format("torch", device=model.device).iter(batch_size=50):
        predicted = evaluated(batch["input_ids"]).logits[:, :-1].argmax(dim=-1)
        labels = batch["labels"][:, 1:]
        right += int((predicted == labels).sum())
        counted += int((labels != -100).sum())
    return 100 * right / counted


def _preface(given: argparse.Namespace) -> str:
    return f"""# Duplication task

Accuracy in percent on the second word of {given.evaluated} unseen sequences `0w0w` of {given.length} tokens.
One layer, width {given.hidden_size}, 4 heads, learned positions, chunks of {given.chunk_length}, no dropout;
Adam 1e-3 after {given.warmup} steps of warm-up, batch {given.batch_size}, {given.steps} steps, seed {given.seed}.
"Learned after": the first {LEARNED_STEPS} steps whose mean training loss is below {LEARNED_LOSS}.

{origin()}"""


if __name__ == "__main__":
    main()
