"""Where a token stands: axial tables, and rotary angles computed on the fly (no buffer to go stale)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_longmem._errors import complaint


class AxialTables(nn.ParameterList):
    """The tables of all axes; a class of its own, so that a model's weight initialisation finds their direct owner."""


class AxialPositionEmbeddings(nn.Module):
    """Concatenate one small table's row per axis: position ``p`` in a grid of ``axial_shape`` has mixed-radix digits.

    With shape ``(n_0, ..., n_a)`` the digits of p are ``p // (n_1...n_a)``, ..., ``p % n_a``, so the first rows stay
    what they are when the first axis grows, and an input may have any length up to the product.

    Args:
        axial_shape: positions along each axis, any number of axes.
        axial_widths: width of each axis' table; they sum to the embedding's width E.

    Raises:
        ValueError: the two differ in length.

    Source: Kitaev et al. 2020, section "Experiments" (axial positional embeddings of Trax).
    """

    def __init__(self, axial_shape: Sequence[int], axial_widths: Sequence[int]) -> None:
        super().__init__()
        if len(axial_shape) != len(axial_widths):
            rule = "axial_shape and axial_widths must be equally many"
            raise ValueError(complaint(rule, f"{len(axial_shape)} and {len(axial_widths)}", "give one width per axis"))
        self.weights = AxialTables()
        for axis, (length, width) in enumerate(zip(axial_shape, axial_widths, strict=True)):
            grid = [1] * len(axial_shape)
            grid[axis] = length
            # Of this shape, rather than [length, width], in the checkpoints of transformers' Reformer.
            self.weights.append(nn.Parameter(torch.ones(*grid, width)))

    @property
    def num_positions(self) -> int:
        """How many positions the grid holds."""
        return math.prod(weight.shape[axis] for axis, weight in enumerate(self.weights))

    def forward(self, position_ids: Tensor) -> Tensor:
        """Look positions up.

        Args:
            position_ids: integers ``[B, T]`` in ``0 .. num_positions - 1``.

        Returns:
            Embeddings ``[B, T, E]``.
        """
        parts: list[Tensor] = []
        rest = position_ids
        for axis in reversed(range(len(self.weights))):
            weight = self.weights[axis]
            length = weight.shape[axis]
            # The first axis takes what is left whole, so that a position beyond the grid is an index error.
            digit = rest if axis == 0 else rest % length
            rest = rest // length
            parts.append(nn.functional.embedding(digit, weight.reshape(length, -1)))
        return torch.cat(parts[::-1], dim=-1)


def rotary_angles(position_ids: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of ``p * theta^(-2i/D)`` for each position p and pair i of head channels.

    Args:
        position_ids: integers ``[B, T]``.
        head_dim: width D of a head, even.
        theta: base of the frequencies.

    Returns:
        ``(cos, sin)``, both float32 ``[B, 1, T, D/2]``.

    Source: Su et al. 2021, *RoFormer*, equation 15.
    """
    pairs = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32)
    angles = position_ids[:, None, :, None].float() * theta ** (-pairs / head_dim)
    return angles.cos(), angles.sin()


def rotate(x_BHTD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair ``(x_i, x_(i + D/2))`` by its angle; lengths, and so the norms of keys, stay what they are.

    Args:
        x_BHTD: queries or keys.
        angles: what ``rotary_angles`` gives for their positions.

    Returns:
        The rotated tensor, in the dtype of ``x_BHTD``.

    Source: Su et al. 2021, *RoFormer*, equation 34.
    """
    cos, sin = angles
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BHTD.dtype)
