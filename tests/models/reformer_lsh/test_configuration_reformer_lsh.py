"""Everything is resolved and checked when a config is built; nothing impossible can be built, or saved."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from hf_longmem import ReformerLSHConfig


def test_defaults_are_resolved_at_construction() -> None:
    config = ReformerLSHConfig()
    assert config.num_hidden_layers == 6
    assert config.attention_head_size == 64
    assert config.feed_forward_size == 1024
    assert config.num_buckets == (8, 8)
    assert (config.lsh_num_chunks_after, config.local_num_chunks_after) == (0, 0)
    assert (config.axial_pos_shape, config.axial_pos_embds_dim) == ((64, 64), (64, 192))


def test_bidirectional_models_look_as_far_ahead_as_back() -> None:
    config = ReformerLSHConfig(is_decoder=False, lsh_num_chunks_before=2)
    assert (config.lsh_num_chunks_after, config.local_num_chunks_after) == (2, 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2**20), st.integers(1, 512), st.integers(1, 4))
def test_derived_buckets_and_axes_fit_the_length(length: int, chunk: int, num_axes: int) -> None:
    widths = [1] * (num_axes - 1) + [32 - num_axes + 1]
    config = ReformerLSHConfig(
        hidden_size=32, max_position_embeddings=length, lsh_attn_chunk_length=chunk, axial_pos_embds_dim=widths
    )
    factors = (config.num_buckets,) if isinstance(config.num_buckets, int) else config.num_buckets
    buckets = math.prod(factors)
    assert all(factor % 2 == 0 for factor in factors)
    assert buckets & (buckets - 1) == 0
    assert buckets == 2 or length / chunk / 1.5 < buckets < length / chunk * 1.5
    assert len(factors) == (2 if buckets >= 64 else 1)
    assert len(config.axial_pos_shape) == num_axes
    assert config.num_positions == math.prod(config.axial_pos_shape) >= length


def test_saved_config_is_resolved_and_loads_equal(tmp_path: Path) -> None:
    config = ReformerLSHConfig(attn_layers=["lsh"], axial_pos_shape=[8, 8, 64], axial_pos_embds_dim=[16, 16, 224])
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["num_buckets"] == [8, 8]
    assert saved["lsh_num_chunks_after"] == 0
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is ReformerLSHConfig
    assert loaded.to_diff_dict() == config.to_diff_dict()


def test_loading_with_overrides_derives_again_what_they_leave_open(tmp_path: Path) -> None:
    ReformerLSHConfig(num_buckets=32).save_pretrained(tmp_path)
    loaded = ReformerLSHConfig.from_pretrained(tmp_path, is_decoder=False, attn_layers=["lsh"])
    assert (loaded.lsh_num_chunks_after, loaded.num_hidden_layers, loaded.num_buckets) == (1, 1, 32)
    with pytest.raises(ValueError, match="num_buckets must be even, got 63"):
        ReformerLSHConfig.from_pretrained(tmp_path, num_buckets=63)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"num_buckets": 63}, "num_buckets must be even, got 63; use 62 or 64"),
        ({"num_buckets": [8, 3]}, "every factor of num_buckets must be even, got 3; use 2 or 4"),
        ({"num_buckets": 1}, "num_buckets must be at least 2, got 1; use 2"),
        ({"num_buckets": []}, "at least one factor"),
        ({"num_buckets": [2**16, 2**16]}, "num_buckets must be at most 2147483647 in all, got 4294967296"),
        ({"hidden_size": 250}, "hidden_size must be divisible by num_attention_heads .*, got 250 and 4; use .*248"),
        ({"attn_layers": ["local", "linear"]}, "only 'lsh' and 'local', got 'linear'"),
        ({"attn_layers": []}, "at least one layer"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be the length of attn_layers, 6, got 2"),
        ({"hidden_size": 0}, "hidden_size must be from 1 to"),
        ({"num_hashes": -1}, "num_hashes must be from 1 to"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings must be from 1 to"),
        ({"vocab_size": 10**9, "hidden_size": 10**6}, "at most 1,000,000,000,000 parameters, got about"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob must be at least 0 and below 1, got 1.0"),
        ({"hidden_dropout_prob": -0.1}, "hidden_dropout_prob must be at least 0"),
        ({"hidden_act": "gleu"}, "hidden_act must be an activation that transformers knows, got 'gleu'"),
        ({"lsh_candidates": "bucket "}, r"lsh_candidates must be one of \('bucket', 'chunk'\), got 'bucket '"),
        ({"stream_merge": "sum"}, "stream_merge must be one of"),
        ({"hash_seed": -1}, "hash_seed must be from 0"),
        ({"layer_norm_eps": 0}, "layer_norm_eps must be positive"),
        ({"lsh_num_chunks_after": 1}, "lsh_num_chunks_after must be 0 when is_decoder=True, got 1"),
        ({"local_num_chunks_before": 0}, "local_num_chunks_before must be at least 1"),
        ({"tie_word_embeddings": True, "stream_merge": "concat"}, "tie_word_embeddings needs stream_merge='mean'"),
        ({"axial_pos_shape": [8, 8]}, "axial_pos_shape must cover max_position_embeddings, 4096, got"),
        ({"axial_pos_shape": [64, 64], "axial_pos_embds_dim": [64, 64]}, "must sum to hidden_size, 256"),
        ({"axial_pos_shape": [64, 64], "axial_pos_embds_dim": [256]}, "equally many"),
        ({"position_embedding_type": "rotary", "attention_head_size": 7}, "must be even for rotary"),
    ],
)
def test_impossible_configs_are_refused_in_plain_words(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReformerLSHConfig(**bad)


@pytest.mark.parametrize(("field", "value"), [("hidden_size", "256"), ("hidden_size", 2.5), ("num_buckets", "64")])
def test_wrong_types_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises((StrictDataclassError, ValueError), match=field):
        ReformerLSHConfig(**{field: value})


@pytest.mark.parametrize(
    "field", ["hidden_dropout_prob", "lsh_attention_probs_dropout_prob", "local_attention_probs_dropout_prob"]
)
def test_whole_numbers_are_fine_where_fractions_are(field: str) -> None:
    assert getattr(ReformerLSHConfig(**{field: 0}), field) == 0
    assert ReformerLSHConfig(rope_theta=10000, axial_norm_std=1).rope_theta == 10000


def test_a_config_spoilt_after_construction_cannot_be_saved(tmp_path: Path) -> None:
    config = ReformerLSHConfig()
    config.num_buckets = 63
    with pytest.raises(StrictDataclassError, match="num_buckets must be even"):
        config.save_pretrained(tmp_path)
