"""What an infinity-former promises: cuts, rows, padding and resets change nothing; time never runs backwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hf_longmem.models.infinite_cache import InfiniteFormerCache
from hf_longmem.models.infinite_former.modeling_infinite_former import InfiniteFormerModel

Make = Callable[..., Any]
LENGTHS = (1, 2, 63, 64, 65, 257, 1000)
KINDS: list[dict[str, Any]] = [
    {},
    {"position_embedding_type": "relative", "sticky_memories": True, "memory_gate": "convolution"},
    {"memory_decay": "uniform", "memory_layers": (1,), "short_term_window": 5},
    {"memory_decay": "uniform", "sticky_memories": True, "short_term_window": 0, "segment_length": 7},
    {"memory_layers": ()},
]


def logits_of(model: torch.nn.Module, ids: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **kwargs).logits


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def in_pieces(model: torch.nn.Module, ids: Tensor, sizes: list[int], mask: Tensor | None = None) -> Tensor:
    """Logits of a document given in pieces, through one cache."""
    cache, parts, start = InfiniteFormerCache(model.config), [], 0
    for size in sizes:
        here = None if mask is None else mask[:, start : start + size]
        parts.append(logits_of(model, ids[:, start : start + size], attention_mask=here, cache=cache))
        start += size
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_runs_and_gives_finite_gradients(
    causal_lm: Make, tokens: Make, kind: dict[str, Any], length: int
) -> None:
    model = causal_lm(**kind).train()
    ids = tokens(2, length)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert logits_of(model.eval(), ids).shape == (2, length, 60)


@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token_equals_the_whole(causal_lm: Make, tokens: Make, kind: dict[str, Any]) -> None:
    model, ids = causal_lm(**kind), tokens(2, 67)
    close(in_pieces(model, ids, [1] * 67), logits_of(model, ids))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["left", "right", "both ends", "scattered"])
def test_rows_do_not_depend_on_batch_or_padding(
    causal_lm: Make, tokens: Make, kind: dict[str, Any], where: str
) -> None:
    model, lengths, width = causal_lm(**kind), (1, 40, 101), 130
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
    pieces = in_pieces(model, ids, [30, 50, 1, 49], mask)
    for row, length in enumerate(lengths):
        alone = logits_of(model, rows[row : row + 1, :length])[0]
        close(together[row, mask[row].bool()], alone)
        close(pieces[row, mask[row].bool()], alone)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_pieces_with_any_padding_equal_the_whole(
    causal_lm: Make, tokens: Make, kind: dict[str, Any], data: st.DataObject
) -> None:
    model, ids = causal_lm(**kind), tokens(3, 110)
    lengths = [data.draw(st.integers(1, 80), label="tokens") for _ in range(3)]
    mask = torch.zeros(3, 110, dtype=torch.long)
    for row, length in enumerate(lengths):
        seed = data.draw(st.integers(0, 99), label="padding")
        slots = torch.randperm(110, generator=torch.Generator().manual_seed(seed))[:length]
        mask[row, slots] = 1
    cuts = sorted(data.draw(st.sets(st.integers(1, 109), max_size=6), label="cuts"))
    sizes = [after - before for before, after in zip([0, *cuts], [*cuts, 110], strict=True)]
    pieces = in_pieces(model, ids, sizes, mask)
    together = logits_of(model, ids, attention_mask=mask)
    assert torch.isfinite(pieces).all()
    for row in range(3):
        real = mask[row].bool()
        alone = logits_of(model, ids[row : row + 1, real])[0]
        close(pieces[row, real], alone)
        close(together[row, real], alone)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_equal_the_whole_while_training(causal_lm: Make, tokens: Make, kind: dict[str, Any]) -> None:
    rates = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    model, ids = causal_lm(**rates, **kind).train(), tokens(2, 90)
    whole = model.model(ids)
    memory, parts = None, []
    for start, stop in ((0, 3), (3, 40), (40, 41), (41, 90)):
        outputs = model.model(ids[:, start:stop], memory=memory)
        memory = outputs.memory
        parts.append(outputs.last_hidden_state)
    close(torch.cat(parts, dim=1), whole.last_hidden_state)
    assert memory.seen_B.tolist() == [90, 90]
    for ours, theirs in zip(memory.layers, whole.memory.layers, strict=True):
        for part, expected in zip(ours.memory or (), theirs.memory or (), strict=True):
            close(part, expected)
    model.eval()
    close(logits_of(model, ids), model.lm_head(whole.last_hidden_state).detach())


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_token_changes_nothing_before_it_bit_for_bit(
    causal_lm: Make, tokens: Make, kind: dict[str, Any]
) -> None:
    model, ids = causal_lm(**kind), tokens(2, 100)
    before = logits_of(model, ids)
    for position in (0, 1, 15, 16, 17, 48, 79, 99):
        changed = ids.clone()
        changed[:, position:] = (changed[:, position:] + 7) % 58 + 2
        after = logits_of(model, changed)
        assert torch.equal(before[:, :position], after[:, :position])
        assert not torch.equal(before[:, position], after[:, position])


@pytest.mark.parametrize("kind", KINDS)
def test_the_distant_past_is_read_through_the_memory_only(causal_lm: Make, tokens: Make, kind: dict[str, Any]) -> None:
    model, ids = causal_lm(**kind), tokens(1, 112)
    changed = ids.clone()
    changed[:, :3] = (changed[:, :3] + 7) % 58 + 2
    # Two layers of windows reach back two segments and two windows.
    moved = (logits_of(model, ids) - logits_of(model, changed))[:, 96:].abs().max()
    assert moved > 1e-4 if kind.get("memory_layers") != () else moved == 0


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_never_written_and_a_row_of_padding_harms_no_other(
    causal_lm: Make, tokens: Make, kind: dict[str, Any]
) -> None:
    model, ids = causal_lm(**kind), tokens(3, 70)
    mask = torch.ones_like(ids)
    mask[1] = 0
    caches = []
    for padding in (0, 9):
        cache = InfiniteFormerCache(model.config)
        logits = logits_of(model, ids.masked_fill(mask == 0, padding), attention_mask=mask, cache=cache)
        assert torch.isfinite(logits).all()
        close(logits[[0, 2]], logits_of(model, ids[[0, 2]]))
        caches.append(cache)
    assert caches[0].seen.tolist() == [70, 0, 70]
    for layer in caches[0].layers:
        if layer.state.memory is not None:
            assert layer.state.memory.segments_B[1] == 0
            assert not layer.state.memory.coefficients_BNE[1].any()
    # A document that begins after the padding is as one that begins at once.
    more = tokens(3, 40, seed=4)
    after = logits_of(model, more, cache=caches[0])
    close(after[1:2], logits_of(model, more[1:2]))
    close(after, logits_of(model, more, cache=caches[1]))


def test_padding_may_be_anything_in_embeddings(causal_lm: Make, tokens: Make) -> None:
    model, ids = causal_lm(), tokens(2, 50)
    mask = torch.ones_like(ids)
    mask[0, 5:9] = mask[1, 30:] = 0
    given = model.get_input_embeddings()(ids).detach()
    caches = InfiniteFormerCache(model.config), InfiniteFormerCache(model.config)
    poison = given.masked_fill(mask[..., None] == 0, torch.nan)
    for call in range(2):
        plain = logits_of(model, None, inputs_embeds=given, attention_mask=mask, cache=caches[0])
        poisoned = logits_of(model, None, inputs_embeds=poison, attention_mask=mask, cache=caches[1])
        assert torch.equal(poisoned[mask.bool()], plain[mask.bool()]), call


def test_an_input_of_nothing_but_padding_is_finite_and_leaves_the_state_alone(causal_lm: Make, tokens: Make) -> None:
    model, ids = causal_lm(), tokens(2, 50)
    cache = InfiniteFormerCache(model.config)
    first = logits_of(model, ids[:, :32], cache=cache)
    nothing = logits_of(model, ids[:, :20], attention_mask=torch.zeros(2, 20), cache=cache)
    assert torch.isfinite(nothing).all()
    close(torch.cat((first, logits_of(model, ids[:, 32:], cache=cache)), dim=1), logits_of(model, ids))


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_row_is_as_new_bit_for_bit(causal_lm: Make, tokens: Make, kind: dict[str, Any]) -> None:
    model, past, ids = causal_lm(**kind), tokens(2, 61), tokens(2, 40, seed=2)
    used, fresh = InfiniteFormerCache(model.config), InfiniteFormerCache(model.config)
    logits_of(model, past, cache=used)
    unread = torch.ones_like(past)
    unread[0] = 0
    logits_of(model, past, attention_mask=unread, cache=fresh)
    reset = torch.tensor([True, False])
    after_reset = logits_of(model, ids, cache=used, reset_memory=reset)
    never_used = logits_of(model, ids, cache=fresh, reset_memory=reset)
    assert torch.equal(after_reset[0], never_used[0])
    close(after_reset[0], logits_of(model, ids[:1])[0])
    close(after_reset[1], logits_of(model, torch.cat((past, ids), dim=1))[1, 61:])


def test_the_same_input_and_state_give_the_same_output(causal_lm: Make, tokens: Make) -> None:
    rates = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    model, ids = causal_lm(sticky_memories=True, **rates).train(), tokens(2, 60)
    memory = model.model(ids).memory
    first = model.model(ids, memory=memory).last_hidden_state
    assert torch.equal(first, model.model(ids, memory=memory).last_hidden_state)
    assert not torch.equal(first, model.model(ids).last_hidden_state)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_remembered_does_not_grow(causal_lm: Make, tokens: Make, kind: dict[str, Any], tmp_path: Any) -> None:
    model = causal_lm(**kind)
    cache, sizes = InfiniteFormerCache(model.config), []
    for _ in range(6):
        logits_of(model, tokens(1, 112), cache=cache)
        cache.save(tmp_path / "memory")
        sizes.append((tmp_path / "memory").stat().st_size)
    assert max(sizes) - min(sizes) < 8  # the header spells numbers out


@pytest.mark.parametrize("kind", KINDS)
def test_a_segment_costs_the_same_early_and_late(causal_lm: Make, tokens: Make, kind: dict[str, Any]) -> None:
    model, costs = causal_lm(**kind), []
    cache, length = InfiniteFormerCache(model.config), model.config.segment_length
    for _ in range(2):
        logits_of(model, tokens(1, 20 * length), cache=cache)
        with FlopCounterMode(display=False) as counter:
            logits_of(model, tokens(1, length), cache=cache)
        costs.append(counter.get_total_flops())
    assert costs[0] == costs[1] > 0


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_basis": 1, "basis_widths": (0.3,), "num_samples": 4},
        {"num_basis": 2},
        {"num_basis": 3, "basis_widths": (0.2, 0.3)},
        {"num_basis": 15, "num_samples": 31},
        {"segment_length": 1, "short_term_window": 0},
        {"segment_length": 1, "short_term_window": 3, "memory_decay": "uniform"},
        {"segment_length": 3, "short_term_window": 20, "sticky_memories": True},
    ],
)
def test_the_smallest_and_the_oddest_sizes_work(causal_lm: Make, tokens: Make, sizes: dict[str, Any]) -> None:
    model, ids = causal_lm(**sizes), tokens(2, 25)
    whole = logits_of(model, ids)
    assert torch.isfinite(whole).all()
    close(in_pieces(model, ids, [1, 2, 9, 1, 12]), whole)
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("bptt_segments", [1, 2, 3])
@pytest.mark.parametrize("read", range(6))
def test_gradients_reach_back_as_far_as_bptt_segments(
    causal_lm: Make, tokens: Make, bptt_segments: int, read: int
) -> None:
    model = causal_lm(bptt_segments=bptt_segments).train()
    embeddings = model.model.embed_tokens(tokens(2, 96)).detach().requires_grad_()
    out = model.model(inputs_embeds=embeddings).last_hidden_state
    out[:, 16 * read : 16 * (read + 1)].square().sum().backward()
    reached = [bool(part.any()) for part in embeddings.grad.split(16, dim=1)]
    first = read // bptt_segments * bptt_segments
    assert reached == [first <= segment <= read for segment in range(6)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bptt_segments", [1, 2])
def test_every_parameter_gets_a_gradient(
    causal_lm: Make, tokens: Make, kind: dict[str, Any], bptt_segments: int
) -> None:
    model = causal_lm(bptt_segments=bptt_segments, **kind).train()
    ids = tokens(2, 70)
    model(ids, labels=ids).loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without


def test_segments_trained_one_call_at_a_time_give_the_gate_its_gradient(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm(memory_gate="convolution").train()
    memory = None
    for step in range(3):
        model.zero_grad()
        ids = tokens(2, 16, seed=step)
        outputs = model(ids, labels=ids, memory=memory)
        outputs.loss.backward()
        memory = outputs.memory
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_memory_stays_float32_and_finite_under_autocast_over_many_writes(
    causal_lm: Make, tokens: Make, dtype: torch.dtype
) -> None:
    model = causal_lm(segment_length=4, num_hidden_layers=1, sticky_memories=True)
    cache = InfiniteFormerCache(model.config)
    ids = tokens(1, 4004)
    with torch.autocast("cpu", dtype=dtype):
        for piece in ids.split(1001, dim=1):
            assert torch.isfinite(logits_of(model, piece, cache=cache)).all()
    memory = cache.layers[0].state.memory
    assert memory.segments_B.item() == 1000
    assert memory.coefficients_BNE.dtype == torch.float32
    assert torch.isfinite(memory.coefficients_BNE).all()


def test_training_under_autocast_is_finite(causal_lm: Make, tokens: Make) -> None:
    model, ids = causal_lm(position_embedding_type="relative", memory_gate="convolution").train(), tokens(2, 70)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(ids, labels=ids)
    outputs.loss.backward()
    assert torch.isfinite(outputs.loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert outputs.memory.layers[0].memory.coefficients_BNE.dtype == torch.float32


def test_two_hundred_steps_under_autocast_stay_finite_and_learn(causal_lm: Make, tokens: Make) -> None:
    """Memory goes on from step to step, and densities may grow as narrow as the floor allows."""
    model = causal_lm(num_hidden_layers=1, segment_length=8, sticky_memories=True, memory_kl_weight=0.1).train()
    optimizer, memory, losses = torch.optim.Adam(model.parameters(), lr=1e-2), None, []
    ids = tokens(2, 24)
    for _ in range(200):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(ids, labels=ids, memory=memory)
        optimizer.zero_grad()
        outputs.loss.backward()
        optimizer.step()
        memory = outputs.memory
        losses.append(outputs.loss.item())
    assert torch.tensor(losses).isfinite().all()
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.isfinite().all() for p in model.parameters())
    assert memory.layers[0].memory.coefficients_BNE.isfinite().all()
    assert memory.seen_B.tolist() == [4800, 4800]


def test_copies_and_state_dicts_give_the_same_logits(causal_lm: Make, tokens: Make) -> None:
    model, ids = causal_lm(sticky_memories=True, memory_gate="convolution"), tokens(2, 70)
    other = causal_lm(seed=1, sticky_memories=True, memory_gate="convolution")
    other.load_state_dict(model.state_dict())
    for same in (copy.deepcopy(model), other):
        assert torch.equal(logits_of(same, ids), logits_of(model, ids))
        assert torch.equal(logits_of(same.double().float(), ids), logits_of(model, ids))


def test_a_half_precision_model_keeps_its_memory_in_float32(causal_lm: Make, tokens: Make) -> None:
    model, ids = causal_lm().to(torch.bfloat16), tokens(2, 70)
    cache = InfiniteFormerCache(model.config)
    assert torch.isfinite(logits_of(model, ids, cache=cache)).all()
    assert cache.layers[0].state.memory.coefficients_BNE.dtype == torch.float32


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("gate", [None, "convolution"])
def test_checkpointing_gives_the_same_gradients(
    causal_lm: Make, tokens: Make, use_reentrant: bool, gate: str | None
) -> None:
    gradients = []
    for checkpointing in (True, False):
        model = causal_lm(hidden_dropout_prob=0.2, memory_gate=gate).double().train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        torch.manual_seed(3)
        ids = tokens(2, 60)
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-9, rtol=1e-9)


def test_a_saved_model_gives_the_same_logits(causal_lm: Make, tokens: Make, tmp_path: Any) -> None:
    model, ids = causal_lm(memory_gate="convolution", position_embedding_type="relative"), tokens(2, 70)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits_of(model, ids), logits_of(loaded, ids))
    assert not list(model.buffers())
    assert isinstance(InfiniteFormerModel.from_pretrained(tmp_path), InfiniteFormerModel)
