"""Metrics in the shape of the evaluate library: alone, in batches, and in Trainer."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import pytest
import torch
from transformers import ByT5Tokenizer, Trainer, TrainingArguments

from hf_longmem import (
    BitsPerByte,
    DataCollatorForStreams,
    DocumentStreams,
    InfiniteFormerConfig,
    InfiniteFormerForCausalLM,
    StreamPerplexity,
    streaming_perplexity,
    token_nll,
)

NLL = [[0.5, 1.5, -100.0], [2.0, 0.25, 4.0]]
IDS = [[7, 1, 9], [5, 8, -100]]


@pytest.fixture
def model() -> InfiniteFormerForCausalLM:
    torch.manual_seed(0)
    config = InfiniteFormerConfig(
        vocab_size=384,
        hidden_size=16,
        num_attention_heads=2,
        num_hidden_layers=1,
        segment_length=16,
        num_basis=16,
        basis_widths=(0.05, 0.1),
    )
    return InfiniteFormerForCausalLM(config).eval()


def test_sums_over_the_tokens_that_count() -> None:
    perplexity = StreamPerplexity().compute(predictions=NLL, references=IDS)
    assert perplexity == {
        "perplexity": pytest.approx(math.exp(4.25 / 4)),
        "mean_nll": pytest.approx(4.25 / 4),
        "num_tokens": 4,
    }
    bits = BitsPerByte().compute(predictions=NLL, references=IDS)
    assert bits == {"bits_per_byte": pytest.approx(4.25 / math.log(2) / 4), "num_bytes": 4}
    # Of ByT5's ids, 1 is the end of sequence, which is no text but was predicted.
    bits = BitsPerByte(ByT5Tokenizer()).compute(predictions=NLL, references=IDS)
    assert bits == {"bits_per_byte": pytest.approx(4.25 / math.log(2) / 3), "num_bytes": 3}


def test_batches_add_up_and_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    metric = StreamPerplexity(cache_dir=str(tmp_path))
    assert isinstance(metric, evaluate.Metric)
    for _ in range(2):
        metric.add_batch(predictions=np.array(NLL, np.float32), references=torch.tensor(IDS))
        metric.add_batch(predictions=[[1.0]], references=[[3]])
        metric.add(prediction=[2.0], reference=[4])
        assert metric.compute() == {
            "perplexity": pytest.approx(math.exp(7.25 / 6)),
            "mean_nll": 7.25 / 6,
            "num_tokens": 6,
        }
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_hopeless_model_has_an_infinite_perplexity() -> None:
    assert StreamPerplexity().compute(predictions=[[1e4]], references=[[1]])["perplexity"] == math.inf
    assert math.isnan(StreamPerplexity().compute(predictions=[[math.nan]], references=[[1]])["mean_nll"])


@pytest.mark.parametrize(
    ("metric", "predictions", "references", "message"),
    [
        (StreamPerplexity(), [[-100.0]], [[3]], "some token must have been predicted, got none"),
        (StreamPerplexity(), [[1.0, 2.0]], [[3]], "got 2 predictions for 1 references; use preprocess"),
        (BitsPerByte(ByT5Tokenizer()), [[1.0]], [[384]], "token ids must be below 384, the tokenizer's size, got 384"),
        (BitsPerByte(ByT5Tokenizer()), [[1.0]], [[1]], "must stand for some text, got special tokens only"),
    ],
)
def test_what_cannot_be_measured(metric: Any, predictions: Any, references: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric.compute(predictions=predictions, references=references)


def test_likelihoods_of_labels_shifted_or_not() -> None:
    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[3, 4, -100, 6, 7], [1, 2, 3, -100, -100]])
    expected = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    expected[labels == -100] = -100
    torch.testing.assert_close(token_nll(logits, labels), expected)
    torch.testing.assert_close(token_nll((logits.bfloat16(),), labels), expected, atol=2e-2, rtol=2e-2)
    unshifted = token_nll(logits[:, :-1], labels[:, 1:])
    assert torch.equal(token_nll(logits, labels, shifted=False)[:, 1:], unshifted)
    assert (token_nll(logits, labels, shifted=False)[:, 0] == -100).all()


@pytest.mark.parametrize("batch_size", [1, 2])
def test_in_trainer_they_are_those_of_the_documents(
    model: InfiniteFormerForCausalLM, tmp_path: Path, batch_size: int
) -> None:
    tokenizer = ByT5Tokenizer()
    texts = ["Grüße an alle. " * 9, "short", "a longer one " * 5]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    streams = DocumentStreams(ids, batch_size=batch_size, sequence_length=24)
    metrics = evaluate.combine([StreamPerplexity(), BitsPerByte(tokenizer)])
    trainer = Trainer(
        model,
        TrainingArguments(
            str(tmp_path), report_to="none", per_device_eval_batch_size=batch_size, label_names=["shift_labels"]
        ),
        data_collator=DataCollatorForStreams(),
        eval_dataset=streams,
        preprocess_logits_for_metrics=token_nll,
        compute_metrics=lambda p: metrics.compute(predictions=p.predictions, references=p.label_ids),
    )
    found = trainer.evaluate()
    expected = [streaming_perplexity(model, document, progress=False) for document in ids]
    tokens = sum(result.num_tokens for result in expected)
    nats = sum(result.mean_nll * result.num_tokens for result in expected)
    assert found["eval_num_tokens"] == tokens
    assert found["eval_mean_nll"] == pytest.approx(nats / tokens, rel=1e-5)
    # All bytes but the first of each document are predicted, and so are the ends.
    num_bytes = sum(len(text.encode()) - 1 for text in texts)
    assert found["eval_num_bytes"] == num_bytes
    assert found["eval_bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)


def test_in_trainer_with_ordinary_labels(model: InfiniteFormerForCausalLM, tmp_path: Path) -> None:
    ids = torch.randint(3, 250, (3, 20), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]
    metric = StreamPerplexity()
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path), report_to="none", per_device_eval_batch_size=2),
        eval_dataset=data,
        preprocess_logits_for_metrics=functools.partial(token_nll, shifted=False),
        compute_metrics=lambda p: metric.compute(predictions=p.predictions, references=p.label_ids),
    )
    found = trainer.evaluate()
    expected = [streaming_perplexity(model, row, progress=False).mean_nll for row in ids]
    assert found["eval_num_tokens"] == 3 * 19
    assert found["eval_mean_nll"] == pytest.approx(sum(expected) / 3, rel=1e-5)
