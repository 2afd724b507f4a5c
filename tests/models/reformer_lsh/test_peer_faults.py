"""Faults that people reported of other Reformers, each shown right here; ``tests/README.md`` has the table of all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, EncoderDecoderModel

from hf_longmem import ReformerLSHForCausalLM, ReformerLSHForMaskedLM, ReformerLSHForSequenceClassification

Make = Callable[..., Any]
NO_DROPOUT = {"hidden_dropout_prob": 0, "local_attention_probs_dropout_prob": 0}


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def gradients_of(model: nn.Module, **inputs: Any) -> list[Tensor]:
    model.zero_grad()
    model(**inputs).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("length", [1, 64, 100, 128])
def test_training_takes_any_length_and_has_the_logits_of_evaluation(causal_lm: Make, tokens: Make, length: int) -> None:
    model = causal_lm(axial_pos_shape=[8, 16], max_position_embeddings=128, **NO_DROPOUT)
    ids = tokens(2, length)
    evaluated = model(ids).logits
    close(model.train()(ids, hash_seed=model.config.hash_seed).logits, evaluated)


def test_the_limit_of_an_axial_model_is_its_grid(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm(axial_pos_shape=[8, 16], max_position_embeddings=64)
    assert model(tokens(1, 128)).logits.shape == (1, 128, 60)
    with pytest.raises(ValueError, match="from 1 to 128 tokens"):
        model(tokens(1, 129))


def test_the_training_loss_is_that_of_padding_by_hand(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm(**NO_DROPOUT).double().train()
    ids = tokens(2, 100)
    padded, mask = nn.functional.pad(ids, (0, 12)), nn.functional.pad(torch.ones_like(ids), (0, 12))
    plain = gradients_of(model, input_ids=ids, labels=ids, hash_seed=1)
    labels = padded.masked_fill(mask == 0, -100)
    by_hand = gradients_of(model, input_ids=padded, attention_mask=mask, labels=labels, hash_seed=1)
    for ours, expected in zip(plain, by_hand, strict=True):
        close(ours, expected, 1e-9)


def test_a_data_parallel_replica_has_exact_gradients(causal_lm: Make, tokens: Make) -> None:
    # A replica's parameters are plain attributes, results of a broadcast, and no longer in parameters().
    model = causal_lm(**NO_DROPOUT).double().train()
    ids = tokens(2, 50)
    expected = gradients_of(model, input_ids=ids, labels=ids, hash_seed=1)
    replica = replicate(model)
    assert not list(replica.parameters())
    model.zero_grad()
    replica(input_ids=ids, labels=ids, hash_seed=1).loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        close(parameter.grad, gradient, 1e-9)


def replicate(model: nn.Module) -> nn.Module:
    """What ``nn.DataParallel`` does on several devices, on one CPU."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, copy in copies.items():
        for name, child in module._modules.items():
            copy._modules[name] = copies[child] if child is not None else None
        for name, parameter in module._parameters.items():
            copy._parameters[name] = None
            if parameter is not None:
                del copy._parameters[name]
                setattr(copy, name, parameter.clone())
    return copies[model]


@torch.no_grad()
def test_what_is_far_away_is_known_through_the_lsh_layers_alone(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm(attn_layers=("local", "lsh"), num_hashes=8, num_buckets=2, initializer_range=0.3)
    ids = tokens(1, 200)
    changed = ids.clone()
    changed[:, :40] = (changed[:, :40] + 7) % 58 + 2

    def far_influence() -> Tensor:
        return (model(ids, use_cache=False).logits - model(changed, use_cache=False).logits)[:, 100:].abs().max()

    assert far_influence() > 1e-3
    model.model.layers[1].self_attn.o_proj.weight.zero_()
    assert far_influence() == 0


def test_as_a_decoder_of_an_encoder_it_is_refused_in_plain_words(tiny: Make) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    encoder = BertModel(BertConfig(vocab_size=60, **sizes))
    with pytest.raises(ValueError, match="decoder is not prepared for the encoder hidden states"):
        EncoderDecoderModel(encoder=encoder, decoder=ReformerLSHForCausalLM(tiny()))


class Allocations:
    """Bytes that torch's allocator handed out here: those not taken back at the end, and the peak."""

    def __enter__(self) -> Allocations:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)
        events = [event for event in self._profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        self.kept = self.peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            self.kept += event.nbytes()
            self.peak = max(self.peak, self.kept)


def test_long_inputs_never_have_all_logits_at_once(causal_lm: Make, tokens: Make) -> None:
    length, vocabulary = 1000, 10_000
    model = causal_lm(vocab_size=vocabulary, chunk_size_lm_head=50)
    ids = tokens(1, length)
    with Allocations() as training:
        model.train()(ids, labels=ids).loss.backward()
    model.eval()
    with Allocations() as last, torch.no_grad():
        model(ids, logits_to_keep=1)
    with Allocations() as everything, torch.no_grad():
        model(ids)
    logits = length * vocabulary * 4
    assert training.peak < logits / 2
    assert last.peak < logits / 2
    assert everything.peak > logits


def test_embeddings_that_need_no_gradient_leave_those_of_the_parameters_exact(causal_lm: Make, tokens: Make) -> None:
    gradients = []
    for reversible in (True, False):
        model = causal_lm(reversible=reversible, hidden_dropout_prob=0.2).double().train()
        ids = tokens(2, 50)
        embeds = model.get_input_embeddings()(ids).detach()
        model.model.embed_tokens.requires_grad_(False)
        model.model.position_embeddings.requires_grad_(False)
        torch.manual_seed(0)
        model(inputs_embeds=embeds, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for ours, plain in zip(*gradients, strict=True):
        close(ours, plain, 1e-9)


def test_two_forwards_before_one_backward_give_the_sum_of_both_gradients(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm(**NO_DROPOUT).double().train()
    first, second = tokens(2, 50), tokens(3, 70, seed=9)
    apart = [gradients_of(model, input_ids=ids, labels=ids, hash_seed=seed) for ids, seed in ((first, 1), (second, 2))]
    model.zero_grad()
    losses = model(first, labels=first, hash_seed=1).loss, model(second, labels=second, hash_seed=2).loss
    sum(losses).backward()
    for parameter, one, other in zip(model.parameters(), *apart, strict=True):
        close(parameter.grad, one + other, 1e-9)


@torch.no_grad()
def test_a_masked_first_token_has_no_effect(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm()
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    other = ids.clone()
    other[:, 0] = (ids[:, 0] + 5) % 58 + 2
    logits = model(ids, attention_mask=mask).logits
    assert torch.equal(logits[:, 1:], model(other, attention_mask=mask).logits[:, 1:])
    close(logits[:, 1:], model(ids[:, 1:]).logits)


def test_other_hash_rounds_than_configured_train_with_exact_gradients(causal_lm: Make, tokens: Make) -> None:
    ids = tokens(2, 100)
    gradients = []
    for reversible, configured in ((True, 2), (False, 2), (True, 5)):
        model = causal_lm(reversible=reversible, num_hashes=configured, **NO_DROPOUT).double().train()
        gradients.append(gradients_of(model, input_ids=ids, labels=ids, num_hashes=5, hash_seed=0))
    for ours, plain, as_configured in zip(*gradients, strict=True):
        close(ours, plain, 1e-9)
        close(ours, as_configured, 1e-9)


@torch.no_grad()
def test_positions_may_be_given_at_any_length_with_ids_or_embeddings(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm()
    for length in (15, 16, 17, 100):
        ids = tokens(2, length)
        plain = model(ids).logits
        positions = torch.arange(length).expand(2, -1)
        assert torch.equal(model(ids, position_ids=positions).logits, plain)
        embeds = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embeds, position_ids=positions).logits, plain)


@pytest.mark.parametrize("prompt", [1, 15, 17])
def test_generation_needs_no_number_of_buckets_and_no_multiple_of_any_chunk(
    causal_lm: Make, tokens: Make, prompt: int
) -> None:
    model = causal_lm(num_buckets=None, chunk_size_feed_forward=16, chunk_size_lm_head=7)
    model.generation_config.eos_token_id = None
    ids = tokens(2, prompt)
    runs = [model.generate(ids, max_new_tokens=20, do_sample=False, use_cache=cached) for cached in (True, False)]
    assert runs[0].shape == (2, prompt + 20)
    assert torch.equal(*runs)
    model.train()(ids, labels=ids).loss.backward()


@torch.no_grad()
def test_a_cache_counts_its_tokens_and_takes_the_whole_mask(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm()
    ids = tokens(2, 41)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    outputs = model(ids[:, :25], attention_mask=mask[:, :25], use_cache=True)
    assert outputs.cache.get_seq_length() == 25
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    for start in range(25, 41, 4):
        step = slice(start, start + 4)
        outputs = model(ids[:, step], attention_mask=mask[:, : start + 4], cache=outputs.cache)
        assert outputs.cache.get_seq_length() == start + 4
        close(outputs.logits, whole[:, step])


def test_a_stack_parameter_has_a_gradient_of_its_own_in_evaluation_mode(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm(**NO_DROPOUT).double()
    ids = tokens(2, 40)
    weight = model.model.layers[1].mlp.up_proj.weight
    (alone,) = torch.autograd.grad(model(ids, labels=ids).loss, weight)
    expected = gradients_of(model.train(), input_ids=ids, labels=ids, hash_seed=model.config.hash_seed)
    index = next(i for i, parameter in enumerate(model.parameters()) if parameter is weight)
    close(alone, expected[index], 1e-9)


def test_training_keeps_no_cache_and_activations_that_do_not_grow_with_depth(causal_lm: Make, tokens: Make) -> None:
    ids = tokens(2, 200)
    stream = 2 * 200 * 32 * 4

    def kept(depth: int, reversible: bool) -> int:
        layers = ("local", "lsh") * (depth // 2)
        model = causal_lm(attn_layers=layers, use_cache=True, reversible=reversible, **NO_DROPOUT).train()
        with Allocations() as forward:
            outputs = model(ids, labels=ids, use_cache=True, hash_seed=0)
        assert outputs.cache is None
        return forward.kept

    assert kept(8, True) - kept(2, True) < stream / 4
    assert kept(8, False) - kept(2, False) > 6 * stream


@torch.no_grad()
def test_in_a_bidirectional_model_the_end_does_not_wrap_round_to_the_beginning(tiny: Make, tokens: Make) -> None:
    torch.manual_seed(0)
    model = ReformerLSHForMaskedLM(tiny(is_decoder=False, attn_layers=["local"] * 2)).eval()
    rules = {"local_candidates": "chunk", "stream_merge": "concat"}
    chunked = ReformerLSHForMaskedLM(tiny(is_decoder=False, attn_layers=["local"] * 2, **rules)).eval()
    ids = tokens(1, 96)
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 5) % 58 + 2
    for each in (model, chunked):
        before, after = each(ids).logits, each(changed).logits
        # Two layers, each with one chunk of 16 ahead.
        assert torch.equal(before[:, :48], after[:, :48])
        assert not torch.equal(before[:, -1], after[:, -1])


def test_the_classifier_trains_at_any_length_with_padding_to_the_longest(tiny: Make, tokens: Make) -> None:
    torch.manual_seed(0)
    model = ReformerLSHForSequenceClassification(tiny(is_decoder=False)).train()
    ids = tokens(3, 45)
    mask = (torch.arange(45) < torch.tensor([[45], [30], [1]])).long()
    loss = model(ids, attention_mask=mask, labels=torch.tensor([0, 1, 1])).loss
    loss.backward()
    assert math.isfinite(loss.item())
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
