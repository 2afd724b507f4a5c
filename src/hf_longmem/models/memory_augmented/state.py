"""What a model with a long-term memory around it remembers between calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from hf_longmem._errors import complaint
from hf_longmem.layers.continuous_attention import MemoryProjection
from hf_longmem.models.memory_augmented.configuration_memory_augmented import MemoryAugmentedConfig
from hf_longmem.models.row_memory import RowMemory
from hf_longmem.ops.continuous import MemoryState


@dataclass(frozen=True, eq=False)
class MemoryAugmentedState(RowMemory):
    """What a model remembers of each row: give it back as ``memory`` to go on where the call ended.

    window: token ids ``[B, S]``, or embeddings ``[B, S, E]`` where those were given: the ``window_length`` tokens
        before the segment, then the segment's own so far.
    inputs: of each layer with a memory, what it will write of the segment ``[B, S, E]``.
    memories: their memories.
    projections: these as attention heads see them, kept until the next write while gradients are off; else empty.
    """

    window: Tensor
    inputs: tuple[Tensor, ...]
    memories: tuple[MemoryState, ...]
    projections: tuple[MemoryProjection, ...] = ()

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> MemoryAugmentedState:
        """Put every tensor through ``change``, which may choose, repeat or move rows."""
        return MemoryAugmentedState(
            change(self.seen_B),
            change(self.window),
            tuple(map(change, self.inputs)),
            tuple(MemoryState(*map(change, memory)) for memory in self.memories),
            tuple(MemoryProjection(*map(change, projection)) for projection in self.projections),
        )

    def reset(self, rows_B: Tensor) -> MemoryAugmentedState:
        """Make the chosen rows as new, bit for bit, see `RowMemory.reset`."""
        # The projection of a row which has read nothing is not zero, but is not read.
        return replace(super().reset(rows_B), projections=())


def check_state(state: MemoryAugmentedState, config: MemoryAugmentedConfig, rows: int) -> None:
    """Raise a ValueError if a model of this config cannot go on with a state and a batch of so many rows."""
    if len(state.seen_B) != rows:
        rule = f"the batch must have the {len(state.seen_B)} rows that are remembered"
        raise ValueError(complaint(rule, rows, "start anew, or select() or repeat() rows (once for each beam)"))
    memory = config.memory
    shapes = {tuple(part.coefficients_BNE.shape[1:]) for part in state.memories}
    expected = (memory.num_basis, config.hidden_size)
    layers = len(memory.memory_layers)  # type: ignore[arg-type]
    if len(state.memories) != layers or shapes != {expected} or state.window.shape[1] < memory.window_length:  # type: ignore[operator]
        received = f"{len(state.memories)} memories {shapes} and {state.window.shape[1]} tokens"
        raise ValueError(complaint("what is remembered must come from a model of this config", received, "start anew"))


__all__ = ["MemoryAugmentedState", "check_state"]
