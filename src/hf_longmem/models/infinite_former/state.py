"""What an infinity-former remembers between calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hf_longmem._errors import complaint
from hf_longmem.layers.continuous_attention import MemoryProjection
from hf_longmem.models.infinite_former.configuration_infinite_former import InfiniteFormerConfig
from hf_longmem.models.row_memory import RowMemory
from hf_longmem.ops.continuous import MemoryState


@dataclass(frozen=True, eq=False)
class LayerState:
    """What one layer remembers.

    inputs_BSE: its normalised inputs in the short-term window (see ``segments.py``), the segment to be written among
        them.
    keys_BSE, values_BSE: their projections ``[B, S, H D]``, kept while gradients are off.
    memory: the long-term memory, if the layer has one.
    projection: the memory as attention heads see it, kept until the next write while gradients are off.
    """

    inputs_BSE: Tensor
    keys_BSE: Tensor | None
    values_BSE: Tensor | None
    memory: MemoryState | None
    projection: MemoryProjection | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> LayerState:
        """Put every tensor through ``change``."""
        keys, values = (None if part is None else change(part) for part in (self.keys_BSE, self.values_BSE))
        memory = None if self.memory is None else MemoryState(*map(change, self.memory))
        projection = None if self.projection is None else MemoryProjection(*map(change, self.projection))
        return LayerState(change(self.inputs_BSE), keys, values, memory, projection)


@dataclass(frozen=True, eq=False)
class InfiniteFormerMemory(RowMemory):
    """What a model remembers of each row: give it back as ``memory`` to go on where the call ended.

    layers: the layers' states.
    """

    layers: tuple[LayerState, ...]

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> InfiniteFormerMemory:
        """Put every tensor through ``change``, which may choose, repeat or move rows."""
        return InfiniteFormerMemory(change(self.seen_B), tuple(layer.map(change) for layer in self.layers))


def check_memory(memory: InfiniteFormerMemory, config: InfiniteFormerConfig, rows: int) -> None:
    """Raise a ValueError if a model of this config cannot go on with a memory and a batch of so many rows."""
    if len(memory.seen_B) != rows:
        rule = f"the batch must have the {len(memory.seen_B)} rows that are remembered"
        raise ValueError(complaint(rule, rows, "start anew, or select() or repeat() rows (once for each beam)"))
    shapes = {tuple(layer.inputs_BSE.shape[2:]) for layer in memory.layers}
    basis = {tuple(layer.memory.coefficients_BNE.shape[1:]) for layer in memory.layers if layer.memory is not None}
    having = tuple(index for index, layer in enumerate(memory.layers) if layer.memory is not None)
    window, length = config.short_term_window or 0, config.segment_length
    pending = max(((seen - 1) % length + 1 if seen else 0 for seen in memory.seen_B.tolist()), default=0)
    widths = [layer.inputs_BSE.shape[1] for layer in memory.layers]
    fits = len(memory.layers) == config.num_hidden_layers and having == config.memory_layers
    fits = fits and all(window + pending <= width <= window + length for width in widths)
    fits = fits and shapes == {(config.hidden_size,)} and basis <= {(config.num_basis, config.hidden_size)}
    if not fits:
        received = f"{len(memory.layers)} layers {shapes}, memories {basis} in layers {having}"
        raise ValueError(complaint("what is remembered must come from a model of this config", received, "start anew"))
