"""The continuous long-term memory of the infinity-former: state in, state out. Derivations in README.md."""

from hf_longmem.ops.continuous.basis import GaussianBasis, basis_parameters, evaluate_basis, expected_basis
from hf_longmem.ops.continuous.density import (
    MemoryRead,
    gaussian_kl,
    read_context,
    read_density,
    read_density_of_inputs,
    read_memory,
    read_values,
    summarise_coefficients,
)
from hf_longmem.ops.continuous.memory import (
    MemoryState,
    convolution_gate,
    detach_memory,
    empty_memory,
    record_attention,
    reset_memory,
    sticky_positions,
    sticky_samples,
    write_memory,
)
from hf_longmem.ops.continuous.regression import (
    RegressionSpec,
    WriteMaps,
    contraction_radius,
    decay_tau,
    ridge_regression,
    select_write_maps,
    uniform_write_maps,
    write_maps,
)
from hf_longmem.ops.continuous.retention import Retention, memory_retention

__all__ = [
    "GaussianBasis",
    "MemoryRead",
    "MemoryState",
    "RegressionSpec",
    "Retention",
    "WriteMaps",
    "basis_parameters",
    "contraction_radius",
    "convolution_gate",
    "decay_tau",
    "detach_memory",
    "empty_memory",
    "evaluate_basis",
    "expected_basis",
    "gaussian_kl",
    "memory_retention",
    "read_context",
    "read_density",
    "read_density_of_inputs",
    "read_memory",
    "read_values",
    "record_attention",
    "reset_memory",
    "ridge_regression",
    "select_write_maps",
    "sticky_positions",
    "sticky_samples",
    "summarise_coefficients",
    "uniform_write_maps",
    "write_maps",
    "write_memory",
]
