"""Fixtures of the continuous memory's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_longmem.ops.continuous import RegressionSpec, basis_parameters, evaluate_basis
from hf_longmem.ops.continuous.regression import first_positions, later_positions

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture
def golden() -> Callable[[str], dict[str, Tensor]]:
    """Load one file of numbers computed by the authors' code, floating arrays as float64 (see golden/README.md)."""

    def load(name: str) -> dict[str, Tensor]:
        with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as arrays:
            tensors = {key: torch.from_numpy(np.array(arrays[key])) for key in arrays.files}
        return {key: value.double() if value.is_floating_point() else value for key, value in tensors.items()}

    return load


@pytest.fixture
def inverse_error() -> Callable[[RegressionSpec, float], float]:
    """First-order relative error of a regression whose inverse was taken in float32: its condition number times 2^-24.

    The larger of the two condition numbers, since what a first write got wrong is carried into later ones.
    """

    def bound(spec: RegressionSpec, tau: float) -> float:
        parameters = basis_parameters(spec.basis, dtype=torch.float64)
        conditions = []
        for positions in (first_positions(spec), later_positions(spec, tau)):
            design = evaluate_basis(torch.cat(positions), *parameters)
            gram = design.T @ design + spec.ridge * torch.eye(spec.basis.num_basis, dtype=torch.float64)
            conditions.append(torch.linalg.cond(gram).item())
        return max(conditions) * 2.0**-24

    return bound


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Draw the same inputs whichever tests run before."""
    torch.manual_seed(0)
