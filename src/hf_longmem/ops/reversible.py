"""Reversible residual coupling: a stack of blocks that keeps only its last output for the backward pass.

``y1 = x1 + f(x2)``, ``y2 = x2 + g(y1)`` is undone by ``x2 = y2 - g(y1)``, ``x1 = y1 - f(x2)`` (Gomez, Ren, Urtasun and
Grosse, *The Reversible Residual Network*, 2017, equations 6 and 7; Kitaev, Kaiser and Levskaya, *Reformer*, 2020,
section 3).

How it works. The forward is ordinary autograd, run under :class:`torch.autograd.graph.saved_tensors_hooks`: the graph
exists, but each place where it would hold a tensor holds a numbered slot. The first slot of a block that the backward
asks for makes the block run once more, ``g(y1)`` and then ``f(x2)``, from its output and with the random numbers and
the autocast state of the forward. That one run yields the block's input, which is the output of the block before, and
the tensors for all its slots. Since the graph is autograd's own, everything built on it (DDP, FSDP, hooks,
``autograd.grad``, double backward) sees nothing special.

Who owns what. ``graph node -> slot -> chain -> blocks``, and nothing points back: slots are known to their block, and a
chain to its tape, by weak references only. So a graph that is consumed or dropped frees everything at once.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_longmem._errors import complaint
from hf_longmem.ops._rerun import (
    Ambient,
    RandomStates,
    get_random_states,
    random_states_kept,
    set_random_states,
    training_modes,
    what_it_reads,
)

Branch = Callable[[Tensor], Tensor]


def reversible_block(
    f: Branch, g: Branch, x1: Tensor, x2: Tensor, tape: ReversibleTape | None = None
) -> tuple[Tensor, Tensor]:
    """Couple two residual streams: ``y1 = x1 + f(x2)``, ``y2 = x2 + g(y1)``.

    Args:
        f: maps ``x2`` to a tensor of the shape of ``x1``.
        g: maps ``y1`` to a tensor of the shape of ``x2``.
        x1: first stream, ``[..., E]``. Each stream keeps its dtype, whatever its branch returns.
        x2: second stream, ``[..., E]``.
        tape: the tape of this forward pass, or None for plain autograd; the numbers are the same.

    Returns:
        ``(y1, y2)``.

    Raises:
        ValueError: a branch returns another shape than its stream has.

    >>> x = torch.tensor([1.0, 2.0])
    >>> reversible_block(lambda t: 10 * t, lambda t: t + 1, x, x)
    (tensor([11., 22.]), tensor([13., 25.]))
    """
    if tape is not None:
        return tape.block(f, g, x1, x2)
    y1 = x1 + _branch_like(x1, f, x2)
    return y1, x2 + _branch_like(x2, g, y1)


class ReversibleTape:
    """Runs the blocks of one forward pass so that only the last block's output is kept: ``x = y - branch(...)``.

    Make one tape per forward pass and hand it to every block. Two forward passes may precede a backward, a graph may be
    consumed twice (``retain_graph``, ``create_graph``), and any output of any block may enter a loss. A block whose
    inputs are not the outputs of the block before it (something was computed in between) starts a new chain, which
    costs the memory of one more output and nothing else. The tape itself holds no tensor.

    What a branch must be: a function of its input, of parameters and of closed-over tensors, with random numbers
    from torch's default generators only. It runs a second time in the backward, as under
    :func:`torch.utils.checkpoint.checkpoint`, and so do forward hooks inside it. Backward hooks run once. Modules found
    in it run in the mode (training or evaluation) of the forward, even if that was changed before the backward.

    Streams are rebuilt to within rounding, block by block, so keep them float32 (as under autocast, where branches may
    return less). Per block remain the generator states of branches that draw random numbers, 5 kB each on a CPU.

    The plain coupling, with all activations kept, runs where hooks can do nothing: without grad mode, inside
    ``torch.compile`` and ``torch.export`` (whose partitioner decides what to keep), under ``torch.func`` transforms, on
    the meta device and on inference tensors.
    """

    def __init__(self) -> None:
        self._chain: weakref.ref[_Chain] | None = None

    def block(self, f: Branch, g: Branch, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        """Couple two residual streams as :func:`reversible_block` does: ``y1 = x1 + f(x2)``, ``y2 = x2 + g(y1)``.

        Args:
            f: maps ``x2`` to a tensor of the shape of ``x1``.
            g: maps ``y1`` to a tensor of the shape of ``x2``.
            x1: first stream, ``[..., E]``.
            x2: second stream, ``[..., E]``.

        Returns:
            ``(y1, y2)``.

        Raises:
            ValueError: a branch returns another shape than its stream has, or changes its input in place.
            RuntimeError: in the backward, when a block cannot be run again as it ran: a tensor that it reads was
                changed in place, or its branches saved other tensors than before.
        """
        if not _can_record(x1, x2):
            return reversible_block(f, g, x1, x2)
        chain = self._chain() if self._chain is not None else None
        if chain is None or not chain.ends_in(x1, x2):
            chain = _Chain()
        block = _Block(Ambient(x1, x2))
        y1 = x1 + block.record(chain, f, x2, like=x1)
        y2 = x2 + block.record(chain, g, y1, like=x2)
        chain.append(block, y1, y2)
        self._chain = weakref.ref(chain)
        return y1, y2


def _can_record(x1: Tensor, x2: Tensor) -> bool:
    # torch.func transforms forbid saved-tensor hooks; autograd has no public question for that.
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        and not any(x.is_meta or x.is_inference() for x in (x1, x2))
    )


def _branch_like(stream: Tensor, fn: Branch, x: Tensor) -> Tensor:
    out = fn(x)
    if out.shape != stream.shape:
        raise ValueError(
            complaint(
                f"a reversible branch must return the shape of its stream, {list(stream.shape)}",
                list(out.shape),
                "broadcasting cannot be undone: expand the result to the stream's shape",
            )
        )
    return out.to(stream.dtype)


class _Slot:
    """What the graph holds in place of a saved tensor; its value is there while its block is being consumed."""

    __slots__ = ("__weakref__", "block", "chain", "value", "version")

    def __init__(self, chain: _Chain, block: _Block) -> None:
        self.chain = chain
        self.block = block
        self.value: Tensor | None = None
        self.version = 0


def _unpack(slot: _Slot) -> Tensor:
    with slot.chain.lock:
        while (value := slot.value) is None:  # once: restore fills every living slot of the block, or raises
            slot.chain.restore(slot.block)
        # Hooks switch off autograd's own check, which this one replaces.
        if value._version != slot.version:
            raise RuntimeError(
                complaint(
                    "a tensor needed by the backward of a reversible block must not change in place",
                    f"one of shape {list(value.shape)} at version {value._version} instead of {slot.version}",
                    "change it out of place, or after the backward",
                )
            )
        return value


class _Saved(NamedTuple):
    """One tensor that a branch saved: the slot, and what must be the same when it is saved again."""

    slot: weakref.ref[_Slot]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class _Filling(NamedTuple):
    """What a replay found for a slot."""

    slot: _Slot
    value: Tensor
    version: int


class _Recording:
    """One branch as it ran in the forward, and the means to run it again."""

    def __init__(self, fn: Branch, x: Tensor) -> None:
        self.fn = fn
        self.requires_grad = x.requires_grad
        self.saved: list[_Saved] = []
        self.random: RandomStates | None = None
        tensors, modules = what_it_reads(fn)
        self.versions = [(weakref.ref(t), t._version) for t in tensors if not t.is_inference()]
        self.modes = [(module, module.training) for module in modules]

    def pack(self, chain: _Chain, block: _Block, tensor: Tensor) -> _Slot:
        slot = _Slot(chain, block)
        self.saved.append(_Saved(weakref.ref(slot), tensor.shape, tensor.dtype, tensor.device))
        self.versions.append((weakref.ref(tensor), tensor._version))
        return slot

    def replay(self, x: Tensor, fill: list[_Filling]) -> Tensor:
        """Run the branch again; append to ``fill`` what belongs into the slots that are still alive."""
        self._check_versions()
        count = 0

        def pack(tensor: Tensor) -> None:
            nonlocal count
            if count == len(self.saved):
                raise RuntimeError(_unlike(f"{len(self.saved)} tensors", "more"))
            slot, *expected = self.saved[count]
            if [tensor.shape, tensor.dtype, tensor.device] != expected:
                raise RuntimeError(_unlike(expected, [tensor.shape, tensor.dtype, tensor.device]))
            count += 1
            if (alive := slot()) is not None:
                fill.append(_Filling(alive, tensor.detach(), tensor._version))

        with training_modes(self.modes), torch.autograd.graph.saved_tensors_hooks(pack, _never_unpacked):
            if self.random is not None:
                set_random_states(self.random)
            out = self.fn(x.detach().requires_grad_(self.requires_grad)).detach()
        if count != len(self.saved):
            raise RuntimeError(_unlike(f"{len(self.saved)} tensors", count))
        return out

    def _check_versions(self) -> None:
        for known, version in self.versions:
            tensor = known()
            if tensor is not None and tensor._version != version:
                raise RuntimeError(
                    complaint(
                        "a tensor that a reversible block reads must not change in place between forward and backward",
                        f"one of shape {list(tensor.shape)} at version {tensor._version} instead of {version}",
                        "run the backward first (before optimizer.step(), say), or set config.reversible=False",
                    )
                )


class _Block:
    """One coupling as it ran in the forward."""

    def __init__(self, ambient: Ambient) -> None:
        self.ambient = ambient
        self.branches: list[_Recording] = []

    def record(self, chain: _Chain, fn: Branch, x: Tensor, *, like: Tensor) -> Tensor:
        branch = _Recording(fn, x)
        self.branches.append(branch)
        version, before = x._version, get_random_states(self.ambient.devices)
        pack = functools.partial(branch.pack, chain, self)
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            out = _branch_like(like, fn, x)
        if x._version != version:
            raise ValueError(
                complaint(
                    "a reversible branch must leave its input unchanged",
                    f"{x._version - version} in-place changes",
                    "use the out-of-place operation",
                )
            )
        after = get_random_states(self.ambient.devices)
        # A branch that draws nothing needs no state: 5 kB each that would add up over the layers.
        if any(not torch.equal(before[device], after[device]) for device in before):
            branch.random = before
        return out

    def replay(self, y1: Tensor, y2: Tensor, fill: list[_Filling]) -> tuple[Tensor, Tensor]:
        """Compute the inputs from the outputs; append to ``fill`` what belongs into the slots."""
        f, g = self.branches
        with torch.enable_grad(), self.ambient.entered(), random_states_kept(self.ambient.devices):
            x2 = y2 - g.replay(y1, fill).to(y2.dtype)
            x1 = y1 - f.replay(x2, fill).to(y1.dtype)
        return x1, x2

    def release(self) -> None:
        for branch in self.branches:
            for saved in branch.saved:
                if (slot := saved.slot()) is not None:
                    slot.value = None


class _Chain:
    """Blocks each of which takes the outputs of the one before; holds the outputs of the last."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self.lock = threading.RLock()  # with several devices the autograd engine has several threads
        self._last: tuple[tuple[Tensor, int], ...] = ()  # (y1, its version), (y2, its version)
        self._rebuilt: tuple[int, Tensor, Tensor] | None = None  # position of a block, y1, y2
        self._filled: _Block | None = None

    def append(self, block: _Block, y1: Tensor, y2: Tensor) -> None:
        self.blocks.append(block)
        # detach: the same memory and version counter, without the graph (which would be a reference cycle).
        self._last = tuple((y.detach(), y._version) for y in (y1, y2))

    def ends_in(self, x1: Tensor, x2: Tensor) -> bool:
        """Whether these are the last outputs, unchanged. Compared by memory: wrappers such as FSDP2 make aliases."""
        return all(
            type(x) is Tensor and y._version == version and x.dtype == y.dtype and x.is_set_to(y)
            for x, (y, version) in zip((x1, x2), self._last, strict=True)
        )

    def restore(self, block: _Block) -> None:
        """Fill the slots of a block, running again every block between it and the nearest known output."""
        if block not in self.blocks:
            raise RuntimeError(
                complaint("a reversible block must finish before its backward", "one that raised", "run it again")
            )
        position = self.blocks.index(block)
        if self._filled is not None:
            # Under retain_graph slots outlive their use; one block's activations at a time are enough.
            self._filled.release()
        nearest, y1, y2 = self._nearest_output(position)
        fill: list[_Filling] = []
        for at in range(nearest, position - 1, -1):
            fill.clear()
            y1, y2 = self.blocks[at].replay(y1, y2, fill)
            self._rebuilt = (at - 1, y1, y2) if at > 0 else None
        for filling in fill:
            filling.slot.value, filling.slot.version = filling.value, filling.version
        self._filled = block

    def _nearest_output(self, position: int) -> tuple[int, Tensor, Tensor]:
        if self._rebuilt is not None and self._rebuilt[0] >= position:
            return self._rebuilt
        for y, version in self._last:
            if y._version != version:
                raise RuntimeError(
                    complaint(
                        "the last output of a reversible stack must not change in place before the backward",
                        f"version {y._version} instead of {version}",
                        "use the out-of-place operation",
                    )
                )
        (y1, _), (y2, _) = self._last
        return len(self.blocks) - 1, y1, y2


def _never_unpacked(_: None) -> Tensor:
    raise RuntimeError("the graph of a replayed reversible block has no backward; differentiate the block's outputs")


def _unlike(expected: object, received: object) -> str:
    return complaint(
        f"a reversible branch must save in the backward's rerun what it saved in the forward, {expected}",
        received,
        "make it a function of its input, its parameters and torch's default random numbers only",
    )
