"""Every parameter has a gradient in every call, and checkpointing changes none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_longmem.models.infinite_former.modeling_infinite_former_heads import (
    InfiniteFormerForSequenceClassification,
    InfiniteFormerForTokenClassification,
)

Make = Callable[..., Any]
SETTINGS: list[dict[str, Any]] = [
    dict(zip(("memory_gate", "sticky_memories", "memory_decay", "position_embedding_type"), values, strict=True))
    for values in itertools.product((None, "convolution"), (False, True), (0.75, "uniform"), ("rotary", "relative"))
] + [
    {"memory_gate": "convolution", "memory_layers": (1,), "memory_kl_weight": 0.0},
    {"memory_gate": "convolution", "memory_zero_init": True, "bptt_segments": 3},
    {"memory_gate": "convolution", "tie_word_embeddings": True, "sticky_draw": "multinomial", "sticky_memories": True},
    {"memory_layers": ()},
]


def without_gradient(model: torch.nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.grad is None]


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("length", [1, 16, 17])
def test_a_call_of_any_length_gives_every_parameter_a_gradient(
    causal_lm: Make, tokens: Make, options: dict[str, Any], length: int
) -> None:
    """Data-parallel training with ``find_unused_parameters=False`` would wait for one that gets none."""
    model, ids = causal_lm(**options).train(), tokens(2, length)
    model(ids, labels=ids).loss.backward()
    assert not without_gradient(model)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("length", [5, 40])
def test_nothing_to_learn_gives_gradients_too(causal_lm: Make, tokens: Make, length: int) -> None:
    model, ids = causal_lm(memory_gate="convolution", memory_kl_weight=0).train(), tokens(2, length)
    model(ids, labels=torch.full_like(ids, -100)).loss.backward()
    assert not without_gradient(model)
    assert not any(p.grad.any() for p in model.parameters())


def test_every_head_gives_every_parameter_a_gradient(tiny: Make, tokens: Make) -> None:
    ids = tokens(2, 9)
    for head, labels in (
        (InfiniteFormerForSequenceClassification, torch.tensor([0, 1])),
        (InfiniteFormerForTokenClassification, ids % 2),
    ):
        model = head(tiny(memory_gate="convolution")).train()
        model(ids, labels=labels).loss.backward()
        assert not without_gradient(model)


def test_a_call_without_padding_gives_the_gradients_of_one_with_it(causal_lm: Make, tokens: Make) -> None:
    rates = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    model, ids = causal_lm(memory_gate="convolution", sticky_memories=True, **rates).double().train(), tokens(2, 40)
    labels = ids.clone()
    labels[:, 0] = -100  # which padding on the left would otherwise be asked to predict
    padded = torch.nn.functional.pad(ids, (7, 5))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (7, 5))
    gradients = []
    for given in (
        {"input_ids": ids, "labels": labels},
        {"input_ids": padded, "labels": torch.nn.functional.pad(labels, (7, 5), value=-100), "attention_mask": mask},
    ):
        model.zero_grad()
        model(**given).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("bptt_segments", [2, 3])
def test_checkpointing_keeps_the_gradients_through_what_is_remembered(
    causal_lm: Make, tokens: Make, bptt_segments: int
) -> None:
    gradients = []
    for checkpointing in (True, False):
        model = causal_lm(bptt_segments=bptt_segments, hidden_dropout_prob=0.2).double().train()
        if checkpointing:
            model.activation_checkpointing_enable()
        torch.manual_seed(3)
        ids = tokens(2, 60)
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-9, rtol=1e-9)


def test_reentrant_checkpointing_is_refused_where_it_would_cut_gradients(causal_lm: Make, tokens: Make) -> None:
    model, ids = causal_lm(bptt_segments=2).train(), tokens(2, 20)
    model.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match=r'bptt_segments above 1 needs gradients .* pass \{"use_reentrant": False\}'):
        model(ids, labels=ids)
    # With one segment there is nothing to cut, and without gradients nothing is checkpointed.
    model(ids[:, :16], labels=ids[:, :16]).loss.backward()
    with torch.no_grad():
        assert torch.isfinite(model(ids, labels=ids).loss)


def test_frozen_layers_are_not_taken_for_cut_ones(causal_lm: Make, tokens: Make) -> None:
    model, ids = causal_lm(bptt_segments=2).train(), tokens(2, 40)
    model.requires_grad_(False)
    model.model.layers[1].long_term_memory.o_proj.requires_grad_()
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[1].long_term_memory.o_proj.weight.grad.any()
