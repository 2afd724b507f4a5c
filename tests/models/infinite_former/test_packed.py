"""Documents packed in one row give what each gives alone; no memory goes from one to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_longmem import InfiniteFormerForSequenceClassification, InfiniteFormerForTokenClassification
from hf_longmem.models.documents import next_token_labels
from hf_longmem.models.infinite_cache import InfiniteFormerCache
from hf_longmem.models.stream_memory import StreamMemory

Make = Callable[..., Any]
ROWS = ([1, 2, 63, 64, 65], [257], [5, 17, 17, 33])
FEW = ([1, 2, 33], [20, 17])
PADDINGS = ("none", "left", "right", "scattered")
KINDS: list[dict[str, Any]] = [
    {},
    {"sticky_memories": True, "memory_decay": "uniform"},
    {"memory_layers": (), "position_embedding_type": "relative"},
]
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", PADDINGS)
def test_packed_is_alone(causal_lm: Make, tokens: Make, kind: dict[str, Any], padding: str) -> None:
    model = causal_lm(**kind).double()
    batch = pack(tokens, padding, {"right": ROWS, "none": ([33, 17, 1, 2],)}.get(padding, FEW))
    with torch.no_grad():
        packed = model(**batch, output_hidden_states=True)
        embedded = model(
            inputs_embeds=model.get_input_embeddings()(batch["input_ids"]),
            attention_mask=batch["attention_mask"],
            document_ids=batch["document_ids"],
        )
        assert packed.cache is None
        assert torch.equal(packed.logits, embedded.logits)
        assert packed.hidden_states[-1] is not None
        for row, places in each_document(batch):
            alone = model(batch["input_ids"][row, places][None], output_hidden_states=True)
            close(packed.logits[row, places], alone.logits[0], 1e-9)
            for packed_states, alone_states in zip(packed.hidden_states, alone.hidden_states, strict=True):
                close(packed_states[row, places], alone_states[0], 1e-9)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("bptt_segments", [1, 3])
def test_loss_regulariser_and_gradients_are_those_of_the_documents(
    causal_lm: Make, tokens: Make, kind: dict[str, Any], bptt_segments: int
) -> None:
    model = causal_lm(**kind, **NO_DROPOUT, bptt_segments=bptt_segments, memory_kl_weight=0.1).double().train()
    batch = pack(tokens, "right", ROWS if bptt_segments == 1 and not kind else FEW)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    documents = each_document(batch)
    predicted = sum(len(places) - 1 for _, places in documents)
    packed = model(**batch, labels=labels, num_items_in_batch=predicted)
    assert packed.memory is None
    packed_grads = torch.autograd.grad(packed.loss, list(model.parameters()), allow_unused=True)
    loss = sum(
        model(ids, labels=ids, num_items_in_batch=predicted).loss
        for ids in (batch["input_ids"][row, places][None] for row, places in documents)
    )
    close(packed.loss, loss, 1e-9)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    for packed_grad, grad in zip(packed_grads, grads, strict=True):
        close(packed_grad, grad, 1e-8)


def test_another_document_changes_no_bit_and_gets_no_gradient(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm()
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


def test_many_short_documents_beside_a_long_one_are_padded_to_their_own_lengths(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm()
    batch = pack(tokens, "none", ([300, *[3] * 40],))
    computed: list[int] = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: computed.append(args[0][..., 0].numel()))
    with torch.no_grad():
        logits = model(**batch).logits
        assert sum(computed) <= 2 * 420
        for row, places in each_document(batch)[::20]:
            close(logits[row, places], model(batch["input_ids"][row, places][None]).logits[0], 1e-5)


def test_rows_of_padding_and_empty_masks_are_finite(causal_lm: Make, tokens: Make) -> None:
    model, ids = causal_lm(), tokens(2, 20)
    documents = torch.arange(20).expand(2, 20) // 7
    for mask in (torch.zeros(2, 20), torch.stack((torch.zeros(20), torch.ones(20)))):
        assert torch.isfinite(model(ids, attention_mask=mask, document_ids=documents).logits).all()


def test_the_token_classifier_takes_documents_and_the_sequence_classifier_refuses_them(
    tiny: Make, tokens: Make
) -> None:
    batch = pack(tokens, "left", ([20, 30],))
    torch.manual_seed(0)
    model = InfiniteFormerForTokenClassification(tiny()).double().eval()
    with torch.no_grad():
        packed = model(**batch).logits
        for row, places in each_document(batch):
            close(packed[row, places], model(batch["input_ids"][row, places][None]).logits[0], 1e-9)
    with pytest.raises(ValueError, match="scores one document a row, got document_ids; leave document_ids out"):
        InfiniteFormerForSequenceClassification(tiny())(**batch)


def test_what_goes_on_from_earlier_excludes_documents(causal_lm: Make, tokens: Make) -> None:
    model, batch = causal_lm(), pack(tokens, "right", ([20, 30],))
    given: list[dict[str, Any]] = [
        {"cache": InfiniteFormerCache(model.config)},
        {"memory": model.model.empty_memory(1)},
        {"memory": StreamMemory()},
        {"reset_memory": torch.tensor([True])},
    ]
    for past in given:
        (name,) = past
        with pytest.raises(
            ValueError, match=f"document_ids and {name} exclude each other, got both; .*DocumentStreams"
        ):
            model(**batch, **past)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.zeros(1, 4, dtype=torch.long), r"document_ids must be \[1, 5\], as the input is, got shape \[1, 4\]"),
        (torch.tensor([[0, 1, 1, 0, 0]]), "must not fall within a row, got 0 after 1"),
        (torch.zeros(1, 5), "must be integers"),
    ],
)
def test_documents_that_do_not_fit_are_refused(causal_lm: Make, tokens: Make, ids: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        causal_lm()(tokens(1, 5), document_ids=ids)


def test_a_tuple_is_given_where_one_is_asked_for(causal_lm: Make, tokens: Make) -> None:
    model, batch = causal_lm(), pack(tokens, "right", ([20, 30],))
    with torch.no_grad():
        loss, logits, *_ = model(**batch, labels=batch["input_ids"], return_dict=False)
        assert torch.equal(logits, model(**batch).logits)
        assert torch.equal(model.model(**batch, return_dict=False)[0], model.model(**batch).last_hidden_state)
    assert torch.isfinite(loss)


def test_the_last_token_of_a_document_predicts_nothing() -> None:
    labels, documents = torch.tensor([[5, 6, 7, 8, -100, 9]]), torch.tensor([[1, 1, 2, 2, 2, 2]])
    assert next_token_labels(labels).tolist() == [[6, 7, 8, -100, 9, -100]]
    assert next_token_labels(labels, documents).tolist() == [[6, -100, 8, -100, 9, -100]]


def test_positions_of_another_shape_are_refused_in_packed_rows_too(causal_lm: Make, tokens: Make) -> None:
    batch = pack(tokens, "right", ([20, 30],))
    with pytest.raises(ValueError, match=r"position_ids must be \[1, 55\] or \[1, 55\], as the input is"):
        causal_lm()(**batch, position_ids=torch.arange(7)[None])
