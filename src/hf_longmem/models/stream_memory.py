"""Memory that goes from one batch of documents to the next by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, runtime_checkable

from hf_longmem._errors import complaint


class StreamMemory:
    """Holds what a model remembers of a stream of batches; passed as ``memory``, it is read and then written.

    A data loader makes batches ahead of the steps that use them, so a batch cannot bring the memory itself. All
    batches of one stream bring one holder instead. What moves, casts, splits or gathers batches leaves it alone: it
    is no tensor, no sequence, no mapping, and has no ``to``.

    Attributes:
        value: what the model returned last as ``memory``; None where no document has begun.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'empty' if self.value is None else type(self.value).__name__})"


class CarriedMemory:
    """What is remembered of the streams of one data set.

    Attributes:
        num_batches: how many batches of this epoch the model has read.
        value: the memory after them.
        made: number and rows of the batch that was made last; None where any may be made next.
        advice: what to do where a batch finds that batches before it are missing.
    """

    def __init__(self) -> None:
        self.restore(0, None)

    def restore(self, num_batches: int, value: Any) -> None:
        """Go on as after ``num_batches`` batches of an epoch that left the memory ``value``."""
        self.num_batches, self.value = num_batches, value
        self.made: tuple[int, list[int]] | None = None
        self.advice = "give every batch to the model in order; to begin in the middle, restore the memory first"
        self._before: Any = None

    def read(self, time: int) -> Any:
        """Give what batch number ``time`` goes on from; the same again for a batch that is given to the model twice."""
        if time == 0:
            return None
        if time == self.num_batches:
            return self.value
        if time == self.num_batches - 1 and self._before is not None:
            return self._before
        rule = "a batch of document streams goes on from the memory of the batch before"
        raise ValueError(complaint(rule, f"batch {time} after {self.num_batches} batches", self.advice))

    def write(self, time: int, value: Any) -> None:
        """Take what batch number ``time`` left."""
        self._before = self.read(time)
        self.num_batches, self.value = time + 1, value


class MemoryStreams:
    """Base of data sets whose every batch goes on where the batch before ended; `MemoryCollator` makes the batches."""


@runtime_checkable
class MemoryCollator(Protocol):
    """What carries the memory of such data sets."""

    def carried(self, streams: Any) -> CarriedMemory:
        """What is remembered of a data set's streams, to be saved and restored."""


def carried_memory(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the ``forward`` of a model with memory, so that its ``memory`` may be a `StreamMemory`.

    Given one, the model goes on from ``memory.value`` (in evaluation mode and without gradients too), leaves its new
    memory there instead of in its output, and leaves it as it was where ``forward`` raises.

    The class has ``empty_memory(batch_size, device)``; ``forward`` has the arguments ``input_ids``, ``inputs_embeds``
    and, passed by name, ``memory``, and returns a `ModelOutput` with ``memory``: decorate inside what makes a tuple.

    Raises:
        ValueError: a model split by ``torch.nn.DataParallel`` is given a holder, which its threads would share.
    """
    signature = inspect.signature(forward)

    @wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        holder = kwargs.get("memory")
        if not isinstance(holder, StreamMemory):
            return forward(self, *args, **kwargs)
        if getattr(self, "_is_replica", False):
            rule = "a memory carried from batch to batch needs a process for each device"
            fix = "start with torchrun or accelerate launch, or let only one device be visible"
            raise ValueError(complaint(rule, "torch.nn.DataParallel", fix))
        memory = holder.value
        if memory is None:
            given = signature.bind_partial(self, *args, **kwargs).arguments
            tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
            if tokens is not None:
                memory = self.empty_memory(len(tokens), tokens.device)
        outputs = forward(self, *args, **(kwargs | {"memory": memory}))
        holder.value = outputs["memory"]
        return type(outputs)(**{name: value for name, value in outputs.items() if name != "memory"})

    return wrapper


__all__ = ["CarriedMemory", "MemoryCollator", "MemoryStreams", "StreamMemory", "carried_memory"]
