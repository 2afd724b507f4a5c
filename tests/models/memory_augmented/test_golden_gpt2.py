"""The authors' GPT-2 with long-term memory, as a memory around transformers' own, against the numbers of their code.

Their code asks the memory with the queries of GPT-2's attention, writes raw layer inputs, regularises the means as well
(a condition turned round), forgets after a number of tokens, and samples sticky memories at left bin edges.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_longmem import LongTermMemoryConfig, MemoryAugmentedForCausalLM, add_long_term_memory
from hf_longmem.layers.continuous_attention import ContinuousAttention, MemoryProjection
from hf_longmem.models.memory_augmented.state import MemoryAugmentedState
from hf_longmem.ops.continuous import (
    GaussianBasis,
    MemoryState,
    RegressionSpec,
    convolution_gate,
    gaussian_kl,
    read_memory,
    record_attention,
    sticky_positions,
    sticky_samples,
    write_memory,
)

LENGTH, LAYERS, FORGETS_AT = 8, 2, 5
# Their inverse is taken in float32, whose relative error is its condition number times 2^-24, 2.1e-5 here; what
# follows it is in float32 too.
TOLERANCE = 5e-5
Golden = dict[str, Tensor]


def load(kind: str) -> Golden:
    path = Path(__file__).parents[2] / "golden" / f"e2e_gpt2_{kind}.npz"
    with np.load(path, allow_pickle=False) as arrays:
        tensors = {key: torch.from_numpy(np.array(arrays[key])) for key in arrays.files}
    return {key: value.double() if value.is_floating_point() else value for key, value in tensors.items()}


class Queries(nn.Module):
    """Those of GPT-2's own attention: its norm, then the first third of its projection."""

    in_features = 8

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.norm, self.projection = block.ln_1, block.attn.c_attn

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.projection(self.norm(hidden_states)).chunk(3, dim=-1)[0]


class AuthorsMemory(ContinuousAttention):
    """Ours, but for where sticky samples sit and for the regulariser's second term."""

    def write(self, memory: MemoryState, x_BLE: Tensor, write_B: Tensor | None = None) -> MemoryState:
        gated = convolution_gate(x_BLE, self.gate.weight, self.gate.bias)
        samples_BMN = None
        if self.sticky:
            positions_BM = torch.zeros(1, self.spec.num_samples, dtype=torch.float64)
            if memory.segments_B.any():  # a first write draws nothing, a later one twice, of which the first counts
                positions_BM, _ = (
                    sticky_positions(
                        memory.histogram_BK.float(), self.spec.num_samples, draw="multinomial", point="left_edge"
                    )
                    for _ in range(2)
                )
            samples_BMN = sticky_samples(positions_BM.double(), self.spec.basis)
        return write_memory(memory, gated, self._maps(memory), write_B=write_B, samples_BMN=samples_BMN)

    def forward(
        self,
        hidden_states: Tensor,
        projection: MemoryProjection,
        memory: MemoryState,
        query_mask: Tensor | None = None,
    ) -> tuple[Tensor, MemoryState, Tensor]:
        q_BHTD = self._split_heads(self.q_proj(hidden_states))
        keys, values, written_B = projection
        read = read_memory(
            q_BHTD, keys, values, self.spec.basis, variance_floor=self.variance_floor, written_B=written_B
        )
        if self.sticky:
            memory = record_attention(memory, read.mu_BHT, read.variance_BHT)
        divergence_BHT = gaussian_kl(read.variance_BHT, self.prior_std, mu=read.mu_BHT, prior_mu=-1.0)
        out_BTE = self.o_proj(read.context_BHTD.transpose(1, 2).flatten(2))
        return out_BTE, memory, (divergence_BHT * written_B[:, None, None]).mean(dim=1)


def authors_model(golden: Golden, *, sticky: bool = False) -> MemoryAugmentedForCausalLM:
    """Transformers' GPT-2 with the stored weights, and a memory as theirs around it."""
    base = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_embd=8, n_layer=LAYERS, n_head=2, n_positions=16)).double()
    weights = {name.removeprefix("w__"): value for name, value in golden.items() if name.startswith("w__")}
    own = {n: w for n, w in weights.items() if "long_term_attention" not in n and "masked_bias" not in n}
    assert set(own) == set(base.state_dict())
    base.load_state_dict(own)
    sizes = {"segment_length": LENGTH, "num_basis": 16, "basis_widths": (0.05, 0.1), "num_samples": 8}
    model = add_long_term_memory(
        base.eval(), LongTermMemoryConfig(**sizes, memory_decay=0.5, memory_input_norm=False, window_length=0)
    )
    spec = RegressionSpec(GaussianBasis(16, (0.05, 0.1)), LENGTH, 8, 0.5, placement="right_edge", padding=True)
    for index in range(LAYERS):
        memory = AuthorsMemory(8, 2, 4, spec=spec, decay=0.5, gate=True, sticky=sticky).double()
        theirs = f"transformer.h.{index}.attn.long_term_attention."
        heads = torch.cat([weights[f"{theirs}mu.weight"], weights[f"{theirs}sigma.weight"]])
        for parameter, numbers in (
            (memory.k_proj.weight, weights[f"{theirs}proj_key.weight"]),
            (memory.v_proj.weight, weights[f"{theirs}proj_value.weight"]),
            (memory.o_proj.weight, weights[f"{theirs}attn_out.weight"]),
            (memory.density_heads, heads),
            (memory.gate.weight, weights[f"{theirs}mask_net.weight"]),
            (memory.gate.bias, weights[f"{theirs}mask_net.bias"]),
        ):
            parameter.data = numbers.clone()
        memory.q_proj = Queries(base.transformer.h[index])
        model.long_term_memory.layers[str(index)] = memory
    return model.requires_grad_(True)


def forget(state: MemoryAugmentedState) -> MemoryAugmentedState:
    """Empty the memories, as theirs are after so many tokens, and keep the segment that is still to be written."""
    return replace(state, memories=tuple(MemoryState(*map(torch.zeros_like, memory)) for memory in state.memories))


def close(ours: Tensor, theirs: Tensor, factor: float = 1) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= factor * TOLERANCE * theirs.abs().max()


@pytest.mark.parametrize("kind", ["plain", "sticky"])
def test_six_segments_give_the_authors_logits_memories_and_regulariser(kind: str) -> None:
    golden = load(kind)
    model = authors_model(golden, sticky=kind == "sticky")
    state = model.empty_memory(1)
    for number, ids in enumerate(golden["ids"]):
        if number == FORGETS_AT:
            state = forget(state)
        torch.manual_seed(200 + number)
        outputs = model(ids, memory=state)
        state = outputs.memory
        close(outputs.logits, golden["logits"][number])
        loss = nn.functional.cross_entropy(outputs.logits[0, :-1], ids[0, 1:])
        close(loss, golden["loss"][number])
        for index in range(LAYERS):
            close(state.inputs[index], golden["mem"][number, index])
            if number > 0:
                close(state.memories[index].coefficients_BNE, golden["B"][number, index])
        if number > 0:
            close(LAYERS * outputs.memory_loss, golden["kl"][number].mean())


def test_gradients_are_the_authors() -> None:
    golden = load("plain")
    model = authors_model(golden)
    state = model.empty_memory(1)
    for ids in golden["ids"][:3]:
        outputs = model(ids, memory=state)
        state = outputs.memory
    loss = nn.functional.cross_entropy(outputs.logits[0, :-1], ids[0, 1:])
    (loss + 1e-3 * LAYERS * outputs.memory_loss).backward()
    for name, parameter in model.language_model.named_parameters():
        close(parameter.grad, golden[f"g__{name}"], 2)
    for index, memory in model.long_term_memory.layers.items():
        theirs = f"g__transformer.h.{index}.attn.long_term_attention."
        close(memory.k_proj.weight.grad, golden[f"{theirs}proj_key.weight"], 2)
        close(memory.v_proj.weight.grad, golden[f"{theirs}proj_value.weight"], 2)
        close(memory.o_proj.weight.grad, golden[f"{theirs}attn_out.weight"], 2)
        close(memory.density_heads.grad[:1], golden[f"{theirs}mu.weight"], 2)
        close(memory.density_heads.grad[1:], golden[f"{theirs}sigma.weight"], 2)
        close(memory.gate.weight.grad, golden[f"{theirs}mask_net.weight"], 2)
        close(memory.gate.bias.grad, golden[f"{theirs}mask_net.bias"], 2)
        assert golden[f"{theirs}proj_query.weight"].isnan().all()  # theirs never applies it
