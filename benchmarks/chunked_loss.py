"""What does the chunked loss save? Time and peak memory of forward + backward against plain PyTorch, in one process.

python benchmarks/chunked_loss.py --tokens 2048 --hidden-size 256 --vocab-size 50257
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from _report import RESULTS, origin, table, write
from torch import Tensor

from hf_longmem.ops.chunking import chunked_linear_cross_entropy


def allocation_peak(fn: Callable[[], object]) -> int:
    """Most bytes that the CPU allocator held above the start while ``fn`` ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fn()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def fastest(fns: dict[str, Callable[[], object]], repeats: int) -> dict[str, tuple[float, float]]:
    """Least wall and processor seconds of each, taken in turn so that a busy machine disturbs all alike."""
    best = {name: (float("inf"), float("inf")) for name in fns}
    for _ in range(repeats):
        for name, fn in fns.items():
            wall, processor = time.perf_counter(), time.process_time()
            fn()
            took = time.perf_counter() - wall, time.process_time() - processor
            best[name] = min(best[name][0], took[0]), min(best[name][1], took[1])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument(
        "--counted", type=float, default=1.0, help="share of labels that are not ignored (0.15 for MLM)"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results file")
    args = parser.parse_args()

    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden_size, requires_grad=True)
    weight = torch.randn(args.vocab_size, args.hidden_size).mul_(args.hidden_size**-0.5).requires_grad_()
    bias = torch.zeros(args.vocab_size, requires_grad=True)
    labels = torch.randint(args.vocab_size, (args.tokens,))
    labels[torch.rand(args.tokens) > args.counted] = -100

    def gradients(loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, (hidden, weight, bias))

    fns: dict[str, Callable[[], object]] = {
        "plain": lambda: gradients(F.cross_entropy(F.linear(hidden, weight, bias), labels))
    }
    for size in args.chunk_sizes:
        fns[f"chunks of {size}"] = lambda size=size: gradients(
            chunked_linear_cross_entropy(hidden, weight, bias, labels, chunk_size=size)
        )

    times = fastest(fns, args.repeats)
    peaks = {name: allocation_peak(fn) for name, fn in fns.items()}
    logits = args.tokens * args.vocab_size * 4
    header = ["loss", "wall s", "ratio", "processor s", "ratio", "peak MiB", "ratio", "of the logits"]
    rows = []
    for name, (wall, processor) in times.items():
        ratios = wall / times["plain"][0], processor / times["plain"][1], peaks[name] / peaks["plain"]
        memory = [f"{peaks[name] / 2**20:.0f}", f"{ratios[2]:.2f}", f"{peaks[name] / logits:.2f}"]
        rows.append([name, f"{wall:.3f}", f"{ratios[0]:.2f}", f"{processor:.3f}", f"{ratios[1]:.2f}", *memory])
    title = f"# Forward + backward of the loss, {args.tokens} tokens, vocabulary {args.vocab_size}"
    text = f"{title}\n\n{origin()}\n- logits alone: {logits / 2**20:.0f} MiB\n\n{table(header, rows)}\n"
    print(text)
    print(f"written to {write('chunked-loss', text, args.results)}")


if __name__ == "__main__":
    main()
