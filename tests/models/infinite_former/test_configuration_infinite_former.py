"""`InfiniteFormerConfig`: resolved once, checked at construction, saved as resolved."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from hf_longmem.models.infinite_former.configuration_infinite_former import InfiniteFormerConfig
from hf_longmem.ops.continuous import contraction_radius
from hf_longmem.ops.continuous.regression import solve_write_maps


def test_what_is_left_open_is_derived() -> None:
    config = InfiniteFormerConfig(hidden_size=96, num_attention_heads=4, segment_length=128, num_basis=64)
    assert config.attention_head_size == 24
    assert config.feed_forward_size == 384
    assert config.short_term_window == 128
    assert config.memory_layers == (0, 1, 2, 3, 4, 5)
    assert config.num_samples == 128
    assert config.uniform_segments == 32


@pytest.mark.parametrize(
    "options", [{}, {"memory_decay": "uniform", "memory_layers": [1, 3], "short_term_window": 0, "num_basis": 63}]
)
def test_saving_and_loading_gives_the_same_config(options: dict[str, Any], tmp_path: Any) -> None:
    config = InfiniteFormerConfig(**options)
    config.save_pretrained(tmp_path)
    loaded = InfiniteFormerConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert loaded.regression == config.regression


@pytest.mark.parametrize(
    ("override", "derived"),
    [
        ({"num_hidden_layers": 3}, {"memory_layers": (0, 1, 2)}),
        ({"num_basis": 64}, {"num_samples": 128, "uniform_segments": 32}),
        ({"segment_length": 64}, {"short_term_window": 64}),
        ({"num_attention_heads": 8}, {"attention_head_size": 32}),
        ({"hidden_size": 128}, {"attention_head_size": 32, "feed_forward_size": 512}),
        ({"basis_widths": [0.01, 0.02, 0.05]}, {"uniform_segments": 85}),
        ({"num_basis": 64, "num_samples": 64}, {"num_samples": 64, "uniform_segments": 32}),
        ({"memory_decay": 0.5}, {"memory_layers": (0, 1, 2, 3, 4, 5), "num_samples": 512, "short_term_window": 256}),
    ],
)
def test_what_was_derived_follows_what_is_overridden_while_loading(
    override: dict[str, Any], derived: dict[str, Any], tmp_path: Any
) -> None:
    InfiniteFormerConfig().save_pretrained(tmp_path)
    loaded = InfiniteFormerConfig.from_pretrained(tmp_path, **override)
    assert {name: getattr(loaded, name) for name in derived} == derived
    assert loaded.to_dict() == InfiniteFormerConfig(**override).to_dict() | {"architectures": None}


def test_what_was_chosen_stays_while_loading_or_says_what_to_pass(tmp_path: Any) -> None:
    chosen = {"memory_layers": (1, 3), "num_samples": 300, "short_term_window": 8, "uniform_segments": 9}
    InfiniteFormerConfig(**chosen).save_pretrained(tmp_path)
    loaded = InfiniteFormerConfig.from_pretrained(tmp_path, num_basis=128, segment_length=64, num_hidden_layers=4)
    assert {name: getattr(loaded, name) for name in chosen} == chosen
    with pytest.raises(ValueError, match=r"memory_layers must be rising layer indices from 0 to 2, got \(1, 3\)"):
        InfiniteFormerConfig.from_pretrained(tmp_path, num_hidden_layers=3)
    assert InfiniteFormerConfig.from_pretrained(tmp_path, num_hidden_layers=3, memory_layers=[1]).memory_layers == (1,)


def test_overrides_while_loading_are_checked(tmp_path: Any) -> None:
    InfiniteFormerConfig().save_pretrained(tmp_path)
    assert InfiniteFormerConfig.from_pretrained(tmp_path, memory_decay=0.5).decay == 0.5
    with pytest.raises(ValueError, match="tau must lie strictly between 0 and 1, got 2"):
        InfiniteFormerConfig.from_pretrained(tmp_path, memory_decay=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment_length": 0}, "segment_length must be from 1 .* got 0; use 1"),
        ({"memory_decay": 0.0}, "tau must lie strictly between 0 and 1, got 0"),
        ({"memory_decay": 1}, "tau must lie strictly between 0 and 1, got 1"),
        ({"memory_decay": "exponential"}, "decay must be 'uniform' or a number"),
        ({"num_basis": 1}, "num_basis must be a whole number of at least 2"),
        ({"basis_widths": (0.01, 0.0)}, "every basis width must be positive"),
        ({"basis_widths": ()}, "at least one width"),
        ({"memory_ridge": 0}, "ridge must be positive"),
        ({"memory_layers": (3, 6)}, "memory_layers must be rising layer indices from 0 to 5"),
        ({"memory_layers": (3, 3)}, "memory_layers must be rising"),
        ({"memory_gate": "linear"}, "memory_gate must be None or 'convolution'"),
        ({"sticky_draw": "sobol"}, "sticky_draw must be one of"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type must be one of"),
        ({"hidden_size": 12, "num_attention_heads": 4}, "attention_head_size must be even for rotary"),
        ({"basis_widths": (1e-9,), "num_basis": 16, "segment_length": 8}, "basis functions must be wide enough"),
        ({"memory_prior_std": 0.0}, "memory_prior_std must be from 1e-15"),
        ({"memory_prior_std": 1e-30, "memory_variance_floor": 0}, "memory_prior_std must be from 1e-15"),
        ({"memory_kl_weight": -1.0}, "memory_kl_weight must be finite and not negative"),
        ({"memory_kl_weight": float("inf")}, "memory_kl_weight must be finite and not negative"),
        ({"memory_variance_floor": float("nan")}, "memory_variance_floor must be finite and not negative"),
        ({"bptt_segments": 0}, "bptt_segments must be from 1"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob must be at least 0 and below 1"),
    ],
)
def test_an_impossible_setting_says_what_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InfiniteFormerConfig(**options)


def test_a_contraction_that_amplifies_without_bound_is_refused() -> None:
    explosive: dict[str, Any] = {"num_basis": 64, "num_samples": 32, "memory_decay": 0.9}
    with pytest.raises(ValueError, match=r"spectral radius must be below 1, got 1\.26 at tau = 0\.9"):
        InfiniteFormerConfig(**explosive)
    assert InfiniteFormerConfig(**explosive, memory_layers=()).memory_layers == ()
    explosive["num_samples"] = 64
    config = InfiniteFormerConfig(**explosive)
    assert contraction_radius(config.regression, 0.9) < 1


@pytest.mark.parametrize(
    "options",
    [
        {"num_basis": 10**9},
        {"num_samples": 10**9},
        {"segment_length": 10**9},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**12},
        {"hidden_size": 10**12},
        {"uniform_segments": 10**9, "memory_decay": "uniform"},
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_allocated(options: dict[str, Any]) -> None:
    # Far above what a config's checks need, far below what any of these sizes would take.
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"must .* got \d+; use"):
            InfiniteFormerConfig(**options)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_large_basis_costs_a_config_nothing() -> None:
    calls = solve_write_maps.cache_info().misses
    config = InfiniteFormerConfig(num_basis=4096, segment_length=4096)
    assert config.num_samples == 8192
    assert solve_write_maps.cache_info().misses == calls
