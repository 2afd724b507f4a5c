"""Axial tables are mixed-radix lookups that may grow; rotary angles depend on distances only."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longmem.layers.positions import AxialPositionEmbeddings, rotary_angles, rotate

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def filled(shape: list[int], widths: list[int], seed: int = 0) -> AxialPositionEmbeddings:
    module = AxialPositionEmbeddings(shape, widths)
    generator = torch.Generator().manual_seed(seed)
    for weight in module.weights:
        torch.nn.init.normal_(weight, generator=generator)
    return module


@settings(max_examples=30, deadline=None)
@given(SHAPES)
def test_axial_rows_are_the_flattened_grid(shape: list[int]) -> None:
    widths = list(range(1, len(shape) + 1))
    module = filled(shape, widths)
    grid = torch.cat([weight.expand(*shape, -1) for weight in module.weights], dim=-1).reshape(math.prod(shape), -1)
    assert module.num_positions == math.prod(shape)
    assert torch.equal(module(torch.arange(module.num_positions)[None])[0], grid)


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.integers(1, 4))
def test_axial_rows_stay_when_the_first_axis_grows(shape: list[int], growth: int) -> None:
    widths = [2] * len(shape)
    module = filled(shape, widths)
    longer = filled([shape[0] + growth, *shape[1:]], widths, seed=1)
    with torch.no_grad():
        longer.weights[0][: shape[0]] = module.weights[0]
        for new, old in itertools.islice(zip(longer.weights, module.weights, strict=True), 1, None):
            new.copy_(old)
    positions = torch.arange(module.num_positions)[None]
    assert torch.equal(module(positions), longer(positions))


def test_axial_weights_have_the_shapes_of_published_checkpoints() -> None:
    shapes = [tuple(weight.shape) for weight in AxialPositionEmbeddings([4, 6], [1, 3]).weights]
    assert shapes == [(4, 1, 1), (1, 6, 3)]


def test_axial_position_outside_the_grid_is_an_error_and_unequal_axes_too() -> None:
    with pytest.raises(IndexError):
        filled([2, 3], [1, 1])(torch.tensor([[6]]))
    with pytest.raises(ValueError, match="equally many, got 2 and 1"):
        AxialPositionEmbeddings([2, 3], [4])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_rotated_products_depend_on_the_distance_only_and_keep_lengths(i: int, j: int, shift: int) -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(i)).double()

    def product(at_q: int, at_k: int) -> torch.Tensor:
        q_angles, k_angles = (rotary_angles(torch.tensor([[at]]), 8, 10000.0) for at in (at_q, at_k))
        return (rotate(q, q_angles) * rotate(k, k_angles)).sum()

    torch.testing.assert_close(product(i, j), product(i + shift, j + shift), atol=2e-4, rtol=2e-4)
    turned = rotate(q, rotary_angles(torch.tensor([[i]]), 8, 10000.0))
    torch.testing.assert_close(turned.norm(), q.norm(), atol=1e-6, rtol=1e-6)


def test_rotation_by_position_is_the_complex_product() -> None:
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    angles = torch.arange(7)[:, None] * 100.0 ** (-torch.arange(0, 6, 2) / 6)
    expected = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    turned = rotate(x, rotary_angles(torch.arange(7)[None], 6, 100.0))
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), -1), atol=1e-5, rtol=1e-5)
    assert rotate(x.bfloat16(), rotary_angles(torch.arange(7)[None], 6, 100.0)).dtype == torch.bfloat16
