"""What does the continuous memory cost: after a very long document, in training, and against the authors' way?

Three questions, one table each: time per segment and peak memory after 10 thousand and after 1 million tokens; a
training step beside the same model without memory; writing and reading by one layer beside the authors' formulation,
written out from the equations. Times are of the processor, medians of turns taken one after the other.

    python benchmarks/memory.py [--tokens 10000 1000000] [--rounds 15]
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _report import RESULTS, origin, table, write
from torch import Tensor, nn

from hf_longmem import InfiniteFormerCache, InfiniteFormerConfig, InfiniteFormerForCausalLM
from hf_longmem.layers.continuous_attention import ContinuousAttention
from hf_longmem.ops.continuous import GaussianBasis, RegressionSpec, basis_parameters
from hf_longmem.ops.continuous.regression import solve_write_maps

KINDS: dict[str, dict[str, Any]] = {
    "fixed tau": {},
    "uniform": {"memory_decay": "uniform"},
    "sticky": {"sticky_memories": True},
}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "segment_length": 256, "num_basis": 64}
TRAINED = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "segment_length": 256,
    "num_basis": 256,
}
TRAINED_BATCH = (2, 1024)
WIDTHS = (0.01, 0.05)
LAYERS = {
    "width 256, 4 heads, N = L = 256, M = 512, 2 rows": (256, 4, 256, 256, 512, 2),
    "width 768, 12 heads, N = L = M = 512, 1 row": (768, 12, 512, 512, 512, 1),
}


def take_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each call in each round; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            if number:
                times[name].append(time.process_time() - begin)
    return times


def ratio(times: dict[str, list[float]], name: str, to: str) -> float:
    """Median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(times[name], times[to], strict=True))


@torch.no_grad()
def stream(options: dict[str, Any], lengths: list[int], rounds: int, threads: int) -> tuple[list[float], list[float]]:
    """Read one document to each of the lengths: processor seconds of a segment there, and peak MiB until there."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = InfiniteFormerConfig(**(SMALL | options))
    model, cache = InfiniteFormerForCausalLM(config).eval(), InfiniteFormerCache(config)

    def segment(cache: InfiniteFormerCache) -> None:
        model(torch.randint(3, config.vocab_size, (1, config.segment_length)), cache=cache)

    kept, peaks = {}, []
    for length in lengths:
        while cache.get_seq_length() < length:
            segment(cache)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
        kept[str(length)] = copy.deepcopy(cache)
    times = take_turns({name: lambda there=there: segment(there) for name, there in kept.items()}, rounds)
    first = statistics.median(times[str(lengths[0])])
    return [first * ratio(times, name, str(lengths[0])) for name in kept], peaks


def stream_table(lengths: list[int], rounds: int) -> str:
    """A process for each kind, so that each has a peak of its own."""
    rows = []
    for name, options in KINDS.items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, peaks = pool.apply(stream, (options, lengths, rounds, torch.get_num_threads()))
        cells = [
            f"{s * 1e3:.2f} ms ({s / seconds[0]:.2f}x), {peak:.0f} MiB ({peak / peaks[0]:.3f}x)"
            for s, peak in zip(seconds, peaks, strict=True)
        ]
        rows.append([name, *cells])
        print(rows[-1], file=sys.stderr)
    return table(["a segment of 256, and peak memory, after", *(f"{length} tokens" for length in lengths)], rows)


def training_table(rounds: int) -> str:
    """Forward and backward of the whole model, with each kind of memory and without any."""
    tokens = torch.randint(3, 384, TRAINED_BATCH)
    steps: dict[str, Callable[[], None]] = {}
    for name, options in ({"no memory": {"memory_layers": ()}} | KINDS).items():
        torch.manual_seed(0)
        model = InfiniteFormerForCausalLM(InfiniteFormerConfig(**(TRAINED | options))).train()

        def step(model: nn.Module = model) -> None:
            model.zero_grad()
            model(tokens, labels=tokens).loss.backward()

        steps[name] = step
    times = take_turns(steps, rounds)
    rows = [
        [name, f"{statistics.median(times[name]) * 1e3:.0f} ms", f"{ratio(times, name, 'no memory'):.2f}x"]
        for name in steps
    ]
    return table(["a training step", "processor time", "to no memory"], rows)


class _Expectation(torch.autograd.Function):
    """E[psi] under the density with canonical parameters theta, and its derivative as covariances of (t, t^2)."""

    @staticmethod
    def forward(ctx: Any, theta_X2: Tensor, centres_N: Tensor, widths_N: Tensor) -> Tensor:
        variance_X1 = -0.5 / theta_X2[:, 1:]
        mu_X1 = theta_X2[:, :1] * variance_X1
        ctx.save_for_backward(mu_X1, variance_X1, centres_N, widths_N)
        std_XN = torch.sqrt(variance_X1 + widths_N**2)
        return torch.exp(-0.5 * ((mu_X1 - centres_N) / std_XN) ** 2) / (std_XN * math.sqrt(2 * math.pi))

    @staticmethod
    def backward(ctx: Any, grad_XN: Tensor) -> tuple[Tensor, None, None]:
        mu_X1, variance_X1, centres_N, widths_N = ctx.saved_tensors
        std_XN = torch.sqrt(variance_X1 + widths_N**2)
        r_XN = torch.exp(-0.5 * ((mu_X1 - centres_N) / std_XN) ** 2) / (std_XN * math.sqrt(2 * math.pi))
        product_variance_XN = 1 / (1 / variance_X1 + 1 / widths_N**2)
        product_mean_XN = product_variance_XN * (mu_X1 / variance_X1 + centres_N / widths_N**2)
        first_XN = r_XN * product_mean_XN - mu_X1 * r_XN
        second_XN = r_XN * (product_variance_XN + product_mean_XN**2) - (mu_X1**2 + variance_X1) * r_XN
        return torch.stack([(grad_XN * first_XN).sum(-1), (grad_XN * second_XN).sum(-1)], dim=-1), None, None


class AuthorsFormulation(nn.Module):
    """One layer's write and read as the equations have them: B = G^T X every time, scores against all N keys, theta.

    Its regression is handed to it (the authors invert a matrix in float32), and so are the weights.
    """

    def __init__(self, ours: ContinuousAttention, tau: float) -> None:
        super().__init__()
        self.spec, self.heads, self.sticky = ours.spec, ours.num_heads, ours.sticky
        maps = solve_write_maps(ours.spec, tau, True)
        dtype = ours.q_proj.weight.dtype
        self.G = torch.cat((maps.carry.T, maps.new_LN)).to(dtype)
        self.centres_N, self.widths_N = basis_parameters(ours.spec.basis, dtype=dtype)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            copy.deepcopy(part) for part in (ours.q_proj, ours.k_proj, ours.v_proj, ours.o_proj)
        )
        self.density_heads = nn.Parameter(ours.density_heads.detach().clone())
        self.floor, self.prior_std = ours.variance_floor, ours.prior_std

    def psi(self, t: Tensor) -> Tensor:
        """Evaluate the basis."""
        normaliser = self.widths_N * math.sqrt(2 * math.pi)
        return torch.exp(-0.5 * ((t[..., None] - self.centres_N) / self.widths_N) ** 2) / normaliser

    def write(self, B_BNE: Tensor, x_BLE: Tensor, density: tuple[Tensor, Tensor] | None) -> Tensor:
        """Sample the old signal, where it was attended to if it is sticky, and regress it with the new one."""
        count = self.spec.num_samples
        if self.sticky and density is not None:
            mu, std = (part.flatten(1)[..., None] for part in density)
            bins = torch.linspace(0, 1, 129, dtype=mu.dtype)[:-1]
            mass = torch.exp(torch.distributions.Normal(mu, std).log_prob(bins)).sum(dim=1)
            drawn = torch.distributions.Categorical(mass / mass.sum(dim=-1, keepdim=True)).sample((count,))
            t = bins[drawn.sort(dim=0).values.T]
        else:
            t = torch.arange(1, count + 1, dtype=B_BNE.dtype) / count
        return self.G.T @ torch.cat((self.psi(t) @ B_BNE, x_BLE), dim=1)

    def forward(self, x_BTE: Tensor, B_BNE: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Read: the output, the regulariser and the densities."""
        rows, length, width = x_BTE.shape

        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.q_proj(x_BTE)), split(self.k_proj(B_BNE)), split(self.v_proj(B_BNE))
        scores_BHTN = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
        mu = torch.sigmoid(scores_BHTN @ self.density_heads[0])
        variance = nn.functional.softplus(scores_BHTN @ self.density_heads[1]).clamp(min=self.floor)
        theta = torch.stack((mu / variance, -0.5 / variance), dim=-1).view(-1, 2)
        r_BHTN = _Expectation.apply(theta, self.centres_N, self.widths_N).view(scores_BHTN.shape)
        context = (r_BHTN @ v).transpose(1, 2).reshape(rows, length, width)
        kl = 0.5 * (variance / self.prior_std**2 - torch.log(variance / self.prior_std**2) - 1)
        return self.o_proj(context), kl, (mu.detach(), variance.detach().sqrt())


def layer_pair(
    sizes: tuple[int, ...], sticky: bool, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Callable[[], tuple[Tensor, Tensor]]], dict[str, nn.Module]]:
    """Write a segment and read it by every token of one, the authors' way and ours, from the same memory.

    Returns:
        the calls, and the modules that hold their weights.
    """
    width, heads, num_basis, length, num_samples, rows = sizes
    spec = RegressionSpec(GaussianBasis(num_basis, WIDTHS), length, num_samples, placement="right_edge", padding=True)
    torch.manual_seed(0)
    ours = ContinuousAttention(width, heads, width // heads, spec=spec, sticky=sticky).to(dtype)
    theirs = AuthorsFormulation(ours, tau=0.75)
    x_BTE = torch.randn(rows, length, width, dtype=dtype)
    with torch.no_grad():
        memory = ours.empty(rows, x_BTE.device, dtype)
        for _ in range(3):
            memory = ours.write(memory, x_BTE)
            _, memory, _ = ours(x_BTE, ours.project(memory), memory)
        _, _, density = theirs(x_BTE, memory.coefficients_BNE)

    def authors() -> tuple[Tensor, Tensor]:
        theirs.zero_grad()
        out, kl, _ = theirs(x_BTE, theirs.write(memory.coefficients_BNE, x_BTE, density))
        return out, kl

    def this() -> tuple[Tensor, Tensor]:
        ours.zero_grad()
        written = ours.write(memory, x_BTE)
        out, _, kl = ours(x_BTE, ours.project(written), written)
        return out, kl

    return {"theirs": authors, "ours": this}, {"theirs": theirs, "ours": ours}


def measure_layers(sizes: tuple[int, ...], sticky: bool, rounds: int, threads: int) -> list[str]:
    """Write and read by one layer, without gradients and with; then once more after large tensors were freed."""
    torch.set_num_threads(threads)
    calls, _ = layer_pair(sizes, sticky)
    cells = []
    for freed in (False, True):
        if freed:
            # From now on the C library keeps what is freed, and new tensors cost either side less.
            for numbers in (2**20, 2**21, 2**22, 2**22 + 2**21):
                torch.zeros(numbers)
        with torch.no_grad():
            forward = take_turns(calls, 2 * rounds)
        both = take_turns({who: functools.partial(_train, call) for who, call in calls.items()}, 2 * rounds)
        cells += [
            f"{statistics.median(times['theirs']) * 1e3:.1f} / {statistics.median(times['ours']) * 1e3:.1f} ms, "
            f"{ratio(times, 'theirs', 'ours'):.2f}x"
            for times in (forward, both)
        ]
    return cells


def layer_table(rounds: int) -> str:
    """A process for each row."""
    rows = []
    for name, sizes in LAYERS.items():
        for kind, sticky in (("even samples", False), ("sticky", True)):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                cells = pool.apply(measure_layers, (sizes, sticky, rounds, torch.get_num_threads()))
            rows.append([f"{name}, {kind}", *cells])
            print(rows[-1], file=sys.stderr)
    states = ("in a new process", "after large tensors were freed")
    header = [f"{what}, {state}" for state in states for what in ("forward", "forward and backward")]
    return table(["theirs / ours: a segment written, and read by all tokens of one", *header], rows)


def _train(call: Callable[[], tuple[Tensor, Tensor]]) -> None:
    out, kl = call()
    (out.sum() + 1e-5 * kl.sum()).backward()


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--note", default="", help="a line about the machine, for the results file")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows, length = TRAINED_BATCH
    text = "\n\n".join(
        [
            f"# The continuous memory\n\n{origin()}",
            "Processor times, medians of turns taken in one process; factors are medians of the turns' ratios."
            + (f" {arguments.note}" if arguments.note else ""),
            "## A very long document",
            f"Width {SMALL['hidden_size']}, {SMALL['num_hidden_layers']} layers, N = {SMALL['num_basis']}, one row, "
            "random tokens, read a segment at a time; factors are to the first column. Targets: time within 1.2x, peak "
            "memory within 1.02x.",
            stream_table(arguments.tokens, 10 * arguments.rounds),
            "## Training",
            f"Width {TRAINED['hidden_size']}, {TRAINED['num_hidden_layers']} layers, N = L = 256, M = 512, {rows} rows "
            f"of {length} tokens, forward and backward. Target: at most 1.35x.",
            training_table(arguments.rounds),
            "## One layer, beside the authors' formulation",
            "Projections, write, read and regulariser from the same weights and memory. Theirs evaluates the basis at "
            "the samples and multiplies by all of G at each write, scores every query against every key, and "
            "differentiates the continuous softmax by moments; the solution of its regression is not counted. Target: "
            "at least 3x.",
            layer_table(arguments.rounds),
        ]
    )
    print(text + "\n", write("memory", text + "\n", arguments.results), file=sys.stderr)


if __name__ == "__main__":
    main()
