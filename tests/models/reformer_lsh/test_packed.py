"""Documents packed in one row give what each gives alone, in value and in gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, DynamicCache

from hf_longmem import (
    ReformerLSHForMaskedLM,
    ReformerLSHForQuestionAnswering,
    ReformerLSHForSequenceClassification,
    ReformerLSHForTokenClassification,
)

Make = Callable[..., Any]
ROWS = ([1, 2, 63, 64, 65], [257], [5, 17, 17, 33])
FEW = ([1, 2, 33], [20, 17])
PADDINGS = ("none", "left", "right", "scattered")
KINDS: list[dict[str, Any]] = [
    {},
    {"position_embedding_type": "rotary", "round_merge": "sum", "reversible": False},
    {"position_embedding_type": "learned", "num_buckets": [4, 2]},
]
NO_DROPOUT = {
    "hidden_dropout_prob": 0.0,
    "lsh_attention_probs_dropout_prob": 0.0,
    "local_attention_probs_dropout_prob": 0.0,
}
CHUNKS = {"lsh_candidates": "chunk", "local_candidates": "chunk"}


def pack(tokens: Make, padding: str = "right", rows: tuple[list[int], ...] = ROWS) -> dict[str, Tensor]:
    """Rows of documents of these lengths, with ids that start anywhere, and padding of this kind."""
    totals = [sum(lengths) for lengths in rows]
    length = max(totals) + (0 if padding == "none" else 5)
    batch = {"input_ids": tokens(len(rows), length)}
    batch["document_ids"] = torch.full((len(rows), length), -9)
    batch["attention_mask"] = torch.zeros(len(rows), length, dtype=torch.long)
    for row, lengths in enumerate(rows):
        places = torch.arange(totals[row])
        if padding == "left":
            places += length - totals[row]
        elif padding == "scattered":
            places = torch.randperm(length, generator=torch.Generator().manual_seed(row))[: totals[row]].sort().values
        batch["document_ids"][row, places] = 2 + 3 * torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        batch["attention_mask"][row, places] = 1
    return batch


def each_document(batch: dict[str, Tensor]) -> list[tuple[int, Tensor]]:
    """The row and the places of every document."""
    found = []
    for row, ids in enumerate(batch["document_ids"]):
        real = batch["attention_mask"][row].bool()
        found += [(row, ((ids == document) & real).nonzero().squeeze(1)) for document in ids[real].unique()]
    return found


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.fixture
def masked_lm(tiny: Make) -> Make:
    def make(seed: int = 0, **overrides: Any) -> ReformerLSHForMaskedLM:
        torch.manual_seed(seed)
        both_ways = {"is_decoder": False, "lsh_num_chunks_after": 1, "local_num_chunks_after": 1}
        return ReformerLSHForMaskedLM(tiny(**(both_ways | overrides))).eval()

    return make


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", PADDINGS)
def test_packed_is_alone(
    causal_lm: Make, masked_lm: Make, tokens: Make, causal: bool, kind: dict[str, Any], padding: str
) -> None:
    model = (causal_lm if causal else masked_lm)(**kind).double()
    batch = pack(tokens, padding, {"right": ROWS, "none": ([33, 17, 1, 2],)}.get(padding, FEW))
    with torch.no_grad():
        packed = model(**batch, output_hidden_states=True)
        for row, places in each_document(batch):
            alone = model(batch["input_ids"][row, places][None], output_hidden_states=True)
            close(packed.logits[row, places], alone.logits[0], 1e-9)
            for packed_states, alone_states in zip(packed.hidden_states, alone.hidden_states, strict=True):
                close(packed_states[row, places], alone_states[0], 1e-9)


@pytest.mark.parametrize("reversible", [True, False])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_loss_and_gradients_are_those_of_the_documents(
    causal_lm: Make, tokens: Make, reversible: bool, padding: str
) -> None:
    model = causal_lm(reversible=reversible, **NO_DROPOUT).double().train()
    batch = pack(tokens, padding, ROWS if reversible and padding == "right" else FEW)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    packed = model(**batch, labels=labels, hash_seed=3).loss
    packed_grads = torch.autograd.grad(packed, list(model.parameters()))
    documents = each_document(batch)
    predicted = sum(len(places) - 1 for _, places in documents)
    loss = sum(
        model(ids, labels=ids, hash_seed=3, num_items_in_batch=predicted).loss
        for ids in (batch["input_ids"][row, places][None] for row, places in documents)
    )
    close(packed, loss, 1e-10)
    for packed_grad, grad in zip(packed_grads, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        close(packed_grad, grad, 1e-9)


def test_single_precision_is_alone_within_its_own(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm()
    batch = pack(tokens)
    with torch.no_grad():
        logits = model(**batch).logits
        for row, places in each_document(batch):
            close(logits[row, places], model(batch["input_ids"][row, places][None]).logits[0], 1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, CHUNKS, CHUNKS | {"round_merge": "sum"}])
def test_another_document_changes_no_bit_and_gets_no_gradient(
    causal_lm: Make, masked_lm: Make, tokens: Make, causal: bool, kind: dict[str, Any]
) -> None:
    model = (causal_lm if causal else masked_lm)(**kind)
    batch = pack(tokens, "right", ([40, 33, 50],))
    middle = slice(40, 73)
    embeddings = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    logits = []
    for change in (0.0, 1.0):
        changed = embeddings.clone()
        changed[:, middle] += change * torch.randn(changed[:, middle].shape, generator=torch.Generator().manual_seed(0))
        changed.requires_grad_()
        logits.append(model(inputs_embeds=changed, **batch).logits)
        (grad,) = torch.autograd.grad(logits[-1][:, middle].square().sum(), changed)
        assert grad[:, middle].any()
        assert not grad[:, :40].any()
        assert not grad[:, 73:].any()
    assert not torch.equal(logits[0][:, middle], logits[1][:, middle])
    assert torch.equal(logits[0][:, :40], logits[1][:, :40])
    assert torch.equal(logits[0][:, 73:123], logits[1][:, 73:123])


def test_one_document_a_row_is_no_documents_bit_for_bit(causal_lm: Make, tokens: Make) -> None:
    model, ids = causal_lm(), tokens(2, 100)
    with torch.no_grad():
        assert torch.equal(model(ids, document_ids=torch.full_like(ids, 4)).logits, model(ids).logits)


def test_documents_together_may_be_longer_than_the_positions(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm(max_position_embeddings=64).double()
    batch = pack(tokens, "right", ([64, 64, 30],))
    with torch.no_grad():
        logits = model(**batch).logits
        for row, places in each_document(batch):
            close(logits[row, places], model(batch["input_ids"][row, places][None]).logits[0], 1e-9)
        with pytest.raises(ValueError, match=r"position_ids must lie in 0 \.\. 63, got 64"):
            model(**pack(tokens, "right", ([65, 64],)))


def test_given_positions_are_kept(causal_lm: Make, tokens: Make) -> None:
    model, ids = causal_lm(), tokens(1, 40)
    documents = torch.arange(40)[None] // 20
    with torch.no_grad():
        default = model(ids, document_ids=documents).logits
        assert torch.equal(model(ids, document_ids=documents, position_ids=torch.arange(40)[None] % 20).logits, default)
        shifted = model(ids, document_ids=documents, position_ids=torch.arange(40)[None]).logits
        assert torch.equal(shifted[:, :20], default[:, :20])
        assert not torch.allclose(shifted[:, 20:], default[:, 20:], atol=1e-4)


def test_attentions_end_at_the_border(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm().double()
    batch = pack(tokens, "right", ([20, 30],))
    with torch.no_grad():
        outputs = model(**batch, output_attentions=True)
        close(outputs.logits[:, :50], model(**batch).logits[:, :50], 1e-9)
    for weights in outputs.attentions:
        assert not weights[..., 20:50, :20].any()
        assert not weights[..., :20, 20:].any()
        close(weights[..., :50, :50].sum(-1), torch.ones(1, 2, 50, dtype=torch.float64), 1e-9)


def test_checkpointed_layers_know_the_documents(causal_lm: Make, tokens: Make) -> None:
    batch = pack(tokens, "right", ([20, 30],))
    grads = []
    for checkpointing in (False, True):
        model = causal_lm(**NO_DROPOUT).double().train()
        if checkpointing:
            model.activation_checkpointing_enable()
        labels = batch["input_ids"]
        model(**batch, labels=labels, hash_seed=1).loss.backward()
        grads.append(model.model.embed_tokens.weight.grad)
    close(*grads, 1e-10)


def test_other_heads_take_documents_and_a_sequence_classifier_refuses_them(tiny: Make, tokens: Make) -> None:
    batch = pack(tokens, "left", ([20, 30],))
    for head in (ReformerLSHForTokenClassification, ReformerLSHForQuestionAnswering):
        torch.manual_seed(0)
        model = head(tiny(is_decoder=False)).double().eval()
        with torch.no_grad():
            packed = model(**batch)
            for row, places in each_document(batch):
                alone = model(batch["input_ids"][row, places][None])
                name = "logits" if "logits" in alone else "start_logits"
                close(packed[name][row, places], alone[name][0], 1e-9)
    with pytest.raises(ValueError, match="scores one document a row, got document_ids; leave document_ids out"):
        ReformerLSHForSequenceClassification(tiny())(**batch)


def test_a_cache_is_refused_and_none_is_made(causal_lm: Make, tokens: Make) -> None:
    model, batch = causal_lm(), pack(tokens, "right", ([20, 30],))
    with pytest.raises(ValueError, match="document_ids and cache exclude each other"):
        model(**batch, cache=DynamicCache(config=model.config))
    with torch.no_grad():
        assert model(**batch).cache is None
    assert model(**batch, use_cache=True).cache is None


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.zeros(1, 4, dtype=torch.long), r"document_ids must be \[1, 5\], as the input is, got shape \[1, 4\]"),
        (torch.zeros(5, dtype=torch.long), r"document_ids must be \[1, 5\]"),
        (torch.tensor([[0, 1, 1, 0, 0]]), "must not fall within a row, got 0 after 1"),
        (torch.zeros(1, 5), "must be integers"),
    ],
)
def test_documents_that_do_not_fit_are_refused(causal_lm: Make, tokens: Make, ids: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        causal_lm()(tokens(1, 5), document_ids=ids)


def test_the_flattening_collator_of_transformers_serves(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm().double()
    documents = [tokens(1, length, seed=length)[0].tolist() for length in (7, 30, 2)]
    batch = DataCollatorWithFlattening(return_seq_idx=True)([{"input_ids": ids} for ids in documents])
    with torch.no_grad():
        packed = model(**batch)
        alone = [model(torch.tensor([ids])).logits[0] for ids in documents]
        close(packed.logits[0], torch.cat(alone), 1e-9)
        labels = [torch.tensor([ids]) for ids in documents]
        loss = sum(model(ids, labels=ids, num_items_in_batch=36).loss for ids in labels)
    close(packed.loss, loss, 1e-9)


def test_packed_rows_compile(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm()
    batch = pack(tokens, "right", ([20, 30],))
    with torch.no_grad():
        expected = model(**batch).logits
        compiled = torch.compile(model, backend="eager")(**batch).logits
    close(compiled, expected, 1e-6)
