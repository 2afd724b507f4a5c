"""What a whole model promises: causality, independence of batch and padding, exact gradients, reproducibility."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import set_seed

from hf_longmem import ReformerLSHModel

LENGTHS = (1, 2, 63, 64, 65, 257, 1000)
KINDS: list[dict[str, Any]] = [
    {},
    {"position_embedding_type": "rotary", "round_merge": "sum", "stream_merge": "concat"},
    {"position_embedding_type": "learned", "num_buckets": [4, 2], "local_candidates": "chunk"},
]
Make = Callable[..., Any]


def logits_of(model: torch.nn.Module, ids: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **kwargs).logits


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_runs_and_gives_finite_logits_and_gradients(
    causal_lm: Make, tokens: Make, kind: dict[str, Any], length: int
) -> None:
    model = causal_lm(**kind).train()
    ids = tokens(2, length)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert logits_of(model.eval(), ids).shape == (2, length, 60)


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_token_changes_nothing_before_it_bit_for_bit(
    causal_lm: Make, tokens: Make, kind: dict[str, Any]
) -> None:
    model = causal_lm(**kind)
    ids = tokens(2, 257)
    before = logits_of(model, ids)
    for position in (0, 1, 63, 64, 200, 256):
        changed = ids.clone()
        changed[:, position:] = (changed[:, position:] + 7) % 58 + 2
        after = logits_of(model, changed)
        assert torch.equal(before[:, :position], after[:, :position])
        assert not torch.equal(before[:, position], after[:, position])


@pytest.mark.parametrize("window", [{"lsh_num_chunks_before": 3}, {"lsh_attn_chunk_length": 256}])
def test_wider_windows_change_no_earlier_bit_either(causal_lm: Make, tokens: Make, window: dict[str, Any]) -> None:
    model = causal_lm(**({"lsh_attn_chunk_length": 64, "num_buckets": 2} | window))
    ids, changed = tokens(1, 1000), tokens(1, 1000, seed=7)
    changed[:, :900] = ids[:, :900]
    assert torch.equal(logits_of(model, ids)[:, :900], logits_of(model, changed)[:, :900])


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_gives_what_the_whole_gives(causal_lm: Make, tokens: Make, kind: dict[str, Any]) -> None:
    model = causal_lm(**kind)
    ids = tokens(1, 257)
    whole = logits_of(model, ids)
    for length in LENGTHS[:-1]:
        close(logits_of(model, ids[:, :length]), whole[:, :length])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["left", "right", "both ends", "scattered"])
def test_rows_do_not_depend_on_batch_or_padding(
    causal_lm: Make, tokens: Make, kind: dict[str, Any], where: str
) -> None:
    model = causal_lm(**kind)
    lengths, width = (1, 40, 101), 130
    rows = tokens(3, width)
    batch = torch.full((3, width), 1)
    mask = torch.zeros(3, width, dtype=torch.long)
    for row, length in enumerate(lengths):
        slots = {
            "left": torch.arange(width - length, width),
            "right": torch.arange(length),
            "both ends": torch.arange(9, 9 + length),
            "scattered": torch.randperm(width, generator=torch.Generator().manual_seed(row))[:length].sort().values,
        }[where]
        batch[row, slots] = rows[row, :length]
        mask[row, slots] = 1
    together = logits_of(model, batch, attention_mask=mask)
    other_padding = logits_of(model, torch.where(mask.bool(), batch, 5), attention_mask=mask)
    for row, length in enumerate(lengths):
        alone = logits_of(model, rows[row : row + 1, :length])
        close(together[row, mask[row].bool()], alone[0])
        close(other_padding[row, mask[row].bool()], alone[0])


def test_bidirectional_rows_do_not_depend_on_padding(tiny: Make, tokens: Make) -> None:
    torch.manual_seed(0)
    model = ReformerLSHModel(tiny(is_decoder=False)).eval()
    ids = tokens(2, 90)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    with torch.no_grad():
        together = model(ids, attention_mask=mask).last_hidden_state
        alone = model(ids[:1, 30:]).last_hidden_state
    close(together[0, 30:], alone[0])


def test_a_row_of_padding_is_finite_and_harms_no_other(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm().train()
    ids = tokens(3, 70)
    mask = torch.ones_like(ids)
    mask[1] = 0
    labels = ids.masked_fill(mask == 0, -100)
    outputs = model(ids, attention_mask=mask, labels=labels)
    outputs.loss.backward()
    assert torch.isfinite(outputs.loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    model.eval()
    logits = logits_of(model, ids, attention_mask=mask)
    assert torch.isfinite(logits).all()
    close(logits[[0, 2]], logits_of(model, ids[[0, 2]]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [False, True])
def test_reversible_gradients_equal_plain_autograd_with_dropout(
    causal_lm: Make, tokens: Make, kind: dict[str, Any], padded: bool
) -> None:
    ids = tokens(2, 100)
    mask = torch.ones_like(ids)
    mask[0, :20] = 1 - int(padded)
    gradients = []
    for reversible in (True, False):
        rates = {"hidden_dropout_prob": 0.2, "lsh_attention_probs_dropout_prob": 0.1}
        model = causal_lm(reversible=reversible, **rates, **kind).double().train()
        torch.manual_seed(3)
        loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in model.parameters())])
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(causal_lm: Make, tokens: Make, use_reentrant: bool) -> None:
    ids = tokens(2, 100)
    gradients = []
    for checkpointing in (True, False):
        model = causal_lm(hidden_dropout_prob=0.2).double().train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        torch.manual_seed(3)
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_layer_runs_twice_in_a_training_step(causal_lm: Make, tokens: Make, checkpointing: bool) -> None:
    model = causal_lm().train()
    if checkpointing:
        model.activation_checkpointing_enable()
    runs: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: runs.append(index))
    ids = tokens(2, 40)
    model(ids, labels=ids).loss.backward()
    assert runs == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize("chunk_size", [0, 1, 7, 50])
def test_the_chunked_loss_equals_cross_entropy_of_the_logits(causal_lm: Make, tokens: Make, chunk_size: int) -> None:
    model = (
        causal_lm(chunk_size_lm_head=chunk_size, hidden_dropout_prob=0, local_attention_probs_dropout_prob=0)
        .double()
        .train()
    )
    ids = tokens(2, 33)
    labels = ids.clone()
    labels[0, 10:20] = -100
    outputs = model(ids, labels=labels, hash_seed=0)
    assert outputs.logits is None
    model.eval()
    logits = logits_of(model, ids)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    counted = (labels[:, 1:] != -100).sum()
    close(outputs.loss.detach(), expected / counted, 1e-12)
    close(model(ids, labels=labels).loss.detach(), expected / counted, 1e-12)
    close(model(ids, labels=labels, num_items_in_batch=torch.tensor(7)).loss.detach(), expected / 7, 1e-12)


def test_the_feed_forward_chunk_size_changes_no_number(causal_lm: Make, tokens: Make) -> None:
    ids = tokens(2, 65)
    close(logits_of(causal_lm(), ids), logits_of(causal_lm(chunk_size_feed_forward=16), ids), 1e-6)


def test_evaluation_is_deterministic_and_leaves_the_generator_alone(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm(hidden_dropout_prob=0.5, lsh_attention_probs_dropout_prob=0.5)
    ids = tokens(2, 100)
    torch.manual_seed(5)
    first = logits_of(model, ids)
    state = torch.get_rng_state()
    torch.manual_seed(6)
    assert torch.equal(first, logits_of(model, ids))
    torch.manual_seed(5)
    assert torch.equal(state, torch.get_rng_state())


def test_training_draws_fresh_rotations_and_a_seed_fixes_them(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm(hidden_dropout_prob=0, local_attention_probs_dropout_prob=0).train()
    ids = tokens(2, 300)
    torch.manual_seed(0)
    fresh = [model.model(ids).last_hidden_state for _ in range(3)]
    fixed = [model.model(ids, hash_seed=9).last_hidden_state for _ in range(2)]
    for first, second in itertools.combinations(fresh, 2):
        assert not torch.equal(first, second)
    assert torch.equal(*fixed)
    close(model.eval().model(ids, hash_seed=9).last_hidden_state, fixed[0])
    close(model.train().model(ids, hash_seed=0).last_hidden_state, model.eval().model(ids).last_hidden_state)


def test_the_same_seed_gives_the_same_losses(causal_lm: Make, tokens: Make) -> None:
    ids = tokens(2, 100)

    def train() -> list[float]:
        set_seed(11)
        model = causal_lm(seed=11).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert train() == train()


def test_forward_and_backward_leave_the_config_alone(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm().train()
    before = copy.deepcopy(model.config.to_dict())
    for length in (5, 300):
        ids = tokens(2, length)
        model(ids, labels=ids, num_hashes=3, output_attentions=True, output_hidden_states=True).loss.backward()
    assert model.config.to_dict() == before
