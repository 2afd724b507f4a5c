"""What a function computes depends on more than its input: what to note down so that it can run again the same."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator

import torch
from torch import Tensor

RandomStates = dict[torch.device, Tensor]

_CPU = torch.device("cpu")


class Ambient:
    """The thread's state that decides what a branch computes: autocast and the default device."""

    def __init__(self, x1: Tensor, x2: Tensor) -> None:
        self.devices = {_CPU, x1.device, x2.device}
        self.default_device = torch.get_default_device()
        self.cache_enabled = torch.is_autocast_cache_enabled()
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted({device.type for device in self.devices})
            if torch.amp.is_autocast_available(kind)
        ]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=self.cache_enabled)
                )
            if torch.get_default_device() != self.default_device:
                stack.enter_context(self.default_device)
            yield


def get_random_states(devices: set[torch.device]) -> RandomStates:
    return {device: _random_module(device).get_rng_state(*_index(device)) for device in devices}


def set_random_states(states: RandomStates) -> None:
    for device, state in states.items():
        _random_module(device).set_rng_state(state, *_index(device))


def _random_module(device: torch.device) -> types.ModuleType:
    return torch.random if device.type == "cpu" else torch.get_device_module(device)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type in ("cpu", "mps") else (device,)  # these have one generator


@contextlib.contextmanager
def random_states_kept(devices: set[torch.device]) -> Iterator[None]:
    states = get_random_states(devices)
    try:
        yield
    finally:
        set_random_states(states)


@contextlib.contextmanager
def training_modes(modes: list[tuple[torch.nn.Module, bool]]) -> Iterator[None]:
    changed = [(module, module.training) for module, training in modes if module.training != training]
    try:
        for module, training in changed:
            module.training = not training
        yield
    finally:
        for module, training in changed:
            module.training = training


def what_it_reads(fn: object) -> tuple[list[Tensor], list[torch.nn.Module]]:
    """The tensors and modules a function closes over, as far as can be seen: partials, methods, closures, containers.

    Autograd checks the version of what it saves. A replay also depends on what it never saves, such as a bias or an
    additive mask, so those are watched too. Buffers are not: a module may change its own in every forward.
    """
    tensors: list[Tensor] = []
    modules: dict[torch.nn.Module, None] = {}
    seen: set[int] = set()
    todo = [fn]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, torch.nn.Module):
            tensors.extend(item.parameters())
            modules.update(dict.fromkeys(item.modules()))
        elif isinstance(item, functools.partial):
            todo.extend((item.func, *item.args, *item.keywords.values()))
        elif isinstance(item, types.MethodType):
            todo.extend((item.__func__, item.__self__))
        elif isinstance(item, types.FunctionType):
            todo.extend((*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()))
            for cell in item.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell: a name not yet bound
                    todo.append(cell.cell_contents)
        elif isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, list | tuple):
            todo.extend(item)
    return tensors, list(modules)
