"""The cache: generation, choosing and moving rows, saving and loading."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from hf_longmem.models.infinite_cache import InfiniteFormerCache

Make = Callable[..., Any]
KINDS: list[dict[str, Any]] = [
    {},
    {"position_embedding_type": "relative", "sticky_memories": True, "memory_layers": (1,)},
]


def logits_of(model: torch.nn.Module, ids: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **kwargs).logits


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def read(model: Any, ids: Tensor, **kwargs: Any) -> InfiniteFormerCache:
    cache = InfiniteFormerCache(model.config)
    logits_of(model, ids, cache=cache, **kwargs)
    return cache


def generate(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    return model.generate(ids, **({"max_new_tokens": 40, "eos_token_id": None} | kwargs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}])
def test_generating_with_the_cache_equals_generating_without(
    causal_lm: Make, tokens: Make, kind: dict[str, Any], mode: dict[str, Any]
) -> None:
    model, ids = causal_lm(**kind), tokens(2, 27)
    results = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        results.append(generate(model, ids, use_cache=use_cache, **mode))
    assert torch.equal(*results)
    assert results[0].shape == (4 if "do_sample" in mode else 2, 67)


@pytest.mark.parametrize("kind", KINDS)
def test_a_left_padded_prompt_generates_what_it_does_alone(causal_lm: Make, tokens: Make, kind: dict[str, Any]) -> None:
    model, ids = causal_lm(**kind), tokens(2, 50)
    mask = torch.ones_like(ids)
    mask[0, :23] = 0
    together = generate(model, ids.masked_fill(mask == 0, 0), attention_mask=mask)
    assert torch.equal(together[0, 50:], generate(model, ids[:1, 23:])[0, 27:])
    assert torch.equal(together[1, 50:], generate(model, ids[1:])[0, 50:])


@pytest.mark.parametrize("use_cache", [True, False])
def test_embeddings_generate_what_their_ids_do(causal_lm: Make, tokens: Make, use_cache: bool) -> None:
    model, ids = causal_lm(), tokens(2, 27)
    embeddings = model.get_input_embeddings()(ids)
    expected = generate(model, ids, max_new_tokens=10)
    assert torch.equal(
        model.generate(inputs_embeds=embeddings, max_new_tokens=10, eos_token_id=None, use_cache=use_cache),
        expected[:, 27:],
    )
    assert torch.equal(generate(model, ids, inputs_embeds=embeddings, max_new_tokens=10, use_cache=use_cache), expected)


def test_the_older_spelling_of_the_cache_works_and_warns(causal_lm: Make, tokens: Make) -> None:
    model, ids = causal_lm(), tokens(2, 40)
    for module in (model, model.model):
        with torch.no_grad(), pytest.warns(FutureWarning, match="past_key_values"):
            cache = module(ids, past_key_values=InfiniteFormerCache(model.config)).cache
        assert cache.get_seq_length() == 40


def test_there_is_no_static_cache(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm()
    for make in (
        lambda: generate(model, tokens(2, 20), cache_implementation="static"),
        lambda: StaticCache(config=model.config, max_cache_len=100),
    ):
        with pytest.raises(ValueError, match="got a static cache; leave cache_implementation out"):
            make()


def test_several_turns_on_one_cache_equal_one_conversation(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm()
    cache = InfiniteFormerCache(model.config)
    conversation = tokens(1, 20)
    for turn in range(3):
        whole = generate(model, conversation, max_new_tokens=15)
        conversation = generate(model, conversation, cache=cache, max_new_tokens=15)
        assert torch.equal(conversation, whole)
        conversation = torch.cat((conversation, tokens(1, 9, seed=turn)), dim=1)


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}])
@pytest.mark.parametrize("length", [1, 9, 50])
def test_a_prompt_after_what_was_read_needs_no_mask(
    causal_lm: Make, tokens: Make, mode: dict[str, Any], length: int
) -> None:
    model, text, prompt = causal_lm(), tokens(2, 50), tokens(2, length, seed=5)
    cache = InfiniteFormerCache(model.config)
    logits_of(model, text, cache=cache)
    cache.repeat(mode.get("num_beams", 1))
    whole = generate(model, torch.cat((text, prompt), dim=1), max_new_tokens=15, **mode)
    assert torch.equal(
        generate(model, prompt, cache=cache, max_new_tokens=15, **mode)[:, length:], whole[:, 50 + length :]
    )


def test_a_padded_prompt_after_what_was_read(causal_lm: Make, tokens: Make) -> None:
    model, text, prompt = causal_lm(), tokens(2, 50), tokens(2, 9, seed=5)
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    cache = InfiniteFormerCache(model.config)
    logits_of(model, text, cache=cache)
    alone = InfiniteFormerCache(model.config)
    logits_of(model, text[:1], cache=alone)
    both = generate(model, prompt, attention_mask=mask, cache=cache, max_new_tokens=15)
    assert torch.equal(both[:1, 9:], generate(model, prompt[:1, 4:], cache=alone, max_new_tokens=15)[:, 5:])


def test_a_dynamic_cache_of_transformers_works_as_well(causal_lm: Make, tokens: Make) -> None:
    model, ids = causal_lm(), tokens(2, 60)
    cache = DynamicCache(config=model.config)
    logits_of(model, ids[:, :37], cache=cache)
    close(logits_of(model, ids[:, 37:], cache=cache), logits_of(model, ids)[:, 37:])
    assert cache.get_seq_length() == 60


def test_a_cache_is_made_without_gradients_or_when_asked_for_and_holds_no_graph(causal_lm: Make, tokens: Make) -> None:
    model, ids = causal_lm(), tokens(2, 40)
    assert model(ids).cache is None
    with torch.no_grad():
        assert isinstance(model(ids).cache, InfiniteFormerCache)
        assert model(ids, use_cache=False).cache is None
        assert model.train()(ids).cache is None
    cache = model.eval()(ids, use_cache=True).cache
    assert not any(layer.state.memory.coefficients_BNE.requires_grad for layer in cache.layers)
    close(logits_of(model, ids, cache=cache), logits_of(model, torch.cat((ids, ids), dim=1))[:, 40:])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_can_be_reordered_selected_and_repeated(causal_lm: Make, tokens: Make, kind: dict[str, Any]) -> None:
    model, past, more = causal_lm(**kind), tokens(3, 53), tokens(3, 30, seed=5)
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


def test_chosen_rows_can_be_reset(causal_lm: Make, tokens: Make) -> None:
    model, more = causal_lm(), tokens(2, 30, seed=5)
    cache = read(model, tokens(2, 53))
    cache.reset(torch.tensor([False, True]))
    assert cache.seen.tolist() == [53, 0]
    close(logits_of(model, more, cache=cache)[1:], logits_of(model, more[1:]))
    cache.reset()
    assert cache.get_seq_length() == 0
    close(logits_of(model, more, cache=cache), logits_of(model, more))


@pytest.mark.parametrize("by", ["reset", "a list", "reset_memory"])
def test_a_cache_whose_rows_were_all_reset_takes_a_prompt_of_any_length(causal_lm: Make, tokens: Make, by: str) -> None:
    model, ids = causal_lm(), tokens(2, 30, seed=5)
    cache, rows = read(model, tokens(2, 20)), torch.ones(2, dtype=torch.bool)
    if by == "reset_memory":
        logits_of(model, ids, cache=cache, reset_memory=rows)
        assert cache.get_seq_length() == 30
        prompt = torch.cat((ids, tokens(2, 3)), dim=1)
    else:
        cache.reset(rows if by == "reset" else rows.tolist())
        assert cache.get_seq_length() == 0
        prompt = ids
    assert torch.equal(generate(model, prompt, cache=cache), generate(model, prompt))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_was_read_in_another_type_can_be_gone_on_with(
    causal_lm: Make, tokens: Make, kind: dict[str, Any], dtype: torch.dtype
) -> None:
    """After a segment was written, and before the next: the projection of the memory is still that of the type."""
    model, ids = causal_lm(**kind), tokens(2, 30)
    exact = logits_of(model, ids)[:, 20:]
    if dtype == torch.bfloat16:
        with torch.autocast("cpu", dtype=dtype):
            cache = read(model, ids[:, :20])
    else:
        cache = read(copy.deepcopy(model).to(dtype), ids[:, :20])
    torch.testing.assert_close(logits_of(model, ids[:, 20:], cache=cache), exact, atol=0.1, rtol=0)


def test_memories_compare_as_objects(causal_lm: Make) -> None:
    model = causal_lm()
    memory = model.model.empty_memory(2)
    assert memory == memory
    assert memory != model.model.empty_memory(2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_memory_can_be_saved_and_loaded(causal_lm: Make, tokens: Make, kind: dict[str, Any], tmp_path: Path) -> None:
    model, more = causal_lm(**kind), tokens(2, 30, seed=5)
    cache = read(model, tokens(2, 53))
    cache.save(tmp_path / "book.safetensors")
    loaded = InfiniteFormerCache.load(tmp_path / "book.safetensors", model.config)
    assert loaded.get_seq_length() == 53
    assert torch.equal(logits_of(model, more, cache=loaded), logits_of(model, more, cache=cache))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["book.safetensors"]


def test_a_new_process_goes_on_with_the_same_logits(causal_lm: Make, tokens: Make, tmp_path: Path) -> None:
    model, more = causal_lm(), tokens(1, 20, seed=5)
    model.save_pretrained(tmp_path / "model")
    cache = read(model, tokens(1, 53))
    cache.save(tmp_path / "book")
    torch.save(more, tmp_path / "more")
    code = f"""
import torch
from hf_longmem.models.infinite_cache import InfiniteFormerCache
from hf_longmem.models.infinite_former.modeling_infinite_former import InfiniteFormerForCausalLM
path = {str(tmp_path)!r}
model = InfiniteFormerForCausalLM.from_pretrained(path + "/model").eval()
cache = InfiniteFormerCache.load(path + "/book", model.config)
with torch.no_grad():
    torch.save(model(torch.load(path + "/more"), cache=cache).logits, path + "/logits")
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    close(torch.load(tmp_path / "logits"), logits_of(model, more, cache=cache))


def test_a_damaged_or_foreign_file_is_refused(causal_lm: Make, tokens: Make, tmp_path: Path) -> None:
    model, path = causal_lm(), tmp_path / "book"
    read(model, tokens(1, 40)).save(path)
    whole = path.read_bytes()
    with pytest.raises(ValueError, match=r"must come from a model of this config, got memory_decay=0\.75"):
        InfiniteFormerCache.load(path, causal_lm(memory_decay=0.5).config)
    for kept in (0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:kept])
        with pytest.raises(OSError, match=r"must be whole, got a damaged one .* save it again"):
            InfiniteFormerCache.load(path, model.config)
    for damaged in (len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:damaged] + bytes([whole[damaged] ^ 1]) + whole[damaged + 1 :])
        with pytest.raises(OSError, match="must be whole, got one whose checksum is wrong"):
            InfiniteFormerCache.load(path, model.config)
    for right, wrong in (
        (b"coefficients", b"coefficient5"),
        (b'"length":"40"', b'"length":"90"'),
        (b"ridge", b"fridg"),
    ):
        assert right in whole
        path.write_bytes(whole.replace(right, wrong))
        with pytest.raises(OSError, match="must be whole, got one whose checksum is wrong"):
            InfiniteFormerCache.load(path, model.config)
    with pytest.raises(OSError, match="a memory is one file, got the folder"):
        InfiniteFormerCache.load(tmp_path, model.config)
    with pytest.raises(OSError, match=r"saved to an existing folder, got '.*nowhere'; make it first"):
        read(model, tokens(1, 40)).save(tmp_path / "nowhere" / "book")
    path.unlink()
    with pytest.raises(OSError, match="book"):
        InfiniteFormerCache.load(path, model.config)
    save_file({"weight": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="must hold the memory of infinite_former models"):
        InfiniteFormerCache.load(path, model.config)
    path.write_bytes(whole)
    cache = InfiniteFormerCache.load(path, model.config)
    cache.layers[0].state.memory.coefficients_BNE[0, 0, 0] = float("nan")
    cache.save(path)
    with pytest.raises(ValueError, match=r"must be finite, got NaN or infinity in layers\.0\.coefficients"):
        InfiniteFormerCache.load(path, model.config)


def test_bad_states_are_refused_and_left_unharmed(causal_lm: Make, tokens: Make) -> None:
    model, ids = causal_lm(), tokens(2, 40)
    cache, untouched = read(model, ids), read(model, ids)
    memory = model.model.empty_memory(2)
    for kwargs, message in (
        ({"cache": cache, "reset_memory": torch.ones(3, dtype=torch.bool)}, "one bool for each of the 2 rows"),
        ({"cache": cache, "memory": memory}, "cache and memory exclude each other"),
        ({"cache": DynamicCache()}, "the cache must be made for this model"),
        ({"cache": ((ids, ids),)}, "the cache must be made for this model, got a tuple"),
        (
            {"cache": EncoderDecoderCache(DynamicCache(), DynamicCache())},
            "must be made for this model, got a EncoderDecoderCache of 0 layers",
        ),
        ({"cache": read(causal_lm(memory_decay=0.5), ids)}, "the cache must come from a model of this config"),
        ({"memory": causal_lm(num_hidden_layers=1).model.empty_memory(2)}, "must come from a model of this config"),
        ({"memory": model.model.empty_memory(5)}, "the batch must have the 5 rows that are remembered"),
    ):
        with pytest.raises(ValueError, match=message):
            logits_of(model, ids, **kwargs)
    for other in ({"segment_length": 8}, {"segment_length": 32}, {"short_term_window": 3}, {"num_basis": 20}):
        plain = DynamicCache(config=causal_lm(**other).config)  # which knows no config
        logits_of(causal_lm(**other), ids, cache=plain)
        with pytest.raises(ValueError, match="what is remembered must come from a model of this config"):
            logits_of(model, ids, cache=plain)
    with pytest.raises(ValueError, match=r"must have the 2 rows that are remembered, got 1; .* repeat\(\) rows"):
        logits_of(model, ids[:1], cache=cache)
    with pytest.raises(ValueError, match="at least one row"):
        logits_of(model, ids[:0])
    with pytest.raises(ValueError, match=r"token ids must lie in 0 \.\. 59, got 60"):
        logits_of(model, ids + 60 - ids.max(), cache=cache)
    with pytest.raises(ValueError, match="at least one token"):
        logits_of(model, ids[:, :0], cache=cache)
    with pytest.raises(ValueError, match="cannot be shortened"):
        cache.crop(3)
    with pytest.raises(ValueError, match="must hold something"):
        InfiniteFormerCache(model.config).save("nowhere")
    assert torch.equal(logits_of(model, ids, cache=cache), logits_of(model, ids, cache=untouched))
