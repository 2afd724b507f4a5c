"""What each token is to predict does not depend on where padding stands."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_longmem import (
    InfiniteFormerConfig,
    InfiniteFormerForCausalLM,
    InfiniteFormerForSequenceClassification,
    ReformerLSHConfig,
    ReformerLSHForCausalLM,
    ReformerLSHForSequenceClassification,
)
from hf_longmem.models.documents import next_token_labels

SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "hidden_dropout_prob": 0.0}
REFORMER = {"attn_layers": ("local", "lsh"), "num_buckets": 2, "max_position_embeddings": 64}
INFINITE = {"num_hidden_layers": 1, "segment_length": 8, "num_basis": 16, "basis_widths": (0.05,)}


def reformer() -> Any:
    torch.manual_seed(0)
    return ReformerLSHForCausalLM(ReformerLSHConfig(**SIZES, **REFORMER)).eval()


def infinite_former() -> Any:
    torch.manual_seed(0)
    return InfiniteFormerForCausalLM(InfiniteFormerConfig(**SIZES, **INFINITE)).eval()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.lists(st.integers(0, 2), min_size=12, max_size=12))
def test_each_real_token_predicts_the_next_real_one(real: list[bool], borders: list[int]) -> None:
    labels = torch.arange(10, 10 + len(real))[None]
    documents = torch.tensor(borders[: len(real)]).clamp(max=1).cumsum(0)[None]
    mask = torch.tensor([real]).long()
    places = [place for place, is_real in enumerate(real) if is_real]
    expected = torch.full_like(labels, -100)
    for here, after in itertools.pairwise(places):
        if documents[0, here] == documents[0, after]:
            expected[0, here] = labels[0, after]
    assert torch.equal(next_token_labels(labels, documents, mask), expected)


@pytest.mark.parametrize("make", [reformer, infinite_former])
@pytest.mark.parametrize("where", ["left", "right", "inside"])
def test_the_loss_of_a_text_does_not_depend_on_its_padding(make: Any, where: str) -> None:
    model, text = make(), torch.randint(2, 40, (1, 20), generator=torch.Generator().manual_seed(1))
    alone = model(text, labels=text).loss
    every = torch.arange(27)
    place = {"left": every[7:], "right": every[:20], "inside": every[every % 4 > 0][:20]}
    ids, mask = torch.zeros(1, 27, dtype=torch.long), torch.zeros(1, 27, dtype=torch.long)
    ids[:, place[where]], mask[:, place[where]] = text, 1
    for hidden in (ids, ids.masked_fill(mask == 0, -100)):
        torch.testing.assert_close(model(ids, attention_mask=mask, labels=hidden).loss, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [reformer, infinite_former])
def test_both_names_of_document_ids_mean_the_same(make: Any) -> None:
    model, ids = make(), torch.randint(2, 40, (1, 20), generator=torch.Generator().manual_seed(1))
    documents: Tensor = (torch.arange(20)[None] >= 9).long()
    named, alias = (model(ids, labels=ids, use_cache=True, **{name: documents}) for name in ("document_ids", "seq_idx"))
    assert torch.equal(named.loss, alias.loss)
    assert named.cache is alias.cache is None
    assert not torch.equal(named.loss, model(ids, labels=ids).loss)


@pytest.mark.parametrize(
    ("head", "config"),
    [
        (ReformerLSHForSequenceClassification, ReformerLSHConfig(**SIZES, **REFORMER)),
        (InfiniteFormerForSequenceClassification, InfiniteFormerConfig(**SIZES, **INFINITE)),
    ],
)
@pytest.mark.parametrize("name", ["document_ids", "seq_idx"])
def test_a_sequence_classifier_refuses_documents_by_either_name(head: Any, config: Any, name: str) -> None:
    with pytest.raises(ValueError, match="scores one document a row"):
        head(config)(torch.arange(2, 12)[None], **{name: torch.zeros(1, 10, dtype=torch.long)})
