"""`InfiniteFormerConfig`: resolved once, checked at construction, saved as resolved."""

from __future__ import annotations

from typing import Any

import pytest

from hf_longmem.models.infinite_former.configuration_infinite_former import InfiniteFormerConfig
from hf_longmem.ops.continuous import contraction_radius


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
        ({"memory_prior_std": 0.0}, "memory_prior_std must be positive"),
        ({"memory_kl_weight": -1.0}, "memory_kl_weight must not be negative"),
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
