"""How fast and how small is LSH attention beside transformers' layer, lucidrains' package and full attention?

All contenders run in this one process, in turn, on the same sizes; what counts are the ratios of medians. Extra memory
is the growth of the process's peak over one forward and backward, each in a process of its own.

    python benchmarks/lsh_attention.py [--length 16384] [--repeats 7]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _report import RESULTS, origin, table, write
from torch import Tensor
from transformers import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from hf_longmem.ops.lsh import draw_rotations, hash_vectors, lsh_attention

HEADS, WIDTH, ROUNDS, CHUNK = 4, 64, 4, 64
OURS = "ours, bucket, union"
HF, LUCIDRAINS, SDPA = "transformers LSHSelfAttention", "reformer-pytorch LSHAttention", "causal SDPA"


def factors(length: int) -> list[int]:
    """Two even factors of about T/C buckets."""
    exponent = max((length // CHUNK).bit_length() - 1, 2)
    return [2 ** (exponent // 2), 2 ** (exponent - exponent // 2)]


def ours(length: int, candidates: str, merge: str) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Hash, sort and attend."""
    qk, v = (torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(2))
    rotations = draw_rotations(HEADS, WIDTH, ROUNDS, factors(length))

    def run() -> Tensor:
        buckets = hash_vectors(qk, rotations, factors(length))
        return lsh_attention(qk, v, buckets, chunk_length=CHUNK, candidates=candidates, merge=merge)

    return run, [qk, v]


def transformers_layer(length: int) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """transformers' layer; its two projections are a few per cent of its time."""
    config = ReformerConfig(
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        attention_head_size=WIDTH,
        num_buckets=factors(length),
        num_hashes=ROUNDS,
        lsh_attn_chunk_length=CHUNK,
        lsh_attention_probs_dropout_prob=0.0,
        is_decoder=True,
        max_position_embeddings=length,
    )
    layer = LSHSelfAttention(config, layer_idx=0)
    hidden_states = torch.randn(1, length, HEADS * WIDTH, requires_grad=True)
    return lambda: layer(hidden_states).hidden_states, [hidden_states]


def lucidrains(length: int) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """lucidrains' attention, heads in the batch, its causal default."""
    from reformer_pytorch.reformer_pytorch import LSHAttention

    layer = LSHAttention(bucket_size=CHUNK, n_hashes=ROUNDS, causal=True)
    qk, v = (torch.randn(HEADS, length, WIDTH, requires_grad=True) for _ in range(2))
    return lambda: layer(qk, v)[0], [qk, v]


def sdpa(length: int) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Full causal attention, PyTorch's fused kernel."""
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v]


CONTENDERS: dict[str, Callable[[int], tuple[Callable[[], Tensor], list[Tensor]]]] = {
    OURS: lambda length: ours(length, "bucket", "union"),
    "ours, bucket, sum": lambda length: ours(length, "bucket", "sum"),
    "ours, chunk, union": lambda length: ours(length, "chunk", "union"),
    "ours, chunk, sum": lambda length: ours(length, "chunk", "sum"),
    HF: transformers_layer,
    LUCIDRAINS: lucidrains,
    SDPA: sdpa,
}


def measure(names: list[str], length: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Median seconds of forward (no graph) and forward + backward; the contenders take turns in every repeat."""
    torch.manual_seed(0)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    for repeat in range(repeats + 1):
        for name in names:
            run, leaves = CONTENDERS[name](length)
            with torch.no_grad():
                forward, _ = timed(run)
            both, _ = timed(lambda run=run, leaves=leaves: torch.autograd.grad(run().sum(), leaves))
            if repeat:
                times[name][0].append(forward)
                times[name][1].append(both)
    return {name: (statistics.median(forward), statistics.median(both)) for name, (forward, both) in times.items()}


def timed(run: Callable[[], object]) -> tuple[float, object]:
    """Seconds of one call, and what it returned."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def peak_growth(name: str, length: int) -> float:
    """MiB by which one forward and backward raise the peak of a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_growth, (name, length))


def _peak_growth(name: str, length: int) -> float:
    run, leaves = CONTENDERS[name](256)
    torch.autograd.grad(run().sum(), leaves)
    run, leaves = CONTENDERS[name](length)
    # The peak is a mark that Linux lets a process lower to what it holds now.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _high_water_mark()
    torch.autograd.grad(run().sum(), leaves)
    return (_high_water_mark() - before) / 1024


def _high_water_mark() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return float(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    length, short, long = arguments.length, arguments.length // 4, arguments.length * 4

    times = measure(list(CONTENDERS), length, arguments.repeats)
    rows = [
        [
            name,
            f"{forward:.3f}",
            f"{both:.3f}",
            *(f"{both / times[peer][1]:.2f}" for peer in (HF, LUCIDRAINS, SDPA)),
            f"{forward / times[HF][0]:.2f}",
        ]
        for name, (forward, both) in times.items()
    ]
    header = ["contender", "forward (s)", "forward + backward (s)", "/ transformers", "/ reformer-pytorch", "/ SDPA"]
    sections = [f"## T = {length}\n\n{table([*header, 'forward / transformers'], rows)}"]

    at_short = measure([OURS, SDPA], short, arguments.repeats)
    at_long = measure([OURS], long, 3)
    ratio = at_short[OURS][1] / at_short[SDPA][1]
    growth = [at_long[OURS][n] / times[OURS][n] for n in range(2)]
    lines = [
        f"- T = {short}, forward + backward: {at_short[OURS][1]:.3f} s, {ratio:.2f} of SDPA",
        f"- T = {long} / T = {length}: forward {growth[0]:.2f}, forward + backward {growth[1]:.2f}",
    ]
    sections.append("\n".join(["## Other lengths", "", *lines]))
    memory = {name: peak_growth(name, length) for name in CONTENDERS}
    rows = [[name, f"{mib:.0f}", f"{mib / max(memory[HF], 1):.2f}"] for name, mib in memory.items()]
    sections.append(
        f"## Peak extra memory, forward + backward\n\n{table(['contender', 'MiB', '/ transformers'], rows)}"
    )
    text = "\n\n".join([_preface(length), *sections]) + "\n"
    print(text, write("lsh-attention", text, arguments.results), file=sys.stderr)


def _preface(length: int) -> str:
    return (
        f"# LSH attention\n\n{origin()}\n\nOne row, {HEADS} heads of {WIDTH}, {ROUNDS} rounds, chunks of {CHUNK}, "
        f"{factors(length)} buckets at T = {length}, float32, causal. Hashing and sorting are included; the medians "
        "are of runs in turn in one process."
    )


if __name__ == "__main__":
    main()
