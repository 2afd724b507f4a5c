"""The model as transformers' users meet it: inputs, outputs, generation, saving, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_longmem import ReformerLSHForCausalLM, ReformerLSHModel

Make = Callable[..., Any]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_state_dict_names_are_the_published_ones(causal_lm: Make) -> None:
    names = set(causal_lm(attn_layers=("local", "lsh")).state_dict())
    local = {f"model.layers.0.self_attn.{p}_proj.weight" for p in ("q", "k", "v", "o")}
    lsh = {f"model.layers.1.self_attn.{p}_proj.weight" for p in ("qk", "v", "o")}
    shared = {
        f"model.layers.{i}.{module}.{p}"
        for i in (0, 1)
        for module in ("input_layernorm", "post_attention_layernorm", "mlp.up_proj", "mlp.down_proj")
        for p in ("weight", "bias")
    }
    top = {"model.embed_tokens.weight", "model.norm.weight", "model.norm.bias", "lm_head.weight", "lm_head.bias"}
    axial = {"model.position_embeddings.weights.0", "model.position_embeddings.weights.1"}
    assert names == local | lsh | shared | top | axial


@pytest.mark.parametrize("merge", ["mean", "concat"])
def test_the_model_is_the_papers_equations_around_its_layers(causal_lm: Make, tokens: Make, merge: str) -> None:
    model = causal_lm(stream_merge=merge)
    ids = tokens(2, 40)
    inner = model.model
    x1 = x2 = inner.embed_tokens(ids) + inner.position_embeddings(torch.arange(40)[None])
    for layer in inner.layers:
        x1 = x1 + layer.self_attn(layer.input_layernorm(x2))[0]
        x2 = x2 + layer.mlp(layer.post_attention_layernorm(x1))
    merged = (x1 + x2) / 2 if merge == "mean" else torch.cat((x1, x2), dim=-1)
    outputs = inner(ids, output_hidden_states=True)
    close(outputs.last_hidden_state, inner.norm(merged))
    close(model(ids).logits, model.lm_head(inner.norm(merged)))


@pytest.mark.parametrize(
    "kind",
    [
        {"axial_pos_shape": [1024], "axial_pos_embds_dim": [32]},
        {"axial_pos_shape": [4, 16, 16], "axial_pos_embds_dim": [8, 8, 16]},
        {"position_embedding_type": "rotary", "lsh_candidates": "chunk"},
        {"position_embedding_type": "learned", "tie_word_embeddings": True},
        {"stream_merge": "concat", "local_candidates": "chunk", "round_merge": "sum", "attention_head_size": 12},
    ],
)
def test_saving_and_loading_changes_no_bit(causal_lm: Make, tokens: Make, tmp_path: Path, kind: dict[str, Any]) -> None:
    model = causal_lm(**kind)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is ReformerLSHForCausalLM
    assert loaded.config.to_diff_dict() == model.config.to_diff_dict() | {"dtype": "float32"}
    ids = tokens(2, 65)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    tied = kind.get("tie_word_embeddings", False)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied


def test_a_model_built_on_the_meta_device_has_nothing_but_parameters_to_load(tiny: Make) -> None:
    with torch.device("meta"):
        model = ReformerLSHForCausalLM(tiny())
    assert list(model.buffers()) == []


def test_weights_are_initialised_as_configured(causal_lm: Make) -> None:
    model = causal_lm(initializer_range=0.5, axial_norm_std=3.0, hidden_size=64, vocab_size=300)
    assert model.lm_head.weight.std().item() == pytest.approx(0.5, rel=0.05)
    assert model.lm_head.bias.abs().max() == 0
    assert model.model.position_embeddings.weights[1].std().item() == pytest.approx(3.0, rel=0.1)
    assert torch.equal(model.model.norm.weight, torch.ones(64))


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"position_embedding_type": "learned"},
        {"position_embedding_type": "rotary"},
        {"position_embedding_type": "rotary", "attn_layers": ("local", "local")},
    ],
)
def test_position_ids_are_honoured_in_training_and_evaluation(causal_lm: Make, tokens: Make, kind: dict) -> None:
    model = causal_lm(hidden_dropout_prob=0, local_attention_probs_dropout_prob=0, initializer_range=0.3, **kind)
    ids = tokens(2, 20)
    default = torch.arange(20)[None]
    for mode in (model.train(), model.eval()):
        plain, same, shifted, stretched = (
            mode.model(ids, hash_seed=0, position_ids=position_ids).last_hidden_state
            for position_ids in (None, default.expand(2, -1), default + 500, default * 3)
        )
        assert torch.equal(plain, same)
        assert not torch.allclose(plain, stretched, atol=1e-3)
        # Rotary attention sees distances only; hashing sees where a vector points.
        assert torch.allclose(plain, shifted, atol=1e-4) == (kind.get("attn_layers") == ("local", "local"))


def test_embeddings_can_be_given_instead_of_ids(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm()
    ids = tokens(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :10] = 0
    embeds = model.get_input_embeddings()(ids)
    by_id, by_embedding = model(ids, attention_mask=mask), model(inputs_embeds=embeds, attention_mask=mask)
    assert torch.equal(by_id.logits, by_embedding.logits)


def test_only_the_logits_asked_for_are_computed(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm()
    ids = tokens(2, 30)
    whole = model(ids).logits
    close(model(ids, logits_to_keep=3).logits, whole[:, -3:])
    close(model(ids, logits_to_keep=torch.tensor([0, 7])).logits, whole[:, [0, 7]])


def test_hidden_states_and_attentions_come_in_the_callers_order(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm()
    ids, width = tokens(1, 40), 55
    slots = torch.randperm(width, generator=torch.Generator().manual_seed(0))[:40].sort().values
    padded = torch.zeros(1, width, dtype=torch.long)
    padded[:, slots] = ids
    mask = torch.zeros_like(padded)
    mask[:, slots] = 1
    ask = {"output_hidden_states": True, "output_attentions": True}
    alone, outputs = model.model(ids, **ask), model.model(padded, attention_mask=mask, **ask)
    assert len(outputs.hidden_states) == 4
    assert len(outputs.attentions) == 3
    assert outputs.hidden_states[-1] is outputs.last_hidden_state
    close(alone.last_hidden_state, model.model(ids).last_hidden_state)
    for ours, expected in zip(outputs.hidden_states, alone.hidden_states, strict=True):
        close(ours[:, slots], expected)
    for ours, expected in zip(outputs.attentions, alone.attentions, strict=True):
        assert ours.shape == (1, 2, width, width)
        close(ours[:, :, slots][..., slots], expected)
        close(ours[:, :, slots].sum(-1), torch.ones(1, 2, 40))
        assert ours[:, :, slots][..., mask[0] == 0].abs().max() == 0


def test_outputs_can_be_asked_for_in_the_config_and_as_a_tuple(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm()
    ids = tokens(1, 20)
    model.config.output_attentions = True
    assert len(model(ids).attentions) == 3
    model.config.output_attentions = False
    logits, hidden_states = model(ids, return_dict=False, output_hidden_states=True)
    assert torch.equal(logits, model(ids).logits)
    assert len(hidden_states) == 4


def test_gradients_reach_hidden_states_and_attentions(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm().train()
    outputs = model.model(tokens(1, 20), output_hidden_states=True, output_attentions=True)
    watched = (*outputs.hidden_states, *outputs.attentions)
    for tensor in watched:
        tensor.retain_grad()
    outputs.last_hidden_state.square().sum().backward()
    assert all(tensor.grad is not None for tensor in watched)


def test_evaluation_mode_has_a_backward_too(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm()
    ids = tokens(1, 20)
    (gradient,) = torch.autograd.grad(model(ids, labels=ids).loss, model.model.layers[1].self_attn.qk_proj.weight)
    assert gradient.abs().max() > 0


def test_every_parameter_gets_a_gradient_also_when_embeddings_are_frozen(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm().train()
    ids = tokens(2, 40)
    model(ids, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert all(gradient.abs().max() > 0 for gradient in expected.values())
    frozen = causal_lm(hidden_dropout_prob=0, local_attention_probs_dropout_prob=0)
    thawed = copy.deepcopy(frozen)
    for parameter in (*frozen.model.embed_tokens.parameters(), *frozen.model.position_embeddings.parameters()):
        parameter.requires_grad_(False)
    for each in (frozen, thawed):
        each.train()(ids, labels=ids, hash_seed=0).loss.backward()
    for (name, parameter), other in zip(frozen.named_parameters(), thawed.parameters(), strict=True):
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            close(parameter.grad, other.grad)


def test_greedy_generation_is_the_argmax_of_full_forwards(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm()
    model.generation_config.eos_token_id = None
    ids = tokens(2, 15)
    generated = model.generate(ids, max_new_tokens=12, do_sample=False)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embeds, max_new_tokens=12, do_sample=False), generated[:, 15:])
    expected = ids
    for _ in range(12):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, expected)


def test_left_padded_rows_generate_what_they_do_alone(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm()
    model.generation_config.eos_token_id = None
    ids = tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :8] = 0
    padded = ids.masked_fill(mask == 0, 0)
    together = model.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False)
    alone = model.generate(ids[:1, 8:], max_new_tokens=8, do_sample=False)
    assert torch.equal(together[0, 20:], alone[0, 12:])


def test_sampling_follows_the_seed_and_beams_score_at_least_as_well_as_greedy(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm(initializer_range=0.3)
    model.generation_config.eos_token_id = None
    ids = tokens(2, 15)
    samples = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        samples.append(model.generate(ids, max_new_tokens=8, do_sample=True, num_return_sequences=2))
    assert samples[0].shape == (4, 23)
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])
    greedy, beams = (model.generate(ids, max_new_tokens=8, do_sample=False, num_beams=n) for n in (1, 4))

    def score(sequence: torch.Tensor) -> torch.Tensor:
        log_probs = model(sequence).logits[:, 14:-1].log_softmax(-1)
        return log_probs.gather(-1, sequence[:, 15:, None]).sum((1, 2))

    assert (score(beams) >= score(greedy) - 1e-4).all()
    assert (score(beams) > score(greedy) + 1e-4).any()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": torch.tensor([[1, 60]])}, "token ids must lie in 0 .. 59, got 60; use the model's tokenizer"),
        ({"input_ids": torch.tensor([[1, -1]])}, "token ids must lie in 0 .. 59, got -1"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, "from 1 to 1024 tokens .*, got 0"),
        ({"input_ids": torch.zeros(1, 1025, dtype=torch.long)}, "from 1 to 1024 tokens .*, got 1025; cut it"),
        ({"input_ids": torch.tensor([[1]]), "position_ids": torch.tensor([[1024]])}, "position_ids must lie in 0"),
        ({"input_ids": torch.tensor([[1]]), "num_hashes": 0}, "num_hashes must be at least 1, got 0"),
        ({"input_ids": torch.tensor([[1]]), "hash_seed": 2**63}, "hash_seed must be from 0 to 2.63 - 1, got 9223"),
        ({"input_ids": torch.tensor([[1]]), "inputs_embeds": torch.zeros(1, 1, 32)}, "exactly one of .*, got both"),
        ({}, "exactly one of input_ids and inputs_embeds must be given, got neither"),
        ({"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.ones(1, 1, 4, 4)}, "two axes"),
        ({"inputs_embeds": torch.zeros(1, 4, 1)}, r"embeddings \[batch, tokens, 32\], got \(1, 4, 1\)"),
        ({"input_ids": torch.ones(4).long()}, r"inputs must be ids \[batch, tokens\] .*, got \(4,\)"),
    ],
)
def test_impossible_inputs_are_refused_in_plain_words(causal_lm: Make, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        causal_lm()(**inputs)


def test_a_bidirectional_config_is_refused_by_the_causal_head(tiny: Make) -> None:
    with pytest.raises(ValueError, match="needs a causal model, is_decoder=True, got False"):
        ReformerLSHForCausalLM(tiny(is_decoder=False))
    assert ReformerLSHModel(tiny(is_decoder=False)) is not None


def test_an_empty_batch_gives_an_empty_result(causal_lm: Make) -> None:
    model = causal_lm()
    ids = torch.zeros(0, 20, dtype=torch.long)
    assert model(ids).logits.shape == (0, 20, 60)
    outputs = model.train()(ids, labels=ids)
    outputs.loss.backward()
    assert outputs.loss == 0
