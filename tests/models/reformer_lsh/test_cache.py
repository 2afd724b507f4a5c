"""Generating with the cache gives the logits of a full forward, at every step, for every row."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, GPT2Config, set_seed

from hf_longmem import ReformerLSHConfig, ReformerLSHForCausalLM, ReformerLSHModel

SETTINGS = {
    "default": {},
    "rotary": {"position_embedding_type": "rotary"},
    "learned, sum": {"position_embedding_type": "learned", "round_merge": "sum"},
    "local chunks": {"local_candidates": "chunk", "attn_layers": ["local", "lsh", "local"]},
    "two chunks before": {"lsh_num_chunks_before": 2, "local_num_chunks_before": 2},
}


def build(**changes):
    torch.manual_seed(0)
    config = ReformerLSHConfig(
        **{
            "vocab_size": 40,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "attn_layers": ["local", "lsh"],
            "lsh_attn_chunk_length": 8,
            "local_attn_chunk_length": 8,
            "num_buckets": [2, 4],
            "num_hashes": 3,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "eos_token_id": None,
            **changes,
        }
    )
    return ReformerLSHForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return build()


def tokens(batch, length, seed=0):
    return torch.randint(2, 40, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_logits_equal_a_full_forward_at_every_step(name):
    model = build(**SETTINGS[name])
    ids = tokens(2, 70)
    full = model(ids, use_cache=False).logits
    outputs = model(ids[:, :1])
    steps = [outputs.logits]
    for t in range(1, 70):
        outputs = model(ids[:, t : t + 1], cache=outputs.cache)
        steps.append(outputs.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), full, atol=1e-5, rtol=1e-5)
    assert outputs.cache.get_seq_length() == 70


@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("more", [[1, 1, 5], [16, 17], [30, 1]])
@torch.no_grad()
def test_several_new_tokens_at_once(model, prompt, more):
    ids = tokens(2, prompt + sum(more))
    full = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    start, parts = 0, []
    for count in [prompt, *more]:
        parts.append(model(ids[:, start : start + count], cache=cache).logits)
        start += count
    torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=1e-5, rtol=1e-5)


GENERATE = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 0},
    "beam": {"do_sample": False, "num_beams": 3},
    "beam sampling": {"do_sample": True, "num_beams": 2},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "several beams back": {"num_beams": 4, "num_return_sequences": 3},
}


@pytest.mark.parametrize("kind", GENERATE)
@pytest.mark.parametrize("padded", [False, True])
def test_generate_with_and_without_cache(model, kind, padded):
    ids = tokens(2, 20)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :9] = 0
    results = []
    for use_cache in (True, False):
        set_seed(3)
        results.append(
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=25,
                use_cache=use_cache,
                return_dict_in_generate=True,
                output_scores=True,
                **GENERATE[kind],
            )
        )
    with_cache, without = results
    assert torch.equal(with_cache.sequences, without.sequences)
    for a, b in zip(with_cache.scores, without.scores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_left_padded_row_generates_what_it_does_alone(model):
    ids = tokens(3, 30)
    mask = torch.ones_like(ids)
    mask[0, :13], mask[2, :29] = 0, 0
    batched = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    for row, start in ((0, 13), (1, 0), (2, 29)):
        alone = model.generate(ids[row : row + 1, start:], max_new_tokens=20, do_sample=False)
        assert torch.equal(alone[0, 30 - start :], batched[row, 30:])


def test_the_order_of_rows_does_not_matter(model):
    ids = tokens(3, 30)
    order = torch.tensor([2, 0, 1])
    forwards = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(model.generate(ids[order], max_new_tokens=20, do_sample=False), forwards[order])


def test_embedded_prompts(model):
    ids = tokens(2, 20)
    embeds = model.get_input_embeddings()(ids).detach()
    by_embeds = model.generate(inputs_embeds=embeds, max_new_tokens=15, do_sample=False)
    by_ids = model.generate(ids, max_new_tokens=15, do_sample=False)
    assert torch.equal(by_embeds, by_ids[:, 20:])


def test_a_returned_cache_is_continued_over_several_turns(model):
    turns = [tokens(1, 12, seed) for seed in (1, 2, 3)]
    history, cache = torch.empty(1, 0, dtype=torch.long), DynamicCache(config=model.config)
    for turn in turns:
        history = torch.cat([history, turn], dim=1)
        expected = model.generate(history, max_new_tokens=10, do_sample=False, use_cache=False)
        outputs = model.generate(history, cache=cache, max_new_tokens=10, do_sample=False, return_dict_in_generate=True)
        history, cache = outputs.sequences, outputs.cache
        assert torch.equal(history, expected)


@torch.no_grad()
def test_the_older_name_of_the_argument(model):
    ids = tokens(1, 10)
    cache = model(ids[:, :9]).cache
    by_new = model(ids[:, 9:], cache=copy.deepcopy(cache)).logits
    with pytest.warns(FutureWarning, match="past_key_values"):
        by_old = model(ids[:, 9:], past_key_values=cache).logits
    assert torch.equal(by_new, by_old)


@torch.no_grad()
def test_rows_are_selected_repeated_and_reset(model):
    ids = tokens(2, 20)
    step = tokens(2, 1, seed=9)
    cache = model(ids).cache
    repeated = copy.deepcopy(cache)
    repeated.batch_repeat_interleave(2)
    expected = model(step, cache=copy.deepcopy(cache)).logits
    torch.testing.assert_close(
        model(step.repeat_interleave(2, 0), cache=repeated).logits, expected.repeat_interleave(2, 0)
    )
    selected = copy.deepcopy(cache)
    selected.batch_select_indices(torch.tensor([1]))
    torch.testing.assert_close(model(step[1:], cache=selected).logits, expected[1:])
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(model(ids, cache=cache).logits, model(ids, use_cache=False).logits)


def test_the_base_model_returns_a_cache_where_gradients_are_off():
    base = ReformerLSHModel(build().config).eval()
    ids = tokens(1, 10)
    with torch.no_grad():
        assert base(ids).cache.get_seq_length() == 10
        assert base(ids, use_cache=False).cache is None
    assert base(ids).cache is None


def test_evaluation_mode_with_gradients_trains_as_without_a_cache(model):
    ids = tokens(2, 40)
    grads = []
    for use_cache in (None, False, True):
        model.zero_grad()
        outputs = model(ids, labels=ids, use_cache=use_cache)
        outputs.loss.backward()
        grads.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert outputs.cache.get_seq_length() == 40
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(grads[2][name], grad, atol=1e-6, rtol=1e-4)


def test_a_backward_through_a_continued_cache_raises(model):
    ids = tokens(1, 12)
    with torch.no_grad():
        cache = model(ids[:, :10]).cache
    outputs = model(ids[:, 10:], cache=cache)
    with pytest.raises(RuntimeError, match="gradients must not pass through the continuation of a cache"):
        outputs.logits.sum().backward()


@torch.no_grad()
def test_a_chunk_model_keeps_rows_apart_and_equals_a_full_forward_in_its_prompt():
    model = build(lsh_candidates="chunk", round_merge="sum")
    ids = tokens(3, 30)
    torch.testing.assert_close(model(ids).logits, model(ids, use_cache=False).logits)
    batched = model.generate(ids, max_new_tokens=20, do_sample=False)
    for row in range(3):
        alone = model.generate(ids[row : row + 1], max_new_tokens=20, do_sample=False)
        assert torch.equal(alone[0], batched[row])
    assert model(ids, use_cache=True).cache.layers[1].state.ring_BHRX.numel() == 0


@torch.no_grad()
def test_foreign_and_misused_caches_are_refused(model):
    ids = tokens(2, 10)
    gpt2 = GPT2Config(n_layer=2, n_head=2, n_embd=32)
    for cache in (DynamicCache(), DynamicCache(config=gpt2)):
        with pytest.raises(ValueError, match="the cache must be made for this model"):
            model(ids, cache=cache)
    for layers in (["local"], ["lsh", "local"], ["local", "lsh", "lsh"]):
        with pytest.raises(ValueError, match="the cache must have the model's layers"):
            model(ids, cache=DynamicCache(config=build(attn_layers=layers).config))
    with pytest.raises(ValueError, match="the cache must be made for this model, got a tuple"):
        model(ids, cache=((ids, ids),))
    cache = model(ids).cache
    with pytest.raises(ValueError, match="the batch must have the cache's 2 rows, got 1"):
        model(ids[:1, :1], cache=copy.deepcopy(cache))
    with pytest.raises(ValueError, match="num_hashes and hash_seed must stay"):
        model(ids[:, :1], cache=copy.deepcopy(cache), num_hashes=5)
    with pytest.raises(ValueError, match="num_hashes and hash_seed must stay"):
        model(ids[:, :1], cache=copy.deepcopy(cache), hash_seed=7)
    with pytest.raises(ValueError, match="attention maps"):
        model(ids[:, :1], cache=copy.deepcopy(cache), output_attentions=True)
    with pytest.raises(ValueError, match="cannot be shortened"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="position_ids must lie in"):
        model(torch.full((2, 505), 3), cache=cache)


@torch.no_grad()
def test_memory_of_a_cache_is_bounded_by_the_positions(model):
    outputs = model(tokens(1, 300))
    for t in range(20):
        outputs = model(tokens(1, 1, seed=t), cache=outputs.cache)
    local, lsh = (layer.state for layer in outputs.cache.layers)
    assert local.k_BHWD.shape[2] == 8
    assert lsh.ring_BHRX.shape[3] == 8 * 8
    assert lsh.qk_BHPD.shape[2] <= 2 * 320 + 1


@torch.no_grad()
def test_a_cache_is_exact_in_training_mode_too():
    model = build(hidden_dropout_prob=0.0, local_attention_probs_dropout_prob=0.0)
    ids = tokens(2, 40)
    full = model(ids, use_cache=False).logits
    model.train()
    outputs = model(ids[:, :20], use_cache=True)
    parts = [outputs.logits]
    for t in range(20, 40):
        outputs = model(ids[:, t : t + 1], cache=outputs.cache)
        parts.append(outputs.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_padding_takes_no_position_at_the_end_of_the_table():
    model = build(max_position_embeddings=64)
    ids, mask = tokens(2, 66), torch.ones(2, 66)
    mask[0, 60:64], mask[1, 62:] = 0, 0
    cache = model(ids[:, :60]).cache
    logits = model(ids[:, 60:], attention_mask=mask, cache=cache).logits
    for row in range(2):
        alone = model(ids[row : row + 1, mask[row] == 1]).logits[:, 60:]
        torch.testing.assert_close(logits[row, mask[row, 60:] == 1], alone[0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_refused_call_leaves_the_cache_as_it_was(model):
    ids = tokens(1, 12)
    cache = model(ids[:, :6]).cache
    for wrong in ({"num_hashes": 5}, {"hash_seed": 7}, {"output_attentions": True}):
        with pytest.raises(ValueError, match=r"must stay|attention maps"):
            model(ids[:, 6:], cache=cache, **wrong)
    torch.testing.assert_close(model(ids[:, 6:], cache=cache).logits, model(ids).logits[:, 6:], atol=1e-5, rtol=1e-5)


def test_checkpointed_layers_take_no_cache():
    model = build()
    with torch.no_grad():
        cache = model(tokens(1, 10)).cache
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="layers that are checkpointed in training take no cache"):
        model.train()(tokens(1, 2), cache=cache)


def test_a_cache_that_a_failed_call_left_uneven_is_refused(model):
    ids = tokens(1, 12)
    with torch.no_grad():
        cache = model(ids[:, :5], use_cache=True).cache

        def fail(*_):
            raise KeyboardInterrupt

        hook = model.model.layers[1].register_forward_pre_hook(fail)
        try:
            with pytest.raises(KeyboardInterrupt):
                model(ids[:, 5:8], cache=cache)
        finally:
            hook.remove()
        with pytest.raises(ValueError, match=r"read equally many tokens, got \[8, 5\], as a call that failed"):
            model(ids[:, 5:], cache=cache)


@pytest.mark.parametrize("more", [1, 30])
def test_a_cache_made_in_inference_mode_goes_on_outside_it(model, more):
    ids = tokens(2, 20 + more)
    with torch.inference_mode():
        cache = model(ids[:, :20], use_cache=True).cache
    with torch.no_grad():
        exact = model(ids, use_cache=False).logits[:, 20:]
        torch.testing.assert_close(model(ids[:, 20:], cache=cache).logits, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("more", [1, 30])
@pytest.mark.parametrize("first", [False, True])
def test_a_cache_goes_on_under_autocast_and_outside_it(model, more, first):
    ids = tokens(2, 20 + more)
    with torch.no_grad():
        exact = model(ids, use_cache=False).logits[:, 20:]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=first):
            cache = model(ids[:, :20], use_cache=True).cache
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not first):
            found = model(ids[:, 20:], cache=cache).logits
    # Rounded vectors may fall into other buckets.
    assert (found.float() - exact).abs().mean() < 0.1 * exact.abs().mean()


def test_no_cache_is_made_where_attention_maps_are_asked_for(model):
    outputs = model(tokens(1, 9), use_cache=True, output_attentions=True)
    assert outputs.cache is None
    assert len(outputs.attentions) == 2


def test_the_cache_of_an_encoder_and_a_decoder_is_refused(model):
    with pytest.raises(ValueError, match="must be made for this model, got a EncoderDecoderCache"):
        model(tokens(1, 9), cache=EncoderDecoderCache(DynamicCache(), DynamicCache()))
