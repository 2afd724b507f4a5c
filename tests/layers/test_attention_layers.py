"""Attention layers are projections around one operator; their maps come from the dense twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_longmem.layers.feed_forward import FeedForward
from hf_longmem.layers.local_attention import LocalAttention
from hf_longmem.layers.lsh_attention import LSHAttention
from hf_longmem.layers.positions import rotary_angles
from hf_longmem.ops.lsh import hash_vectors, naive, seeded_rotations


def lsh_layer(**overrides: Any) -> LSHAttention:
    torch.manual_seed(0)
    options = {"layer_idx": 3, "num_hashes": 2, "num_buckets": 4, "chunk_length": 8, "hash_seed": 5}
    return LSHAttention(24, 3, 8, **(options | overrides)).double()


def local_layer(**overrides: Any) -> LocalAttention:
    torch.manual_seed(0)
    return LocalAttention(24, 3, 8, **({"chunk_length": 8} | overrides)).double()


@pytest.mark.parametrize("build", [lsh_layer, local_layer])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 7, 40])
def test_fast_output_equals_that_of_the_returned_map(build: Any, rotary: bool, causal: bool, length: int) -> None:
    layer = build(causal=causal, chunks_after=0 if causal else 1).eval()
    x = torch.randn(2, length, 24, dtype=torch.float64)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, length // 2 + 1 :] = False
    angles = rotary_angles(torch.arange(length)[None], 8, 10000.0) if rotary else None
    fast, nothing = layer(x, mask, angles)
    dense, weights = layer(x, mask, angles, output_attentions=True)
    assert nothing is None
    torch.testing.assert_close(fast[mask], dense[mask], atol=1e-10, rtol=1e-10)
    assert weights.shape == (2, 3, length, length)
    sums = weights.sum(-1).transpose(1, 2)[mask]
    torch.testing.assert_close(sums, torch.ones_like(sums))


def test_lsh_layer_is_its_projections_around_the_twin() -> None:
    layer = lsh_layer().eval()
    x = torch.randn(2, 30, 24, dtype=torch.float64)
    qk, v = (proj(x).view(2, 30, 3, 8).transpose(1, 2) for proj in (layer.qk_proj, layer.v_proj))
    buckets = hash_vectors(qk, seeded_rotations(5, 3, 3, 8, 2, 4, dtype=torch.float64), 4)
    out = naive.lsh_attention(qk, v, buckets, chunk_length=8)
    torch.testing.assert_close(layer(x)[0], layer.o_proj(out.transpose(1, 2).reshape(2, 30, 24)))


def test_rounds_and_seed_can_be_chosen_per_call() -> None:
    layer = lsh_layer(num_buckets=[4, 2]).eval()
    x = torch.randn(1, 60, 24, dtype=torch.float64)
    default = layer(x)[0]
    assert torch.equal(default, layer(x, num_hashes=2, hash_seed=5)[0])
    assert not torch.equal(default, layer(x, num_hashes=4)[0])
    assert not torch.equal(default, layer(x, hash_seed=6)[0])


def test_training_draws_from_the_default_generator_unless_seeded() -> None:
    layer = lsh_layer().train()
    x = torch.randn(1, 60, 24, dtype=torch.float64)
    torch.manual_seed(1)
    first = layer(x)[0]
    second = layer(x)[0]
    torch.manual_seed(1)
    assert torch.equal(first, layer(x)[0])
    assert not torch.equal(first, second)
    assert torch.equal(layer(x, hash_seed=5)[0], layer.eval()(x)[0])


@pytest.mark.parametrize("output_attentions", [False, True])
def test_a_token_that_sees_only_itself_keeps_its_value_whatever_the_dropout(output_attentions: bool) -> None:
    layer = LSHAttention(4, 1, 4, layer_idx=0, num_hashes=1, num_buckets=2, chunk_length=4, dropout=0.9).train()
    x = torch.randn(64, 1, 4)
    out, _ = layer(x, output_attentions=output_attentions)
    torch.testing.assert_close(out, layer.o_proj(layer.v_proj(x)))


def test_layers_of_one_seed_hash_differently() -> None:
    first, second = lsh_layer(layer_idx=0).eval(), lsh_layer(layer_idx=1).eval()
    x = torch.randn(1, 60, 24, dtype=torch.float64)
    assert not torch.equal(first(x)[0], second(x)[0])


@pytest.mark.parametrize("chunk_size", [0, 1, 4, 100])
def test_feed_forward_in_chunks_equals_the_whole(chunk_size: int) -> None:
    layer = FeedForward(6, 10, activation=nn.GELU(), chunk_size=chunk_size).double()
    x = torch.randn(2, 13, 6, dtype=torch.float64, requires_grad=True)
    expected = layer.down_proj(nn.functional.gelu(layer.up_proj(x)))
    torch.testing.assert_close(layer(x), expected)
    grads = [torch.autograd.grad(out.square().sum(), (x, *layer.parameters())) for out in (layer(x), expected)]
    for ours, plain in zip(*grads, strict=True):
        torch.testing.assert_close(ours, plain)


def test_feed_forward_drops_before_the_activation_while_training_only() -> None:
    layer = FeedForward(6, 1000, activation=torch.exp, dropout=0.5)
    nn.init.ones_(layer.up_proj.weight)
    nn.init.ones_(layer.down_proj.weight)
    x = torch.ones(1, 1, 6) * 0.1
    # exp(0) = 1 is what a dropped unit becomes: nothing falls below it.
    assert layer(x).min() > 1000 + layer.down_proj.bias.min()
    assert torch.equal(layer.eval()(x), layer(x))
