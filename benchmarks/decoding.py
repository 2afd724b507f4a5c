"""What does one more token cost after a short and after a long text?

Greedy decoding by `reformer_lsh` with its cache, beside transformers' Reformer with its own, and a GPT-2 of the same
size with its key/value cache. The past is random tokens, for GPT-2 random keys and values (computing them at 100,000
positions would take longer than everything else); each figure is the median over steps at that position.

    python benchmarks/decoding.py [--positions 1000 10000 100000] [--steps 20]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _report import RESULTS, origin, table, write
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, ReformerConfig, ReformerModelWithLMHead

from hf_longmem import ReformerLSHConfig, ReformerLSHForCausalLM

VOCAB, WIDTH, HEADS, LAYERS, CHUNK = 320, 256, 4, 4, 64


def ours(positions: int) -> tuple[torch.nn.Module, Callable[[torch.Tensor, Any], Any]]:
    """Two windowed and two LSH layers."""
    config = ReformerLSHConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attn_layers=["local", "lsh"] * (LAYERS // 2),
        max_position_embeddings=positions,
        num_hashes=4,
    )
    model = ReformerLSHForCausalLM(config).eval()

    def step(ids: torch.Tensor, cache: Any) -> Any:
        cache = DynamicCache(config=config) if cache is None else cache
        return model(ids, cache=cache, logits_to_keep=1).cache

    return model, step


def transformers_reformer(positions: int) -> tuple[torch.nn.Module, Callable[[torch.Tensor, Any], Any]]:
    """The same shape in transformers; its prompt must go in at once, and its chunks must fit."""
    side = 2 ** ((positions - 1).bit_length() // 2)
    config = ReformerConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attention_head_size=WIDTH // HEADS,
        feed_forward_size=4 * WIDTH,
        attn_layers=["local", "lsh"] * (LAYERS // 2),
        axial_pos_shape=(side, -(-positions // side)),
        axial_pos_embds_dim=(WIDTH // 4, WIDTH - WIDTH // 4),
        max_position_embeddings=positions,
        num_buckets=[2**5, 2 ** max(1, (positions // CHUNK).bit_length() - 6)],
        num_hashes=4,
        is_decoder=True,
        hash_seed=0,
    )
    model = ReformerModelWithLMHead(config).eval()

    def step(ids: torch.Tensor, cache: Any) -> Any:
        return model.reformer(ids, past_buckets_states=cache, use_cache=True).past_buckets_states

    return model, step


def gpt2(positions: int) -> tuple[torch.nn.Module, Callable[[torch.Tensor, Any], Any]]:
    """Full attention with a key/value cache."""
    config = GPT2Config(vocab_size=VOCAB, n_embd=WIDTH, n_head=HEADS, n_layer=LAYERS, n_positions=positions)
    model = GPT2LMHeadModel(config).eval()

    def step(ids: torch.Tensor, cache: Any) -> Any:
        if cache is None:
            cache = DynamicCache(config=config)
            for layer in range(LAYERS):
                past = torch.randn(1, HEADS, ids.shape[1], WIDTH // HEADS)
                cache.update(past, past.clone(), layer)
            return cache
        return model(ids, cache=cache, use_cache=True, logits_to_keep=1).cache

    return model, step


CONTENDERS = {"reformer_lsh": ours, "transformers Reformer": transformers_reformer, "GPT-2, key/value cache": gpt2}


@torch.no_grad()
def measure(name: str, position: int, steps: int, positions: int) -> tuple[float, float]:
    """Median milliseconds of a step after ``position`` tokens, and MiB of what is kept."""
    torch.manual_seed(0)
    _, step = CONTENDERS[name](positions)
    ids = torch.randint(3, VOCAB, (1, position))
    cache = step(ids, None)
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        cache = step(torch.randint(3, VOCAB, (1, 1)), cache)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3, sum(tensor.nbytes for tensor in tensors_of(cache).values()) / 2**20


def tensors_of(root: Any) -> dict[int, torch.Tensor]:
    """Every tensor that can be reached from a cache, by identity."""
    found: dict[int, torch.Tensor] = {}
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            found[id(item)] = item
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)
        elif hasattr(item, "__dict__"):
            waiting.extend(vars(item).values())
    return found


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, nargs="+", default=[1000, 10000, 100000])
    parser.add_argument("--reformer_positions", type=int, nargs="*", default=[1000, 10000])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    room = 2 ** (max(arguments.positions) + arguments.steps).bit_length()
    rows = []
    for name in CONTENDERS:
        wanted = arguments.reformer_positions if name.startswith("transformers") else arguments.positions
        figures = {position: measure(name, position, arguments.steps, room) for position in wanted}
        first = next(iter(figures.values()))[0] if figures else 0.0
        cells = [
            f"{figures[p][0]:.1f} ms ({figures[p][0] / first:.2f}x), {figures[p][1]:.0f} MiB" if p in figures else "-"
            for p in arguments.positions
        ]
        rows.append([name, *cells])
        print(rows[-1], file=sys.stderr)
    header = ["a step, and what is kept, after", *(f"{position} tokens" for position in arguments.positions)]
    text = (
        f"# Decoding\n\n{origin()}\n\nWidth {WIDTH}, {HEADS} heads, {LAYERS} layers, one row, float32, room for {room} "
        f"positions; the factor is against the first column.\n\n{table(header, rows)}\n"
    )
    print(text, write("decoding", text, arguments.results), file=sys.stderr)


if __name__ == "__main__":
    main()
