"""The cache: generation, choosing and moving rows, saving and loading."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import ByT5Tokenizer, DynamicCache, EncoderDecoderCache, pipeline

from hf_longmem import LongTermMemoryConfig, MemoryAugmentedCache, add_long_term_memory, streaming_perplexity

Make = Callable[..., Any]
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {}),
    ("mistral", {"sticky_memories": True, "memory_layers": (1,)}),
]


def logits_of(model: torch.nn.Module, ids: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **kwargs).logits


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


def read(model: Any, ids: Tensor, **kwargs: Any) -> MemoryAugmentedCache:
    cache = MemoryAugmentedCache(model.config)
    logits_of(model, ids, cache=cache, **kwargs)
    return cache


def generate(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    return model.generate(ids, **({"max_new_tokens": 12, "do_sample": False} | kwargs))


@pytest.mark.parametrize(("family", "kind"), KINDS)
@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}])
def test_generating_with_the_cache_equals_generating_without(
    augmented: Make, tokens: Make, family: str, kind: dict[str, Any], mode: dict[str, Any]
) -> None:
    model, ids, results = augmented(family, **kind), tokens(2, 27), []
    for use_cache in (True, False):
        torch.manual_seed(0)
        results.append(generate(model, ids, use_cache=use_cache, **mode))
    assert torch.equal(*results)
    assert results[0].shape == (4 if "do_sample" in mode else 2, 39)


@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}, {"do_sample": True}])
def test_up_to_a_segment_generation_is_the_base_models(
    augmented: Make, base_model: Make, tokens: Make, mode: dict[str, Any]
) -> None:
    model, base, ids, results = augmented(), base_model(), tokens(2, 9), []
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for each in (model, base):
        torch.manual_seed(0)
        results.append(generate(each, ids, attention_mask=mask, max_new_tokens=7, **mode))
    assert torch.equal(*results)


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_a_left_padded_prompt_generates_what_it_does_alone(
    augmented: Make, tokens: Make, family: str, kind: dict[str, Any]
) -> None:
    model, ids = augmented(family, **kind), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :23] = 0
    together = generate(model, ids.masked_fill(mask == 0, 0), attention_mask=mask)
    assert torch.equal(together[0, 40:], generate(model, ids[:1, 23:])[0, 17:])
    assert torch.equal(together[1, 40:], generate(model, ids[1:])[0, 40:])


def test_several_turns_on_one_cache_equal_one_conversation(augmented: Make, tokens: Make) -> None:
    model = augmented("llama")
    cache, conversation = MemoryAugmentedCache(model.config), tokens(1, 20)
    for turn in range(3):
        whole = generate(model, conversation, max_new_tokens=11)
        conversation = generate(model, conversation, cache=cache, max_new_tokens=11)
        assert torch.equal(conversation, whole)
        conversation = torch.cat((conversation, tokens(1, 9, seed=turn)), dim=1)


@pytest.mark.parametrize("length", [1, 9, 50])
def test_a_prompt_after_what_was_read_needs_no_mask(augmented: Make, tokens: Make, length: int) -> None:
    model, text, prompt = augmented("gpt2"), tokens(2, 50), tokens(2, length, seed=5)
    cache = MemoryAugmentedCache(model.config)
    with torch.no_grad():
        model(text, cache=cache)
    whole = generate(model, torch.cat((text, prompt), dim=1), max_new_tokens=15)
    assert torch.equal(generate(model, prompt, cache=cache, max_new_tokens=15)[:, length:], whole[:, 50 + length :])


def test_a_token_within_a_segment_costs_one_token_of_the_model(augmented: Make, tokens: Make) -> None:
    model, lengths = augmented("llama"), []
    model.language_model.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    generate(model, tokens(1, 33), max_new_tokens=20)
    # Two whole segments and a token; the rest of the third; its border, where a new block begins.
    assert lengths == [16, 25, 10] + [1] * 15 + [10] + [1] * 3


def test_a_cache_whose_rows_were_all_reset_takes_a_prompt_of_any_length(augmented: Make, tokens: Make) -> None:
    model, ids, rows = augmented(), tokens(2, 30, seed=5), torch.ones(2, dtype=torch.bool)
    cache = read(model, tokens(2, 20))
    cache.reset(rows)
    assert torch.equal(generate(model, ids, cache=cache), generate(model, ids))
    logits_of(model, ids, cache=cache, reset_memory=rows)
    assert cache.get_seq_length() == 30
    longer = torch.cat((ids, tokens(2, 3)), dim=1)
    assert torch.equal(generate(model, longer, cache=cache), generate(model, longer))


def test_what_was_read_under_autocast_can_be_gone_on_with(augmented: Make, tokens: Make) -> None:
    model, ids = augmented(), tokens(2, 30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = read(model, ids[:, :20])
    exact = logits_of(model, ids)[:, 20:]
    torch.testing.assert_close(logits_of(model, ids[:, 20:], cache=cache), exact, atol=0.1, rtol=0)


def test_a_dynamic_cache_of_transformers_works_as_well(augmented: Make, tokens: Make) -> None:
    model, ids = augmented(), tokens(2, 60)
    cache = DynamicCache(config=model.config)
    logits_of(model, ids[:, :37], cache=cache)
    close(logits_of(model, ids[:, 37:], cache=cache), logits_of(model, ids)[:, 37:])
    assert cache.get_seq_length() == 60


def test_a_cache_is_made_without_gradients_and_holds_no_graph(augmented: Make, tokens: Make) -> None:
    model, ids = augmented(), tokens(2, 40)
    assert model(ids).cache is None
    with torch.no_grad():
        assert isinstance(model(ids).cache, MemoryAugmentedCache)
        assert model(ids, use_cache=False).cache is None
        assert model.train()(ids).cache is None
    cache = model.eval()(ids, use_cache=True).cache
    assert not any(memory.coefficients_BNE.requires_grad for memory in cache.layer.state.memories)
    assert cache.layer.block is None
    close(logits_of(model, ids, cache=cache), logits_of(model, torch.cat((ids, ids), dim=1))[:, 40:])


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_rows_can_be_reordered_selected_and_repeated(
    augmented: Make, tokens: Make, family: str, kind: dict[str, Any]
) -> None:
    model, past, more = augmented(family, **kind), tokens(3, 37), tokens(3, 20, seed=5)
    mask = torch.ones_like(past)
    mask[1, 20:] = 0
    cache = read(model, past, attention_mask=mask)
    expected = logits_of(model, more, cache=copy.deepcopy(cache))
    for change, rows in (
        (lambda c: c.reorder(torch.tensor([2, 0, 1])), [2, 0, 1]),
        (lambda c: c.select(torch.tensor([1])), [1]),
        (lambda c: c.repeat(2), [0, 0, 1, 1, 2, 2]),
        (lambda c: c.to("cpu"), [0, 1, 2]),
    ):
        changed = copy.deepcopy(cache)
        change(changed)
        close(logits_of(model, more[rows], cache=changed), expected[rows])


def test_chosen_rows_can_be_reset(augmented: Make, tokens: Make) -> None:
    model, more = augmented(), tokens(2, 30, seed=5)
    cache = read(model, tokens(2, 37))
    cache.reset(torch.tensor([False, True]))
    assert cache.seen.tolist() == [37, 0]
    close(logits_of(model, more, cache=cache)[1:], logits_of(model, more[1:]))
    cache.reset()
    assert cache.get_seq_length() == 0
    close(logits_of(model, more, cache=cache), logits_of(model, more))


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_a_memory_can_be_saved_and_loaded(
    augmented: Make, tokens: Make, family: str, kind: dict[str, Any], tmp_path: Path
) -> None:
    model, more = augmented(family, **kind), tokens(2, 30, seed=5)
    cache = read(model, tokens(2, 37))
    cache.save(tmp_path / "book.safetensors")
    loaded = MemoryAugmentedCache.load(tmp_path / "book.safetensors", model.config)
    assert loaded.get_seq_length() == 37
    assert loaded.seen.tolist() == [37, 37]
    close(logits_of(model, more, cache=loaded), logits_of(model, more, cache=cache))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["book.safetensors"]
    file = tmp_path / "book.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(OSError, match="must be whole"):
            MemoryAugmentedCache.load(tmp_path / "damaged", model.config)
    other = augmented(family, **(kind | {"num_basis": 20}))
    with pytest.raises(ValueError, match="must come from a model of this config, got num_basis=16"):
        MemoryAugmentedCache.load(tmp_path / "book.safetensors", other.config)
    with pytest.raises(ValueError, match="the cache must come from a model of this config"):
        other(more, cache=cache)


def test_what_cannot_go_on_is_refused(augmented: Make, tokens: Make, tmp_path: Path) -> None:
    model, ids = augmented(), tokens(2, 20)
    with pytest.raises(ValueError, match="a cache must hold something to be saved"):
        MemoryAugmentedCache(model.config).save(tmp_path / "nothing")
    with pytest.raises(ValueError, match="the batch must have the 2 rows that are remembered, got 1"):
        model(ids[:1], cache=read(model, ids))
    with pytest.raises(ValueError, match="the cache must be made for this model, got a DynamicCache"):
        model(ids, cache=DynamicCache())
    with pytest.raises(ValueError, match="cache and memory exclude each other"):
        model(ids, cache=read(model, ids), memory=model.empty_memory(2))
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="cannot be shortened"):
        read(model, ids).crop(-1)
    with pytest.raises(ValueError, match="a static cache"):
        generate(model, ids, cache_implementation="static")


def test_a_call_that_fails_leaves_the_cache_as_it_was(augmented: Make, tokens: Make) -> None:
    model, ids = augmented("llama"), tokens(2, 40)
    cache = read(model, ids[:, :20])
    handle = model.language_model.lm_head.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits_of(model, ids[:, 20:23], cache=cache)
    handle.remove()
    close(logits_of(model, ids[:, 20:], cache=cache), logits_of(model, ids)[:, 20:])


def test_a_copy_of_a_model_is_a_model_of_its_own(augmented: Make, tokens: Make) -> None:
    model, ids = augmented("llama"), tokens(2, 40)
    other, before = copy.deepcopy(model), logits_of(model, ids)
    for parameter in other.long_term_memory.parameters():
        parameter.data.zero_()
    assert torch.equal(logits_of(model, ids), before)
    assert not torch.equal(logits_of(other, ids), before)


def test_calls_in_parallel_and_within_each_other_do_not_meet(augmented: Make, tokens: Make) -> None:
    model, inputs = augmented("llama"), [tokens(1, 60, seed) for seed in range(6)]
    expected = [logits_of(model, ids) for ids in inputs]
    with ThreadPoolExecutor(3) as pool:
        for found, alone in zip(pool.map(lambda ids: logits_of(model, ids), inputs), expected, strict=True):
            assert torch.equal(found, alone)
    other, seen = augmented("gpt2"), []
    short = inputs[1][:, :30]
    inner, bare = logits_of(other, short), logits_of(other.language_model, short)

    def call_another(*args: Any) -> None:
        seen.append(torch.equal(logits_of(other, short), inner))
        seen.append(torch.equal(logits_of(other.language_model, short), bare))

    model.language_model.model.layers[1].input_layernorm.register_forward_hook(call_another)
    assert torch.equal(logits_of(model, inputs[0]), expected[0])
    assert seen
    assert all(seen)


def test_perplexity_of_a_document_of_any_length(augmented: Make, tokens: Make) -> None:
    model, ids = augmented("llama"), tokens(1, 100)
    found = streaming_perplexity(model, ids, piece_length=33, progress=False)
    with torch.no_grad():
        assert abs(found.mean_nll - model(ids, labels=ids).loss.item()) < 1e-4
    assert found.num_tokens == 99


def test_the_text_generation_pipeline(base_model: Make) -> None:
    base = base_model("llama", vocab_size=384)
    model = add_long_term_memory(base, LongTermMemoryConfig(segment_length=16, num_basis=16, basis_widths=(0.05, 0.1)))
    write = pipeline("text-generation", model=model, tokenizer=ByT5Tokenizer())
    (found,) = write("A prompt beyond the window of the model, by far.", max_new_tokens=5, do_sample=False)
    assert found["generated_text"].startswith("A prompt beyond")


def test_the_cache_of_an_encoder_and_a_decoder_is_refused(augmented: Make, tokens: Make) -> None:
    with pytest.raises(ValueError, match="the cache must be made for this model"):
        augmented()(tokens(1, 9), cache=EncoderDecoderCache(DynamicCache(), DynamicCache()))
