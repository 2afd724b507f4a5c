"""Losses, the regulariser's share in them, and the classification heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from hf_longmem.models.infinite_former.modeling_infinite_former import add_memory_loss
from hf_longmem.models.infinite_former.modeling_infinite_former_heads import (
    InfiniteFormerForSequenceClassification,
    InfiniteFormerForTokenClassification,
)

Make = Callable[..., Any]
NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


@pytest.mark.parametrize("chunk_size", [0, 7, 1024])
def test_the_loss_is_cross_entropy_and_the_weighted_regulariser(causal_lm: Make, tokens: Make, chunk_size: int) -> None:
    model = causal_lm(chunk_size_lm_head=chunk_size, memory_kl_weight=0.01, **NO_DROPOUT).double().train()
    ids = tokens(2, 60)
    labels = ids.clone()
    labels[0, 10:20] = -100
    outputs = model(ids, labels=labels)
    assert outputs.logits is None
    logits = model.eval()(ids).logits
    total = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    counted = (labels[:, 1:] != -100).sum()
    assert outputs.memory_loss > 0
    torch.testing.assert_close(outputs.loss, total / counted + 0.01 * outputs.memory_loss)
    torch.testing.assert_close(model(ids, labels=labels).loss, total / counted)
    shared = model.train()(ids, labels=labels, num_items_in_batch=torch.tensor(500)).loss
    torch.testing.assert_close(shared, total / 500 + 0.01 * outputs.memory_loss * counted / 500)


def test_accumulated_gradients_are_those_of_the_means_over_all_items(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm(memory_kl_weight=0.01, **NO_DROPOUT).double().train()
    batches = [tokens(2, 40, seed=seed) for seed in range(3)]
    items = sum(ids[:, 1:].numel() for ids in batches)
    for ids in batches:
        model(ids, labels=ids, num_items_in_batch=items).loss.backward()
    accumulated = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (sum(model(ids, labels=ids).loss for ids in batches) / 3).backward()
    for ours, expected in zip(accumulated, model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected.grad)


def test_a_mask_may_reach_back_before_the_input(tiny: Make, tokens: Make) -> None:
    torch.manual_seed(0)
    model = InfiniteFormerForSequenceClassification(tiny(num_labels=3, **NO_DROPOUT)).train()
    ids, mask, labels = tokens(2, 40), torch.ones(2, 40, dtype=torch.long), torch.tensor([0, 2])
    mask[0, :9] = 0
    exact = model(ids, attention_mask=mask, labels=labels).loss
    longer = torch.cat((torch.ones_like(mask[:, :5]), mask), dim=1)
    assert torch.equal(model(ids, attention_mask=longer, labels=labels).loss, exact)


def test_a_batch_without_labels_adds_nothing_to_a_sum_over_items(tiny: Make) -> None:
    nothing, loss = torch.full((2, 5), -100), torch.tensor(1.5)
    for num_items in (0, 7, torch.tensor(0)):
        assert add_memory_loss(loss, torch.tensor(3.0), tiny(memory_kl_weight=1.0), nothing, num_items) == loss


def test_the_regulariser_does_not_depend_on_padding_and_is_none_without_memories(causal_lm: Make, tokens: Make) -> None:
    model, ids = causal_lm(**NO_DROPOUT).double(), tokens(2, 60)
    mask = torch.ones(2, 75)
    mask[:, 30:45] = 0
    padded = torch.zeros(2, 75, dtype=torch.long)
    padded[mask.bool()] = ids.flatten()
    plain = model.model(ids).memory_loss
    found = model.model(padded, attention_mask=mask).memory_loss
    torch.testing.assert_close(found[mask.bool()], plain.flatten())
    assert not found[~mask.bool()].any()
    assert causal_lm(memory_layers=()).model(ids).memory_loss is None
    assert not causal_lm().model(ids[:, :16]).memory_loss.any()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_document_is_classified_by_its_real_tokens(tiny: Make, tokens: Make, pooling: str) -> None:
    torch.manual_seed(0)
    model = InfiniteFormerForSequenceClassification(tiny(num_labels=3, classifier_pooling=pooling)).eval()
    ids = tokens(2, 50)
    mask = torch.ones_like(ids)
    mask[0, :12] = 0
    with torch.no_grad():
        together = model(ids, attention_mask=mask, labels=torch.tensor([0, 2]))
        alone = model(ids[:1, 12:]).logits
    torch.testing.assert_close(together.logits[:1], alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together.loss, cross_entropy(together.logits, torch.tensor([0, 2])))


@pytest.mark.parametrize(
    ("num_labels", "labels"),
    [(1, torch.rand(2)), (3, torch.tensor([0, 2])), (3, torch.tensor([[0.0, 1, 1], [1, 0, 0]]))],
)
def test_every_kind_of_label_trains_every_parameter(tiny: Make, tokens: Make, num_labels: int, labels: Any) -> None:
    torch.manual_seed(0)
    model = InfiniteFormerForSequenceClassification(tiny(num_labels=num_labels)).train()
    before = model.config.to_dict()
    model(tokens(2, 70), labels=labels).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    assert model.config.to_dict() == before


def test_every_token_is_classified(tiny: Make, tokens: Make) -> None:
    torch.manual_seed(0)
    model = InfiniteFormerForTokenClassification(tiny(num_labels=5)).eval()
    ids, labels = tokens(2, 50), tokens(2, 50, seed=2) % 5
    labels[:, 20:30] = -100
    outputs = model(ids, labels=labels)
    torch.testing.assert_close(outputs.loss, cross_entropy(outputs.logits.flatten(0, 1), labels.flatten()))


def test_hidden_states_are_those_of_the_embeddings_and_of_each_layer(causal_lm: Make, tokens: Make) -> None:
    model, ids = causal_lm(), tokens(2, 50)
    outputs = model.model(ids, output_hidden_states=True)
    assert len(outputs.hidden_states) == 3
    assert torch.equal(outputs.hidden_states[0], model.model.embed_tokens(ids))
    assert torch.equal(outputs.hidden_states[-1], outputs.last_hidden_state)
    mask = torch.ones(2, 50)
    mask[0, :9] = 0
    alone = model.model(ids[:1, 9:], output_hidden_states=True)
    for ours, expected in zip(
        model.model(ids, attention_mask=mask, output_hidden_states=True).hidden_states, alone.hidden_states, strict=True
    ):
        torch.testing.assert_close(ours[:1, 9:], expected, atol=1e-5, rtol=1e-5)
