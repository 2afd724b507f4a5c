"""The authors' Transformer-XL with long-term memory, composed of our layers, against the numbers of their code.

Theirs writes a segment two segments late, normalises after each branch, and shares the queries of both attentions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_longmem.layers.continuous_attention import ContinuousAttention
from hf_longmem.layers.feed_forward import FeedForward
from hf_longmem.layers.short_term_attention import ShortTermAttention
from hf_longmem.ops.continuous import GaussianBasis, MemoryState, RegressionSpec

WIDTH, HEADS, HEAD_DIM, LENGTH = 12, 2, 6, 8
SPEC = RegressionSpec(GaussianBasis(16, (0.05, 0.1)), LENGTH, 8, 1.0, placement="right_edge", padding=True)
# Their inverse is taken in float32, whose relative error is its condition number times 2^-24, 2.1e-5 here.
TOLERANCE = 2e-5
Golden = dict[str, Tensor]


@pytest.fixture(scope="module")
def golden() -> Golden:
    path = Path(__file__).parents[1] / "golden" / "e2e_sorting.npz"
    with np.load(path, allow_pickle=False) as arrays:
        tensors = {key: torch.from_numpy(np.array(arrays[key])) for key in arrays.files}
    return {key: value.double() if value.is_floating_point() else value for key, value in tensors.items()}


class Layer(nn.Module):
    """One of their layers; what it has read of a document is given to it and given back."""

    def __init__(self, weights: Callable[[str], Tensor], shared: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.attention = ShortTermAttention(WIDTH, HEADS, HEAD_DIM, positions="relative")
        options = {"spec": SPEC, "decay": 0.75, "variance_floor": 1e-6, "gate": True}
        self.memory = ContinuousAttention(WIDTH, HEADS, HEAD_DIM, **options)
        self.mlp = FeedForward(WIDTH, 16, activation=torch.relu)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        query, key, value = weights("dec_attn.qkv_net.weight").chunk(3)
        long_term = "dec_attn.long_term_attention"
        density_heads = torch.cat([weights(f"{long_term}.mu.weight"), weights(f"{long_term}.sigma.weight")])
        for parameter, numbers in (
            (self.attention.q_proj.weight, query),
            (self.attention.k_proj.weight, key),
            (self.attention.v_proj.weight, value),
            (self.attention.o_proj.weight, weights("dec_attn.o_net.weight")),
            (self.attention.r_proj.weight, weights("dec_attn.r_net.weight")),
            (self.attention.content_bias, shared("r_w_bias")),
            (self.attention.position_bias, shared("r_r_bias")),
            (self.memory.q_proj.weight, query),
            (self.memory.k_proj.weight, weights(f"{long_term}.proj_key.weight")),
            (self.memory.v_proj.weight, weights(f"{long_term}.proj_value.weight")),
            (self.memory.o_proj.weight, weights(f"{long_term}.attn_out.weight")),
            (self.memory.density_heads, density_heads),
            (self.memory.gate.weight, weights(f"{long_term}.mask_net.weight")),
            (self.memory.gate.bias, weights(f"{long_term}.mask_net.bias")),
            (self.mlp.up_proj.weight, weights("pos_ff.CoreNet.0.weight")),
            (self.mlp.up_proj.bias, weights("pos_ff.CoreNet.0.bias")),
            (self.mlp.down_proj.weight, weights("pos_ff.CoreNet.3.weight")),
            (self.mlp.down_proj.bias, weights("pos_ff.CoreNet.3.bias")),
            (self.attention_norm.weight, weights("dec_attn.layer_norm.weight")),
            (self.attention_norm.bias, weights("dec_attn.layer_norm.bias")),
            (self.mlp_norm.weight, weights("pos_ff.layer_norm.weight")),
            (self.mlp_norm.bias, weights("pos_ff.layer_norm.bias")),
        ):
            parameter.data = numbers.clone()

    def forward(self, x: Tensor, past: list[Tensor], memory: MemoryState) -> tuple[Tensor, MemoryState, Tensor | None]:
        window = torch.cat([*past[-1:], x], dim=1)
        places = torch.arange(LENGTH)[None] + window.shape[1] - LENGTH
        mask = torch.arange(window.shape[1]) <= places[..., None]
        attended = self.attention(x, *self.attention.keys_values(window), places, 0, mask)
        divergence = None
        if len(past) > 1:
            memory = self.memory.write(memory, past[-2])
            recalled, memory, divergence = self.memory(x, self.memory.project(memory), memory)
            attended = attended + recalled
        x = self.attention_norm(x + attended)
        return self.mlp_norm(x + self.mlp(x)), memory, divergence


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


@torch.no_grad()
def test_five_segments_give_the_authors_outputs_memories_and_regulariser(golden: Golden) -> None:
    layers = [
        Layer(lambda name, i=i: golden[f"w__layers.{i}.{name}"], lambda name: golden[f"w__{name}"]) for i in range(2)
    ]
    past: list[list[Tensor]] = [[], []]
    memories = [layer.memory.empty(2, torch.device("cpu"), torch.float64) for layer in layers]
    for number, ids in enumerate(golden["ids"].split(LENGTH, dim=1)):
        x = golden["w__word_emb.emb_layers.0.weight"][ids] * WIDTH**0.5
        divergences = []
        for index, layer in enumerate(layers):
            inputs = x
            x, memories[index], divergence = layer(x, past[index], memories[index])
            past[index].append(inputs)
            divergences.append(divergence)
            if number > 1:
                close(memories[index].coefficients_BNE, golden[f"B_seg{number}_layer{index}"])
        if number == 4:
            x = x @ golden["w__proj_output.weight"].T
        close(x.transpose(0, 1), golden[f"hidden_or_logits_{number}"])
        if number > 1:
            close(sum(divergences).sum() * HEADS, golden[f"kl_{number}"].sum())
