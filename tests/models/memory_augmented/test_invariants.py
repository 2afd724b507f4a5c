"""What a memory around a model promises: cuts, rows, padding and resets change nothing; time never runs backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_longmem.models.memory_augmented.cache import MemoryAugmentedCache

Make = Callable[..., Any]
LENGTHS = (1, 2, 63, 64, 65, 257, 1000)
# Learned, rotary and sliding-window positions, parallel branches; plain, gated and sticky memories; any windows.
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {}),
    ("llama", {"sticky_memories": True, "memory_gate": "convolution", "segment_length": 10, "window_length": 16}),
    ("mistral", {"memory_decay": "uniform", "memory_layers": (1,), "segment_length": 15}),
    ("gpt_neox", {"memory_input_norm": False, "window_length": 0, "segment_length": 7}),
]


def logits_of(model: torch.nn.Module, ids: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **kwargs).logits


def close(a: Tensor, b: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def in_pieces(model: Any, ids: Tensor, sizes: list[int], mask: Tensor | None = None) -> Tensor:
    """Logits of a document given in pieces, through one cache."""
    cache, parts, start = MemoryAugmentedCache(model.config), [], 0
    for size in sizes:
        here = None if mask is None else mask[:, start : start + size]
        parts.append(logits_of(model, ids[:, start : start + size], attention_mask=here, cache=cache))
        start += size
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_runs_and_gives_finite_gradients(augmented: Make, tokens: Make, length: int) -> None:
    model, ids = augmented("llama").train(), tokens(1, length)
    if 1 < length < 1000:
        loss = model(ids, labels=ids).loss
        loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert logits_of(model.eval(), ids).shape == (1, length, 60)


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_a_block_is_what_the_base_model_gives_when_the_memory_says_nothing(
    augmented: Make, base_model: Make, tokens: Make, family: str, kind: dict[str, Any]
) -> None:
    model, base, ids = augmented(family, **(kind | {"memory_zero_init": True})), base_model(family), tokens(2, 50)
    length, window = model.config.segment_length, model.config.memory.window_length
    logits = logits_of(model, ids)
    assert torch.equal(logits[:, :length], logits_of(base, ids[:, :length]))
    for start in range(length, 50, length):
        first = max(start - window, 0)
        expected = logits_of(base, ids[:, first : start + length])[:, start - first :]
        close(logits[:, start : start + length], expected)


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_token_by_token_equals_the_whole(augmented: Make, tokens: Make, family: str, kind: dict[str, Any]) -> None:
    model, ids = augmented(family, **kind), tokens(2, 37)
    close(in_pieces(model, ids, [1] * 37), logits_of(model, ids))


@pytest.mark.parametrize(("family", "kind"), KINDS)
@pytest.mark.parametrize("where", ["left", "right", "both ends", "scattered"])
def test_rows_do_not_depend_on_batch_or_padding(
    augmented: Make, tokens: Make, family: str, kind: dict[str, Any], where: str
) -> None:
    model, lengths, width = augmented(family, **kind), (1, 25, 40), 50
    rows, ids, mask = tokens(3, width), torch.ones(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    for row, length in enumerate(lengths):
        slots = {
            "left": torch.arange(width - length, width),
            "right": torch.arange(length),
            "both ends": torch.arange(9, 9 + length),
            "scattered": torch.randperm(width, generator=torch.Generator().manual_seed(row))[:length].sort().values,
        }[where]
        ids[row, slots], mask[row, slots] = rows[row, :length], 1
    together = logits_of(model, ids, attention_mask=mask)
    pieces = in_pieces(model, ids, [20, 19, 1, 10], mask)
    for row, length in enumerate(lengths):
        alone = logits_of(model, rows[row : row + 1, :length])[0]
        close(together[row, mask[row].bool()], alone)
        close(pieces[row, mask[row].bool()], alone)


@pytest.mark.parametrize(("family", "kind"), KINDS)
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_pieces_with_any_padding_equal_the_whole(
    augmented: Make, tokens: Make, family: str, kind: dict[str, Any], data: st.DataObject
) -> None:
    model, ids = augmented(family, **kind), tokens(3, 50)
    lengths = [data.draw(st.integers(1, 45), label="tokens") for _ in range(3)]
    mask = torch.zeros(3, 50, dtype=torch.long)
    for row, length in enumerate(lengths):
        seed = data.draw(st.integers(0, 99), label="padding")
        mask[row, torch.randperm(50, generator=torch.Generator().manual_seed(seed))[:length]] = 1
    cuts = sorted(data.draw(st.sets(st.integers(1, 49), max_size=4), label="cuts"))
    sizes = [after - before for before, after in zip([0, *cuts], [*cuts, 50], strict=True)]
    pieces = in_pieces(model, ids, sizes, mask)
    together = logits_of(model, ids, attention_mask=mask)
    assert torch.isfinite(pieces).all()
    for row in range(3):
        real = mask[row].bool()
        alone = logits_of(model, ids[row : row + 1, real])[0]
        close(pieces[row, real], alone)
        close(together[row, real], alone)


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_pieces_equal_the_whole_while_training(
    augmented: Make, tokens: Make, family: str, kind: dict[str, Any]
) -> None:
    model, ids = augmented(family, **kind).eval(), tokens(2, 70)
    whole, memory, parts = model(ids, memory=model.empty_memory(2)), model.empty_memory(2), []
    for start, stop in ((0, 3), (3, 40), (40, 41), (41, 70)):
        outputs = model(ids[:, start:stop], memory=memory)
        memory = outputs.memory
        parts.append(outputs.logits)
    close(torch.cat(parts, dim=1), whole.logits)
    assert memory.seen_B.tolist() == [70, 70]
    for ours, theirs in zip(memory.memories, whole.memory.memories, strict=True):
        for part, expected in zip(ours, theirs, strict=True):
            close(part, expected, 1e-4)


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_a_later_token_changes_nothing_before_it_bit_for_bit(
    augmented: Make, tokens: Make, family: str, kind: dict[str, Any]
) -> None:
    model, ids = augmented(family, **kind), tokens(2, 40)
    before = logits_of(model, ids)
    for position in (0, 15, 16, 39):
        changed = ids.clone()
        changed[:, position:] = (changed[:, position:] + 7) % 58 + 2
        after = logits_of(model, changed)
        assert torch.equal(before[:, :position], after[:, :position])
        assert not torch.equal(before[:, position], after[:, position])


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_the_past_beyond_the_block_is_read_through_the_memory_alone(
    augmented: Make, tokens: Make, family: str, kind: dict[str, Any]
) -> None:
    ids = tokens(1, 80)
    changed = ids.clone()
    changed[:, :3] = (changed[:, :3] + 7) % 58 + 2
    model, silent = augmented(family, **kind), augmented(family, **(kind | {"memory_zero_init": True}))
    assert (logits_of(model, ids) - logits_of(model, changed))[:, 64:].abs().max() > 1e-4
    assert torch.equal(logits_of(silent, ids)[:, 64:], logits_of(silent, changed)[:, 64:])


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_padding_is_never_written_and_a_row_of_padding_harms_no_other(
    augmented: Make, tokens: Make, family: str, kind: dict[str, Any]
) -> None:
    model, ids = augmented(family, **kind), tokens(3, 50)
    mask = torch.ones_like(ids)
    mask[1] = 0
    caches = []
    for padding in (0, 9):
        cache = MemoryAugmentedCache(model.config)
        logits = logits_of(model, ids.masked_fill(mask == 0, padding), attention_mask=mask, cache=cache)
        assert torch.isfinite(logits).all()
        close(logits[[0, 2]], logits_of(model, ids[[0, 2]]))
        caches.append(cache)
    assert caches[0].seen.tolist() == [50, 0, 50]
    for memory in caches[0].layer.state.memories:
        assert memory.segments_B[1] == 0
        assert not memory.coefficients_BNE[1].any()
    # A document that begins after the padding is as one that begins at once.
    more = tokens(3, 40, seed=4)
    after = logits_of(model, more, cache=caches[0])
    close(after[1:2], logits_of(model, more[1:2]))
    close(after, logits_of(model, more, cache=caches[1]))


def test_padding_may_be_anything_in_embeddings(augmented: Make, tokens: Make) -> None:
    model, ids = augmented(), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, 5:9] = mask[1, 30:] = 0
    given = model.get_input_embeddings()(ids).detach()
    poison = given.masked_fill(mask[..., None] == 0, torch.nan)
    caches = MemoryAugmentedCache(model.config), MemoryAugmentedCache(model.config)
    for call in range(2):
        plain = logits_of(model, None, inputs_embeds=given, attention_mask=mask, cache=caches[0])
        poisoned = logits_of(model, None, inputs_embeds=poison, attention_mask=mask, cache=caches[1])
        assert torch.equal(poisoned[mask.bool()], plain[mask.bool()]), call


def test_an_input_of_nothing_but_padding_is_finite_and_leaves_the_state_alone(augmented: Make, tokens: Make) -> None:
    model, ids = augmented(), tokens(2, 50)
    cache = MemoryAugmentedCache(model.config)
    first = logits_of(model, ids[:, :32], cache=cache)
    nothing = logits_of(model, ids[:, :20], attention_mask=torch.zeros(2, 20), cache=cache)
    assert torch.isfinite(nothing).all()
    close(torch.cat((first, logits_of(model, ids[:, 32:], cache=cache)), dim=1), logits_of(model, ids))
    assert torch.isfinite(logits_of(model, ids[:, :20], attention_mask=torch.zeros(2, 20))).all()


def test_nothing_but_padding_may_come_first_without_a_window(augmented: Make, tokens: Make) -> None:
    model, ids = augmented(window_length=0), tokens(2, 40)
    cache = MemoryAugmentedCache(model.config)
    assert torch.isfinite(logits_of(model, ids[:, :5], attention_mask=torch.zeros(2, 5), cache=cache)).all()
    close(logits_of(model, ids, cache=cache), logits_of(model, ids))


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_a_reset_row_is_as_new_bit_for_bit(augmented: Make, tokens: Make, family: str, kind: dict[str, Any]) -> None:
    model, past, ids = augmented(family, **kind), tokens(2, 41), tokens(2, 40, seed=2)
    used, fresh = MemoryAugmentedCache(model.config), MemoryAugmentedCache(model.config)
    logits_of(model, past, cache=used)
    unread = torch.ones_like(past)
    unread[0] = 0
    logits_of(model, past, attention_mask=unread, cache=fresh)
    reset = torch.tensor([True, False])
    after_reset = logits_of(model, ids, cache=used, reset_memory=reset)
    never_used = logits_of(model, ids, cache=fresh, reset_memory=reset)
    assert torch.equal(after_reset[0], never_used[0])
    close(after_reset[0], logits_of(model, ids[:1])[0])
    close(after_reset[1], logits_of(model, torch.cat((past, ids), dim=1))[1, 41:])


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_what_is_remembered_does_not_grow(
    augmented: Make, tokens: Make, family: str, kind: dict[str, Any], tmp_path: Any
) -> None:
    model = augmented(family, **kind)
    cache, sizes, keys = MemoryAugmentedCache(model.config), [], []
    for _ in range(4):
        logits_of(model, tokens(1, 50), cache=cache)
        cache.save(tmp_path / "memory")
        sizes.append((tmp_path / "memory").stat().st_size)
        keys.append(cache.layer.block.cache.get_seq_length())
    longest = model.config.memory.window_length + model.config.segment_length
    assert max(sizes) - min(sizes) <= 8 * longest * (4 * 32 + 8)  # a part of a segment more or less
    assert max(keys) <= longest


def test_positions_never_leave_the_range_that_the_model_knows(augmented: Make, tokens: Make) -> None:
    model = augmented("llama", segment_length=20, window_length=12)
    given: list[Tensor] = []

    def check(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given.append(kwargs["position_ids"])
        if not (kwargs["position_ids"].min() >= 0 and kwargs["position_ids"].max() < 32):
            raise IndexError(f"position {kwargs['position_ids'].max()}")

    model.language_model.model.register_forward_pre_hook(check, with_kwargs=True)
    ids, mask = tokens(3, 93), torch.ones(3, 93, dtype=torch.long)
    mask[0, :31] = mask[1, 70:] = 0
    model.generate(ids, attention_mask=mask, max_new_tokens=22)
    assert max(int(positions.max()) for positions in given) == 31


@pytest.mark.parametrize("bptt_segments", [1, 2])
@pytest.mark.parametrize("read", range(4))
def test_gradients_reach_back_as_far_as_bptt_segments_and_the_window(
    augmented: Make, tokens: Make, bptt_segments: int, read: int
) -> None:
    model = augmented("llama", bptt_segments=bptt_segments, window_length=0).train()
    embeddings = model.get_input_embeddings()(tokens(2, 64)).detach().requires_grad_()
    out = model(inputs_embeds=embeddings).logits
    out[:, 16 * read : 16 * (read + 1)].square().sum().backward()
    reached = [bool(part.any()) for part in embeddings.grad.split(16, dim=1)]
    first = read // bptt_segments * bptt_segments
    assert reached == [first <= segment <= read for segment in range(4)]


@pytest.mark.parametrize(("family", "kind"), KINDS)
@pytest.mark.parametrize("length", [12, 50])
def test_every_parameter_gets_a_gradient_in_every_call(
    augmented: Make, tokens: Make, family: str, kind: dict[str, Any], length: int
) -> None:
    model, ids = augmented(family, **kind).train(), tokens(2, length)
    model(ids, labels=ids).loss.backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]
    if length == 50:
        assert not [name for name, p in model.named_parameters() if not p.grad.any()]


def test_embeddings_give_what_their_ids_give_and_may_follow_them(augmented: Make, tokens: Make) -> None:
    model, ids = augmented(), tokens(2, 70)
    embeddings, whole = model.get_input_embeddings()(ids).detach(), logits_of(model, ids)
    with torch.no_grad():
        close(model(inputs_embeds=embeddings).logits, whole)
        for first in (True, False):
            cache, parts = MemoryAugmentedCache(model.config), []
            for number, stretch in enumerate((slice(0, 23), slice(23, 41), slice(41, 70))):
                if (number % 2 == 0) == first:
                    parts.append(model(inputs_embeds=embeddings[:, stretch], cache=cache).logits)
                else:
                    parts.append(model(ids[:, stretch], cache=cache).logits)
            close(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("last", [1, 5, 40])
def test_logits_of_the_last_tokens_alone(augmented: Make, tokens: Make, last: int) -> None:
    model, ids = augmented(), tokens(3, 70)
    mask = torch.ones_like(ids)
    mask[0, :33] = mask[1, 60:] = 0
    whole = logits_of(model, ids, attention_mask=mask)
    kept = logits_of(model, ids, attention_mask=mask, logits_to_keep=last)
    assert kept.shape == (3, last, 60)
    real = mask[:, -last:].bool()
    close(kept[real], whole[:, -last:][real])
    close(logits_of(model, ids, logits_to_keep=last), logits_of(model, ids)[:, -last:])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_checkpointing_gives_the_same_gradients(augmented: Make, tokens: Make, family: str) -> None:
    gradients, ids = [], tokens(2, 60)
    for checkpointing in (True, False):
        model = augmented(family, memory_gate="convolution", bptt_segments=2).double().train()
        if checkpointing:
            model.activation_checkpointing_enable()
        torch.manual_seed(3)
        outputs = model(ids, labels=ids)
        # Neither a call in between nor a model of the same kind in another state may be mistaken for this one.
        augmented(family)(tokens(1, 20))
        outputs.loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, plain in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], plain, atol=1e-9, rtol=1e-9)


def test_reentrant_checkpointing_is_refused(augmented: Make, tokens: Make) -> None:
    model, ids = augmented("llama").train(), tokens(2, 40)
    model.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="must not be reentrant"):
        model(ids, labels=ids)


def test_documents_packed_in_a_row_are_as_if_alone(augmented: Make, tokens: Make) -> None:
    model, ids = augmented(), tokens(2, 60)
    document_ids = torch.tensor([[0] * 25 + [1] * 35, [0] * 60])
    packed = model(ids, document_ids=document_ids, labels=ids)
    parts = [model(part, labels=part) for part in (ids[:1, :25], ids[:1, 25:], ids[1:])]
    close(packed.logits[0], torch.cat((parts[0].logits, parts[1].logits), dim=1)[0])
    close(packed.logits[1:], parts[2].logits)
    weights = (24, 34, 59)
    close(packed.loss, sum(w * part.loss for w, part in zip(weights, parts, strict=True)) / sum(weights))


def test_hidden_states_are_those_of_the_blocks(augmented: Make, tokens: Make) -> None:
    model, ids = augmented("llama"), tokens(2, 40)
    with torch.no_grad():
        outputs = model(ids, output_hidden_states=True)
    assert [tuple(states.shape) for states in outputs.hidden_states] == [(2, 40, 32)] * 3
    assert torch.equal(model.get_output_embeddings()(outputs.hidden_states[-1]), outputs.logits)


def test_memory_stays_float32_and_finite_under_autocast_over_many_writes(augmented: Make, tokens: Make) -> None:
    model = augmented("llama", segment_length=4, window_length=0, memory_layers=(1,), sticky_memories=True)
    cache, ids = MemoryAugmentedCache(model.config), tokens(1, 402)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for piece in ids.split(201, dim=1):
            assert torch.isfinite(logits_of(model, piece, cache=cache)).all()
    (memory,) = cache.layer.state.memories
    assert memory.segments_B.item() == 100
    assert memory.coefficients_BNE.dtype == torch.float32
    assert torch.isfinite(memory.coefficients_BNE).all()


def test_a_half_precision_model_keeps_its_memory_in_float32(base_model: Make, augmented: Make, tokens: Make) -> None:
    model, ids = augmented("llama").to(torch.bfloat16), tokens(2, 70)
    cache = MemoryAugmentedCache(model.config)
    assert torch.isfinite(logits_of(model, ids, cache=cache)).all()
    assert cache.layer.state.memories[0].coefficients_BNE.dtype == torch.float32
    assert logits_of(model, ids[:, :3], cache=cache).dtype == torch.bfloat16


@pytest.mark.parametrize("num_items", [None, 0, torch.tensor(0)])
@pytest.mark.parametrize("training", [False, True])
def test_a_call_with_nothing_to_predict_costs_nothing(
    augmented: Make, tokens: Make, training: bool, num_items: Any
) -> None:
    model, ids = augmented().train(training), tokens(1, 20)
    outputs = model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=num_items)
    assert outputs.loss == 0
    outputs.loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("where", ["left", "inside"])
def test_the_loss_of_a_text_does_not_depend_on_its_padding(augmented: Make, tokens: Make, where: str) -> None:
    model, text, every = augmented(), tokens(1, 20), torch.arange(27)
    place = every[7:] if where == "left" else every[every % 4 > 0][:20]
    ids, mask = torch.zeros(1, 27, dtype=torch.long), torch.zeros(1, 27, dtype=torch.long)
    ids[:, place], mask[:, place] = text, 1
    close(model(ids, attention_mask=mask, labels=ids).loss, model(text, labels=text).loss)


def test_both_names_of_document_ids_mean_the_same(augmented: Make, tokens: Make) -> None:
    model, ids = augmented(), tokens(1, 40)
    documents = (torch.arange(40)[None] >= 19).long()
    named, alias = (model(ids, labels=ids, **{name: documents}) for name in ("document_ids", "seq_idx"))
    assert torch.equal(named.loss, alias.loss)
    assert torch.equal(named.logits, alias.logits)
    assert not torch.equal(named.logits, model(ids).logits)
