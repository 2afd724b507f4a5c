"""Reversible blocks on two gloo processes: gradients equal plain autograd's on the joint batch in one process.

This file is also the program that the two processes run, from `measure`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from processes import Processes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_longmem.ops.reversible import ReversibleTape, reversible_block

WORLD, WIDTH, NUM_LAYERS, MICRO_BATCHES = 2, 8, 3, 2
TIMEOUT = 100  # seconds for both processes together; they need about 15 idle


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.dropout(nn.functional.gelu(self.up(self.norm(x))))))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Half()
        self.feed_forward = Half()

    def forward(self, x1: Tensor, x2: Tensor, tape: ReversibleTape | None) -> tuple[Tensor, Tensor]:
        return reversible_block(self.attention, self.feed_forward, x1, x2, tape)


class Model(nn.Module):
    def __init__(self, *, reversible: bool, unused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, 1)
        self.unused = nn.Linear(WIDTH, 1) if unused else None
        self.reversible = reversible

    def forward(self, x: Tensor) -> Tensor:
        tape = ReversibleTape() if self.reversible else None
        x1 = x2 = self.embed(x)
        for layer in self.layers:
            x1, x2 = layer(x1, x2, tape)
        return self.head(x1 + x2).square().mean()


def model(*, reversible: bool = True, unused: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(reversible=reversible, unused=unused).double()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def joint_gradients(steps: int, *, unused: bool) -> dict[str, Tensor]:
    """Plain autograd in one process; each rank's half is run with that rank's seed, so that dropout agrees."""
    plain = model(reversible=False, unused=unused)
    for step in range(steps):
        halves = []
        for rank in range(WORLD):
            torch.manual_seed(100 * step + rank)
            halves.append(plain(batch(step, rank)))
        torch.stack(halves).mean().backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in plain.named_parameters()}


def train(wrapped: nn.Module, rank: int, steps: int, accumulating: Callable[[bool], object]) -> None:
    """Every backward but the last runs without synchronisation."""
    for step in range(steps):
        with accumulating(step < steps - 1):
            torch.manual_seed(100 * step + rank)
            wrapped(batch(step, rank)).backward()


def error_of(wrapped: nn.Module, expected: dict[str, Tensor]) -> float:
    worst = 0.0
    for name, parameter in wrapped.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        reference = expected[name.removeprefix("module.")]
        worst = max(worst, (gradient - reference).abs().max().item() / (reference.abs().max().item() + 1e-3))
    return worst


def ddp_error(rank: int, steps: int, *, unused: bool = False, **settings: bool) -> float:
    wrapped = DistributedDataParallel(model(unused=unused), **settings)
    if settings.get("static_graph"):  # the first iteration is special there: it records the graph
        train(wrapped, rank, 1, lambda _: nullcontext())
        wrapped.zero_grad()
    train(wrapped, rank, steps, lambda accumulate: wrapped.no_sync() if accumulate else nullcontext())
    return error_of(wrapped, joint_gradients(steps, unused=unused))


def fsdp_error(rank: int, steps: int, pieces: Callable[[Model], list[nn.Module]], **settings: object) -> float:
    wrapped = model()
    for piece in [*pieces(wrapped), wrapped]:
        fully_shard(piece, **settings)

    def accumulating(accumulate: bool) -> nullcontext:
        wrapped.set_requires_gradient_sync(not accumulate)
        return nullcontext()

    train(wrapped, rank, steps, accumulating)
    return error_of(wrapped, joint_gradients(steps, unused=False))


def layers(m: Model) -> list[nn.Module]:
    return list(m.layers)


def halves(m: Model) -> list[nn.Module]:
    return [half for layer in m.layers for half in (layer.attention, layer.feed_forward)]


def halves_and_layers(m: Model) -> list[nn.Module]:
    return halves(m) + layers(m)


def fsdp_memory(rank: int) -> float:
    """1.0 if the alias that FSDP2 makes of every layer's input broke the chain of blocks, else 0.0."""
    wrapped = model()
    for piece in [*layers(wrapped), wrapped]:
        fully_shard(piece)
    tapes: list[int] = []
    x1 = x2 = batch(0, rank).requires_grad_()
    tape = ReversibleTape()
    wrapped.unshard()
    for layer in wrapped.layers:
        x1, x2 = layer(x1, x2, tape)
        tapes.append(id(tape._chain()))
    (x1 + x2).sum().backward()
    return float(len(set(tapes)) != 1)


SETTINGS: dict[str, Callable[[int, int], float]] = {
    "ddp": lambda rank, steps: ddp_error(rank, steps),
    "ddp_find_unused_parameters": lambda rank, steps: ddp_error(rank, steps, find_unused_parameters=True),
    "ddp_unused_head": lambda rank, steps: ddp_error(rank, steps, unused=True, find_unused_parameters=True),
    "ddp_static_graph": lambda rank, steps: ddp_error(rank, steps, static_graph=True),
    "ddp_bucket_views": lambda rank, steps: ddp_error(rank, steps, gradient_as_bucket_view=True),
    "fsdp_root": lambda rank, steps: fsdp_error(rank, steps, lambda m: []),
    "fsdp_layers": lambda rank, steps: fsdp_error(rank, steps, layers),
    "fsdp_layers_kept_whole": lambda rank, steps: fsdp_error(rank, steps, layers, reshard_after_forward=False),
    "fsdp_branches": lambda rank, steps: fsdp_error(rank, steps, halves),
    "fsdp_branches_and_layers": lambda rank, steps: fsdp_error(rank, steps, halves_and_layers),
    "fsdp_chain_is_not_broken_by_aliases": lambda rank, steps: fsdp_memory(rank),
}


def measure() -> dict[str, float | str]:
    rank = dist.get_rank()
    results: dict[str, float | str] = {}
    for name, setting in SETTINGS.items():
        for steps in (1, MICRO_BATCHES):
            try:
                results[f"{name}-{steps}"] = setting(rank, steps)
            except Exception:
                results[f"{name}-{steps}"] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float | str]]:
    """What each of the two processes measured."""
    directory = tmp_path_factory.mktemp("gloo") / "processes"
    with Processes(__file__, "measure", directory, world_size=WORLD) as processes:
        return processes.results(TIMEOUT)


@pytest.mark.parametrize("steps", [1, MICRO_BATCHES])
@pytest.mark.parametrize("setting", SETTINGS)
def test_two_processes_equal_the_joint_batch(results, setting, steps):
    for of_rank in results:
        error = of_rank[f"{setting}-{steps}"]
        assert not isinstance(error, str), error
        assert error < 1e-9
