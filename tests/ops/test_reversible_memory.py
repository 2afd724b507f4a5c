"""Reversible blocks: what they keep, when they let go, and the errors that stand in for a wrong number."""

from __future__ import annotations

import functools
import gc
import re
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from hf_longmem.ops.reversible import ReversibleTape, reversible_block

WIDTH, LENGTH = 32, 256
STREAMS = 2 * WIDTH * LENGTH * 4  # bytes of the two streams in float32
RANDOM_STATES = 2 * 5056  # bytes of torch's CPU generator, for each of a block's branches


def run(branch: nn.Module, x: Tensor, num_blocks: int, *, reversible: bool = True) -> tuple[Tensor, Tensor]:
    tape = ReversibleTape() if reversible else None
    y1 = y2 = x
    for _ in range(num_blocks):
        y1, y2 = reversible_block(branch, branch, y1, y2, tape)
    return y1, y2


def branch_module(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * WIDTH, WIDTH)
    )


class Allocations:
    """Bytes that torch's allocator handed out here and had not taken back, from the profiler's record."""

    def __enter__(self) -> Allocations:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)
        events = [e for e in self._profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        self.kept = self.peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            self.kept += event.nbytes()
            self.peak = max(self.peak, self.kept)


def measured(num_blocks: int, *, reversible: bool = True) -> tuple[int, int]:
    """Bytes kept after a forward, and the peak over forward and backward. One branch serves all blocks."""
    branch, x = branch_module(), torch.randn(LENGTH, WIDTH, requires_grad=True)
    for parameter in [x, *branch.parameters()]:
        parameter.grad = torch.zeros_like(parameter)
    with Allocations() as forward:
        y1, y2 = run(branch, x, num_blocks, reversible=reversible)
    del y1, y2
    with Allocations() as step:
        y1, y2 = run(branch, x, num_blocks, reversible=reversible)
        (y1.sum() + y2.sum()).backward()
    return forward.kept, step.peak


def test_memory_is_the_same_for_2_and_24_blocks():
    (kept_2, peak_2), (kept_24, peak_24) = measured(2), measured(24)
    assert STREAMS <= kept_2 <= STREAMS + 2 * RANDOM_STATES
    assert 0 <= kept_24 - kept_2 <= 22 * RANDOM_STATES
    assert 0 <= peak_24 - peak_2 <= 24 * RANDOM_STATES
    plain_2, plain_24 = measured(2, reversible=False)[0], measured(24, reversible=False)[0]
    assert plain_24 - plain_2 > 22 * 10 * WIDTH * LENGTH * 4
    assert kept_24 < plain_24 / 50


def test_without_random_numbers_24_blocks_keep_exactly_what_2_do():
    branch, x = branch_module(dropout=0.0), torch.randn(LENGTH, WIDTH, requires_grad=True)
    kept = []
    for num_blocks in (2, 24):
        with Allocations() as forward:
            outputs = run(branch, x, num_blocks)
        kept.append(forward.kept)
        del outputs
    assert kept == [STREAMS, STREAMS]


def test_only_the_last_output_lives_after_the_forward():
    alive: list[weakref.ref[Tensor]] = []

    def watched(branch: nn.Module, x: Tensor) -> Tensor:
        out = branch(x)
        alive.extend((weakref.ref(x), weakref.ref(out)))
        return out

    y1, y2 = run(functools.partial(watched, branch_module()), torch.randn(LENGTH, WIDTH, requires_grad=True) * 1, 6)
    living = {id(t) for ref in alive if (t := ref()) is not None}
    assert living == {id(y1)}  # the input of the last g
    del y1, y2
    assert [ref() for ref in alive if ref() is not None] == []


@pytest.mark.parametrize("consume", [False, True])
def test_a_dropped_or_consumed_graph_frees_everything_without_the_garbage_collector(consume):
    branch, x = branch_module(), torch.randn(LENGTH, WIDTH, requires_grad=True)
    for parameter in [x, *branch.parameters()]:
        parameter.grad = torch.zeros_like(parameter)
    gc.collect()
    gc.disable()
    try:
        with Allocations() as allocations:
            closed_over = torch.zeros(LENGTH, WIDTH)
            known = weakref.ref(closed_over)
            y1, y2 = run(lambda t, mask=closed_over: branch(t) + mask, x, 4)
            if consume:
                (y1 * y2).sum().backward()
            del y1, y2, closed_over
        assert known() is None
        assert allocations.kept == 0
        assert allocations.peak > STREAMS
    finally:
        gc.enable()


def test_the_tape_holds_no_tensor():
    branch, x = branch_module(), torch.randn(LENGTH, WIDTH, requires_grad=True)
    with Allocations() as allocations:
        tape = ReversibleTape()
        y1, y2 = tape.block(branch, branch, x, x)
        del y1, y2
    assert allocations.kept == 0
    assert allocations.peak > STREAMS


def test_a_retained_graph_keeps_one_block_of_activations_at_a_time():
    branch, x = branch_module(dropout=0.0), torch.randn(LENGTH, WIDTH, requires_grad=True)
    for parameter in [x, *branch.parameters()]:
        parameter.grad = torch.zeros_like(parameter)
    kept = []
    for num_blocks in (2, 12):
        tape, outputs = ReversibleTape(), [(x, x)]
        for _ in range(num_blocks):
            outputs.append(tape.block(branch, branch, *outputs[-1]))
        losses = [(outputs[k][0] * outputs[k][1]).sum() for k in (1, -1)]
        for loss in losses:  # the first needs the first block only, by way of all the others
            with Allocations() as backward:
                loss.backward(retain_graph=True)
            kept.append(backward.kept)
    assert len(set(kept[::2])) == len(set(kept[1::2])) == 1


def test_each_branch_runs_twice_in_a_training_step():
    calls = []

    def f(t: Tensor) -> Tensor:
        calls.append(t.shape)
        return t.sin()

    x = torch.randn(3, 4, requires_grad=True)
    tape, y = ReversibleTape(), (x, x)
    for _ in range(10):
        y = tape.block(f, f, *y)
    assert len(calls) == 20
    (y[0] * y[1]).sum().backward()
    assert len(calls) == 40


def test_nothing_is_left_on_the_modules():
    branch = branch_module()
    before = {name: set(vars(module)) for name, module in branch.named_modules()}
    y1, y2 = run(branch, torch.randn(3, WIDTH), 3)
    assert {name: set(vars(module)) for name, module in branch.named_modules()} == before
    (y1 * y2).sum().backward()
    assert {name: set(vars(module)) for name, module in branch.named_modules()} == before


# ---- a clear error, never a wrong number


def stepped(change: Callable[[nn.Linear, Tensor, Tensor, Tensor], object], *, twice: bool = False) -> None:
    """A forward, something that happens to what it read, a backward."""
    torch.manual_seed(0)
    linear, mask = nn.Linear(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    tape = ReversibleTape()
    y1, y2 = x * 1, x * 2
    for _ in range(2):
        y1, y2 = tape.block(lambda t: (linear(t) + mask).sin(), torch.cos, y1, y2)
    loss = (y1 + y2).sum()
    if twice:
        loss.backward(retain_graph=True)
    with torch.no_grad():
        change(linear, mask, y1, y2)
    loss.backward()


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda linear, mask, y1, y2: linear.weight.add_(1),
        lambda linear, mask, y1, y2: linear.bias.add_(1),
        lambda linear, mask, y1, y2: mask.fill_(1),
        lambda linear, mask, y1, y2: y1.add_(1),
        lambda linear, mask, y1, y2: y2.add_(1),
        lambda linear, mask, y1, y2: torch.optim.SGD(linear.parameters(), lr=0.1).step(),
    ],
    ids=["weight", "bias", "mask", "y1", "y2", "optimizer"],
)
def test_a_change_in_place_between_forward_and_backward_is_an_error(change, twice):
    def with_gradients(linear: nn.Linear, *rest: Tensor) -> None:
        for parameter in linear.parameters():
            parameter.grad = torch.ones_like(parameter)
        change(linear, *rest)

    with pytest.raises(RuntimeError, match=r"in place|inplace operation"):
        stepped(with_gradients, twice=twice)
    stepped(lambda *_: None, twice=twice)


def test_a_change_of_a_saved_tensor_that_cannot_be_found_from_outside_is_an_error():
    class Hidden:
        def __init__(self) -> None:
            self.weight = torch.ones(4, requires_grad=True)

        def __call__(self, t: Tensor) -> Tensor:
            return (t * self.weight).sin()

    branch = Hidden()
    y1, y2 = ReversibleTape().block(branch, torch.cos, *(torch.randn(3, 4, requires_grad=True) for _ in range(2)))
    with torch.no_grad():
        branch.weight.add_(1)
    with pytest.raises(RuntimeError, match="must not change in place"):
        (y1 + y2).sum().backward()


def test_an_output_changed_in_place_before_the_next_block_is_an_error():
    x = torch.randn(3, 4, requires_grad=True)
    tape = ReversibleTape()
    y1, y2 = tape.block(torch.sin, torch.cos, x, x)
    y2.add_(1)
    y1, y2 = tape.block(torch.sin, torch.cos, y1, y2)
    with pytest.raises(RuntimeError, match="last output of a reversible stack must not change in place"):
        (y1 + y2).sum().backward()


def test_a_saved_tensor_changed_by_the_branch_itself_is_an_error_as_in_autograd():
    def f(t: Tensor) -> Tensor:
        out = t.exp()
        return out.add_(1)

    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        (x * 1 + f(x)).sum().backward()
    y1, y2 = ReversibleTape().block(f, torch.cos, x, x)
    with pytest.raises(RuntimeError, match="must not change in place"):
        (y1 * y2).sum().backward()


def test_a_middle_output_changed_in_place_after_its_use_is_rebuilt_or_an_error():
    """Plain autograd fails here only if the output was saved; the rebuilt one is never affected."""
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    gradients = []
    for change in (False, True):
        tape = ReversibleTape()
        y1, y2 = tape.block(lambda t: 2 * t, torch.sin, x * 1, x * 1)
        z1, z2 = tape.block(lambda t: 3 * t, torch.sin, y1, y2)
        if change:
            with torch.no_grad():
                y2.add_(1)
        gradients.append(torch.autograd.grad((z1 * z2).sum(), x)[0])
    assert torch.equal(*gradients)


def test_a_branch_that_changes_its_input_is_an_error():
    x = torch.randn(3, 4, requires_grad=True) * 1
    with pytest.raises(ValueError, match="must leave its input unchanged, got 1 in-place changes"):
        ReversibleTape().block(lambda t: t.relu_(), torch.cos, x, x)


@pytest.mark.parametrize("tape", [None, ReversibleTape()])
def test_a_branch_of_another_shape_is_an_error(tape):
    x = torch.randn(3, 4, requires_grad=True)
    rule = re.escape("a reversible branch must return the shape of its stream, [3, 4], got [3, 1]; ")
    with pytest.raises(ValueError, match=rule):
        reversible_block(torch.sin, lambda t: t.sum(-1, keepdim=True), x, x, tape)


def fewer(t: Tensor) -> Tensor:
    return t.sin()


def more(t: Tensor) -> Tensor:
    return t.sin().exp().cos()


def other_shape(t: Tensor) -> Tensor:
    return t[:, :2].sin().exp().repeat(1, 2)


def other_dtype(t: Tensor) -> Tensor:
    return t.float().sin().exp().double()


@pytest.mark.parametrize("second", [fewer, more, other_shape, other_dtype])
def test_a_branch_that_runs_differently_the_second_time_is_an_error(second):
    versions: Iterator[Callable[[Tensor], Tensor]] = iter([lambda t: t.sin().exp(), second])
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    y1, y2 = ReversibleTape().block(lambda t: next(versions)(t), torch.cos, x, x)
    with pytest.raises(RuntimeError, match="must save in the backward's rerun what it saved in the forward"):
        (y1 * y2).sum().backward()


def test_a_block_that_raised_does_not_disturb_the_tape():
    held: list[Tensor] = []

    def failing(t: Tensor) -> Tensor:
        held.append(t.exp())
        raise MemoryError

    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    gradients = []
    for fails in (False, True):
        tape = ReversibleTape()
        y = tape.block(torch.sin, torch.cos, x, x)
        if fails:
            with pytest.raises(MemoryError):
                tape.block(failing, torch.cos, *y)
        y1, y2 = tape.block(torch.cos, torch.sin, *y)
        gradients.append(torch.autograd.grad((y1 * y2).sum(), x)[0])
    assert torch.equal(*gradients)
    with pytest.raises(RuntimeError, match="a reversible block must finish before its backward"):
        held[0].sum().backward()
