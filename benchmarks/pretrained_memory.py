"""What does a long-term memory buy a language model that exists, and what does it cost?

A small Llama over a byte-level BPE is trained with a window of 256 tokens on long documents of Python's standard
library. Then it is trained on, each time for as many steps and tokens: as it is; with a window twice as long; with a
memory around it (plain and sticky), first the memory alone and then everything. All are scored on whole unseen
documents, token by token, each in sight of at least half a window. `recall` asks where a memory must help: for facts
stated once, beyond the window.

    python benchmarks/pretrained_memory.py text --seeds 0 1 2
    python benchmarks/pretrained_memory.py recall --seeds 0 1 2
    python benchmarks/pretrained_memory.py report

Each seed adds a line to a file of runs, `report` makes the results' tables from it.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _report import RESULTS, origin, table, write
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, get_cosine_schedule_with_warmup

from hf_longmem import (
    LongTermMemoryConfig,
    add_long_term_memory,
    memory_parameter_groups,
    set_trainable,
    streaming_perplexity,
)
from hf_longmem.data.synthetic import recall
from hf_longmem.data.text import python_documents, split_documents, tokenize_documents

MEMORIES: dict[str, dict[str, Any]] = {"memory, plain": {}, "memory, sticky": {"sticky_memories": True}}
PIECES = 2048  # of the vocabulary
FACTS = 4
RECALL = {"num_keys": 16, "num_values": 16, "num_fillers": 16}


def main() -> None:
    """Measure every arm for every seed, or make the tables of all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["text", "recall", "report"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000, help="of training the model")
    parser.add_argument("--extra", type=int, default=1000, help="of training each arm on from there")
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--train_tokens", type=int, default=4_000_000, help="at most so many")
    parser.add_argument("--documents", type=int, default=20, help="unseen documents that are scored")
    parser.add_argument("--characters", type=int, default=20_000, help="of each; shorter than half: left out")
    parser.add_argument("--facts", type=int, default=FACTS, help="of recall")
    parser.add_argument("--runs", type=Path, default=RESULTS / "pretrained-memory-runs.jsonl")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--label", default="", help="for the report's title, as in 'trial'")
    given = parser.parse_args()
    if given.action == "report":
        runs = [json.loads(line) for line in given.runs.read_text(encoding="utf-8").splitlines()]
        print(write("pretrained-memory", report(runs, given.label), given.results))
        return
    for seed in given.seeds:
        task = Recall(given, seed) if given.action == "recall" else Text(given, seed)
        settings = {name: getattr(given, name) for name in ("steps", "extra", "hidden_size", "layers", "learning_rate")}
        if given.action == "recall":
            settings["facts"] = given.facts
        run = {"task": given.action, "seed": seed, "settings": settings, "arms": measure(task, given)}
        given.runs.parent.mkdir(parents=True, exist_ok=True)
        with given.runs.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")


class Text:
    """Predict whole documents; lower is better."""

    unit, vocab_size, long_window = "bits per byte", PIECES, True
    window, batch = 256, 16
    memory: dict[str, Any] = {}

    def __init__(self, given: argparse.Namespace, seed: int) -> None:
        long = python_documents().filter(lambda document: len(document["text"]) >= given.characters // 2)
        documents = split_documents(long, 0.1)
        pieces = ByteLevelBPETokenizer()
        pieces.train_from_iterator(documents["train"]["text"], vocab_size=PIECES, show_progress=False)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces)
        train = tokenize_documents(documents["train"], tokenizer, max_tokens=given.train_tokens, seed=seed)
        self.documents = [torch.from_numpy(ids.astype("int64")) for ids in train if len(ids) > self.window]
        self.tokens = torch.cat(self.documents)
        unseen = documents["held_out"].select(range(min(given.documents, len(documents["held_out"]))))
        unseen = unseen.map(lambda document: {"text": document["text"][: given.characters]})
        self.unseen = [torch.from_numpy(ids.astype("int64")) for ids in tokenize_documents(unseen, tokenizer)]
        # A document's first token is given.
        self.num_bytes = sum(len(text.encode()) for text in unseen["text"])
        self.num_bytes -= sum(len(tokenizer.decode(ids[:1]).encode()) for ids in self.unseen)
        self.generator = torch.Generator().manual_seed(seed)

    def batches(self, length: int) -> Iterator[dict[str, Tensor]]:
        """Random stretches of the text, as long as a model's window."""
        while True:
            rows = self.batch * self.window // length
            starts = torch.randint(len(self.tokens) - length, (rows,), generator=self.generator)
            ids = self.tokens[starts[:, None] + torch.arange(length)]
            yield {"input_ids": ids, "labels": ids}

    def streams(self) -> Iterator[dict[str, Any]]:
        """Documents from their start, in pieces that go on from each other, as many tokens a batch."""
        left: list[Tensor] = [self.tokens[:0]] * self.batch
        while True:
            reset = torch.tensor([len(ids) < self.window for ids in left])
            for row in reset.nonzero().flatten().tolist():
                left[row] = self.documents[int(torch.randint(len(self.documents), (), generator=self.generator))]
            ids = torch.stack([ids[: self.window] for ids in left])
            left = [ids[self.window :] for ids in left]
            yield {"input_ids": ids, "labels": ids, "reset_memory": reset}

    def score(self, model: Any) -> float:
        """Mean over all bytes of all unseen documents."""
        found = [streaming_perplexity(model, ids, progress=False) for ids in self.unseen]
        return sum(part.mean_nll * part.num_tokens for part in found) / self.num_bytes / math.log(2)


class Recall:
    """Answer what was stated beyond the window; higher is better. The model knows the task from within its window."""

    unit, vocab_size, long_window = "percent right", 64, False
    window, batch, length = 64, 32, 256
    # Without gradients into what was written, nothing would learn to write facts.
    memory: dict[str, Any] = {"bptt_segments": 8}

    def __init__(self, given: argparse.Namespace, seed: int) -> None:
        self.facts = {"num_pairs": given.facts} | RECALL
        self.generator = torch.Generator().manual_seed(seed)
        self.unseen, self.near = (
            recall(500, length=length, **self.facts, generator=seed + 1_000_003).with_format("torch")[:]
            for length in (self.length, self.window // 2)
        )

    def batches(self, length: int) -> Iterator[dict[str, Tensor]]:
        """Facts and questions within the window, near and far."""
        while True:
            chosen = int(torch.randint(5 * self.facts["num_pairs"], length + 1, (), generator=self.generator))
            rows = self.batch * self.window // chosen
            yield recall(rows, length=chosen, **self.facts, generator=self.generator).with_format("torch")[:]

    def streams(self) -> Iterator[dict[str, Any]]:
        """Facts and questions beyond it, as many tokens a batch."""
        rows = self.batch * self.window // self.length
        while True:
            data = recall(rows, length=self.length, **self.facts, generator=self.generator)
            yield data.with_format("torch")[:] | {"reset_memory": torch.ones(rows, dtype=torch.bool)}

    @torch.no_grad()
    def score(self, model: Any, near: bool = False) -> float:
        """Percent of the answers predicted right, of facts beyond the window or within it."""
        data = self.near if near else self.unseen
        ids, labels = data["input_ids"], data["labels"][:, 1:]
        right = 0
        for part, answers in zip(ids.split(50), labels.split(50), strict=True):
            guesses = model(part, use_cache=False).logits[:, :-1].argmax(dim=-1)
            right += int((guesses == answers).sum())
        return 100 * right / int((labels != -100).sum())


def measure(task: Any, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Train the model, then every arm from there; score each."""
    seed = int(task.generator.initial_seed())
    torch.manual_seed(seed)
    sizes = {"hidden_size": given.hidden_size, "num_hidden_layers": given.layers, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=task.vocab_size,
        intermediate_size=3 * given.hidden_size,
        max_position_embeddings=2 * task.window,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        **sizes,
    )
    base = LlamaForCausalLM(config)
    fit(base, task.batches(task.window), given.steps, torch.optim.AdamW(base.parameters(), given.learning_rate))
    arms = []

    def add(name: str, model: Any, seconds: float) -> None:
        started = time.process_time()
        score = task.score(model.eval())
        parameters = sum(parameter.numel() for parameter in model.parameters())
        if name.startswith("base"):
            parameters -= sum(parameter.numel() for parameter in model.long_term_memory.parameters())
        cost = {"train_seconds": seconds, "score_seconds": time.process_time() - started}
        arms.append({"arm": name, "score": score, "parameters": parameters, **cost})
        print(json.dumps(arms[-1]), flush=True)

    # A memory that was never trained says nothing: what is scored is the model, in sight of its window.
    add("base", around(base, task.window), 0.0)
    if not task.long_window:
        arms[0]["near"] = task.score(base, near=True)
    windows = {"base, trained on": task.window, "base, trained on with twice the window": 2 * task.window}
    for name, window in windows.items():
        if window == task.window or task.long_window:
            model = copy.deepcopy(base)
            optimizer = torch.optim.AdamW(model.parameters(), given.learning_rate / 3)
            seconds = fit(model, task.batches(window), given.extra, optimizer)
            add(name, around(model, window), seconds)
    for name, settings in MEMORIES.items():
        model = around(base, task.window, **task.memory, **settings)
        seconds = 0.0
        for train, rate in (("memory", given.learning_rate), ("all", given.learning_rate / 3)):
            set_trainable(model, train)
            optimizer = torch.optim.AdamW(memory_parameter_groups(model, rate, memory_lr=given.learning_rate))
            seconds += fit(model, task.streams(), given.extra // 2, optimizer)
            add(f"{name}, {'memory alone trained' if train == 'memory' else 'then everything'}", model, seconds)
    return arms


def around(base: Any, window: int, **settings: Any) -> Any:
    """A memory around a copy of the model, whose blocks are half new and half seen before."""
    half = window // 2
    memory = {"segment_length": half, "window_length": half, "num_basis": 64, "memory_kl_weight": 0.0}
    return add_long_term_memory(copy.deepcopy(base), LongTermMemoryConfig(**(memory | settings)))


def fit(model: Any, batches: Iterator[dict[str, Any]], steps: int, optimizer: torch.optim.Optimizer) -> float:
    """Train, carrying the memory from batch to batch; the seconds it took."""
    model.train()
    schedule = get_cosine_schedule_with_warmup(optimizer, min(100, steps // 10), steps)
    started, memory, losses = time.process_time(), None, []
    for step in range(1, steps + 1):
        batch = next(batches)
        streams = "reset_memory" in batch
        if streams and memory is None:
            memory = model.empty_memory(len(batch["input_ids"]))
        outputs = model(**batch, memory=memory) if streams else model(**batch)
        memory = outputs.memory if streams else None
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(outputs.loss.item())
        if step % 100 == 0 or step == steps:
            print(f"step {step}: {sum(losses[-100:]) / len(losses[-100:]):.3f}", flush=True)
    return time.process_time() - started


def report(runs: list[dict[str, Any]], label: str) -> str:
    """The tables of all runs."""
    sections = [f"# A memory around a trained model{f' ({label})' if label else ''}", _PREFACE, origin()]
    for task in (Text, Recall):
        name = task.__name__.lower()
        of_task = sorted((run for run in runs if run["task"] == name), key=lambda run: run["seed"])
        for settings in [dict(items) for items in dict.fromkeys(tuple(run["settings"].items()) for run in of_task)]:
            chosen = [run["arms"] for run in of_task if run["settings"] == settings]
            rows = []
            for arms in zip(*chosen, strict=True):
                scores = [arm["score"] for arm in arms]
                rows.append(
                    [
                        arms[0]["arm"],
                        f"{sum(scores) / len(scores):.3f}",
                        ", ".join(f"{score:.3f}" for score in scores),
                        f"{arms[0]['parameters']:,}",
                        f"{sum(arm['train_seconds'] for arm in arms) / len(arms):.0f}",
                        f"{sum(arm['score_seconds'] for arm in arms) / len(arms):.1f}",
                    ]
                )
            header = ["arm", task.unit, "by seed", "parameters", "CPU seconds of training", "of scoring"]
            said = ", ".join(f"{key} {value}" for key, value in settings.items())
            sections.append(f"## {task.__name__}: {said}\n\n{table(header, rows)}")
            if "near" in chosen[0][0]:
                near = ", ".join(f"{arms[0]['near']:.1f}" for arms in chosen)
                sections.append(f"Facts within the window the base answers: {near} percent right.")
    return "\n\n".join(sections) + "\n"


_PREFACE = f"""A small Llama that sees a window, and the same trained on for `extra` steps: as it is, with twice the
window, with a memory around it (half of the steps the memory alone, half everything), all with as many tokens a step.
Every arm but "twice" sees at most a window at once: a block is half a window of new tokens and the half before. AdamW,
cosine; the memory's learning rate is the model's first one, the model's a third of it.

Text: bits per byte of whole unseen documents of Python's library; byte-level BPE of {PIECES} pieces, a window of
{Text.window} tokens, {Text.batch * Text.window} tokens a step.

Recall: percent of the answers about facts (a key and a value each) stated {Recall.length} tokens before, guessing has
{100 / RECALL["num_values"]:.1f}; a window of {Recall.window}, {Recall.batch * Recall.window} tokens a step, gradients
into what was written."""


if __name__ == "__main__":
    main()
