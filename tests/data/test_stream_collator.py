"""Batches of document streams: labels across pieces, memory from batch to batch, and batches in the wrong order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler
from transformers import Trainer, TrainingArguments

from hf_longmem import (
    DataCollatorForStreams,
    DocumentStreams,
    InfiniteFormerConfig,
    InfiniteFormerForCausalLM,
    ReformerLSHConfig,
    ReformerLSHForCausalLM,
    streaming_perplexity,
)

LENGTHS = (100, 3, 65, 1, 30, 24, 25, 130)


def documents(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 60, (length,), generator=generator) for length in lengths]


def tiny_model(hidden_size: int = 16) -> InfiniteFormerForCausalLM:
    torch.manual_seed(0)
    return InfiniteFormerForCausalLM(
        InfiniteFormerConfig(
            vocab_size=60,
            hidden_size=hidden_size,
            num_attention_heads=2,
            num_hidden_layers=2,
            segment_length=16,
            num_basis=16,
            basis_widths=(0.05, 0.1),
            initializer_range=0.15,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def loader(streams: DocumentStreams, batch_size: int = 2, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(streams, batch_size=batch_size, collate_fn=DataCollatorForStreams(), **arguments)


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Trainer]:
    """Make a Trainer of the tiny model on document streams; keyword arguments override its settings."""

    def make(streams: Any, *, model: Any = None, eval_dataset: Any = None, **settings: Any) -> Trainer:
        defaults: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "train_sampling_strategy": "sequential",
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }
        return Trainer(
            tiny_model() if model is None else model,
            TrainingArguments(**(defaults | settings)),
            data_collator=DataCollatorForStreams(),
            train_dataset=streams,
            eval_dataset=eval_dataset,
        )

    return make


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 16, 24, 200])
def test_every_token_but_the_first_is_scored_once(batch_size: int, length: int) -> None:
    model = tiny_model().eval()
    total, count = 0.0, 0
    with torch.no_grad():
        streams = DocumentStreams(documents(), batch_size=batch_size, sequence_length=length)
        for batch in loader(streams, batch_size):
            items = int((batch["shift_labels"] != -100).sum())
            # A sum over the batch, divided by what Trainer would count.
            total += float(model(**batch, num_items_in_batch=1).loss)
            count += items
    expected = [streaming_perplexity(model, d, progress=False) for d in documents() if len(d) > 1]
    assert count == sum(result.num_tokens for result in expected)
    assert total == pytest.approx(sum(result.mean_nll * result.num_tokens for result in expected), rel=1e-5)


def test_a_batch() -> None:
    streams = DocumentStreams([[5, 6, 7, 8, 9], [3]], batch_size=2, sequence_length=3)
    first, second = loader(streams)
    assert first["input_ids"].tolist() == [[5, 6, 7], [3, 0, 0]]
    assert first["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert first["labels"].tolist() == [[5, 6, 7], [3, -100, -100]]
    assert first["shift_labels"].tolist() == [[6, 7, 8], [-100, -100, -100]]
    assert first["reset_memory"].tolist() == [True, True]
    assert second["input_ids"].tolist() == [[8, 9], [0, 0]]
    assert second["shift_labels"].tolist() == [[9, -100], [-100, -100]]
    assert second["reset_memory"].tolist() == [False, False]
    padded = DataCollatorForStreams(pad_token_id=1, pad_to_multiple_of=4)([streams[2], streams[3]])
    assert padded["input_ids"].tolist() == [[8, 9, 1, 1], [1, 1, 1, 1]]
    with pytest.raises(ValueError, match="pad_to_multiple_of must be at least 1, got 0"):
        DataCollatorForStreams(pad_to_multiple_of=0)


def losses_by_hand(model: InfiniteFormerForCausalLM, streams: DocumentStreams, accumulation: int) -> list[float]:
    """Two epochs as Trainer should do them, with the memory passed on by hand."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2, weight_decay=0.0)
    pieces = [streams[index] for index in range(len(streams))]
    size = streams.batch_size
    batches = [pieces[start : start + size] for start in range(0, len(pieces), size)]
    steps = [batches[start : start + accumulation] for start in range(0, len(batches), accumulation)]
    memory, losses = None, []
    for number, step in enumerate(2 * steps):
        memory = None if number in (0, len(steps)) else memory
        made = [DataCollatorForStreams()(batch) for batch in step]
        items = sum((batch["shift_labels"] != -100).sum() for batch in made)
        total = 0.0
        for batch in made:
            outputs = model(**(batch | {"memory": memory}), num_items_in_batch=items)
            outputs.loss.backward()
            memory = outputs.memory
            total += outputs.loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


def logged(trainer: Trainer, name: str = "loss") -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer_equals_a_loop_that_passes_the_memory_on(trainer: Callable[..., Trainer], accumulation: int) -> None:
    streams = DocumentStreams(documents(), batch_size=2, sequence_length=24)
    held_out = DocumentStreams(documents(1), batch_size=2, sequence_length=24)
    settings = {
        "gradient_accumulation_steps": accumulation,
        "max_grad_norm": 0,
        "weight_decay": 0,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
    }
    plain = trainer(streams, num_train_epochs=2, **settings)
    plain.train()
    expected = losses_by_hand(tiny_model(), streams, accumulation)
    assert logged(plain) == expected
    evaluated = trainer(
        streams, eval_dataset=held_out, eval_strategy="steps", eval_steps=1, num_train_epochs=2, **settings
    )
    evaluated.train()
    assert logged(evaluated) == logged(plain)
    assert len(logged(evaluated, "eval_loss")) == len(expected)


def test_streams_of_an_iterable_train_alike(trainer: Callable[..., Trainer]) -> None:
    stored = trainer(DocumentStreams(documents(), batch_size=2, sequence_length=24), max_steps=6)
    stored.train()
    streams = DocumentStreams.from_iterable(map(iter, documents()), batch_size=2, sequence_length=24)
    streamed = trainer(streams, max_steps=6)
    streamed.train()
    assert logged(streamed) == logged(stored)


def test_a_memory_belongs_to_its_data_set() -> None:
    model, collator = tiny_model().eval(), DataCollatorForStreams()
    first, second = (DocumentStreams(documents(seed), batch_size=2, sequence_length=24) for seed in (0, 1))
    alone = []
    with torch.no_grad():
        for streams in (first, second):
            batches = DataLoader(streams, batch_size=2, collate_fn=DataCollatorForStreams())
            alone.append([model(**batch).logits for batch in batches])
        together = zip(*(DataLoader(s, batch_size=2, collate_fn=collator) for s in (first, second)), strict=False)
        for time, pair in enumerate(together):
            for number, batch in enumerate(pair):
                assert torch.equal(model(**batch).logits, alone[number][time])


def test_an_epoch_begins_anew_with_another_model() -> None:
    batches = loader(DocumentStreams(documents(), batch_size=2, sequence_length=24))
    for width in (16, 32):
        model = tiny_model(width).train()
        assert all(model(**batch).loss.isfinite() for batch in batches)


def test_a_batch_given_twice_goes_on_from_the_same_memory() -> None:
    model = tiny_model().train()
    for batch in loader(DocumentStreams(documents(), batch_size=2, sequence_length=24)):
        first, again = model(**batch), model(**batch)
        assert torch.equal(first.loss, again.loss)


def test_batches_ahead_of_the_model_know_their_memory() -> None:
    streams = DocumentStreams(documents(), batch_size=2, sequence_length=24)
    model = tiny_model().eval()
    with torch.no_grad():
        expected = [model(**batch).loss for batch in loader(streams)]
        ahead = list(loader(streams))
        assert [model(**batch).loss for batch in ahead] == expected
        with pytest.raises(ValueError, match=f"got batch 3 after {len(ahead)} batches; give every batch"):
            model(**ahead[3])


IN_ORDER = 'set train_sampling_strategy="sequential" and dataloader_num_workers=0'


def test_a_shuffled_order_is_refused(trainer: Callable[..., Trainer]) -> None:
    streams = DocumentStreams(documents(), batch_size=2, sequence_length=24)
    with pytest.raises(ValueError, match=IN_ORDER):
        trainer(streams, train_sampling_strategy="random").train()
    alone = DocumentStreams(documents(), batch_size=1, sequence_length=24)
    with pytest.raises(ValueError, match=IN_ORDER):
        trainer(alone, train_sampling_strategy="random", per_device_train_batch_size=1).train()
    with pytest.raises(ValueError, match=IN_ORDER):
        list(loader(alone, 1, sampler=RandomSampler(alone, generator=torch.Generator().manual_seed(0))))


def test_worker_processes_are_refused(trainer: Callable[..., Trainer]) -> None:
    streams = DocumentStreams(documents(), batch_size=2, sequence_length=24)
    with pytest.raises(ValueError, match="got worker process 0; set dataloader_num_workers=0"):
        trainer(streams, dataloader_num_workers=1).train()


@pytest.mark.parametrize("made_for", [1, 3, 4])
def test_another_batch_size_is_refused(trainer: Callable[..., Trainer], made_for: int) -> None:
    streams = DocumentStreams(documents(), batch_size=made_for, sequence_length=24)
    with pytest.raises(ValueError, match="make the streams for this batch size and number of processes"):
        trainer(streams).train()


def test_another_number_of_processes_is_refused() -> None:
    # As two processes would read streams made for one: every other batch.
    streams = DocumentStreams(documents(), batch_size=2, sequence_length=24)
    collator = DataCollatorForStreams()
    collator([streams[0], streams[1]])
    with pytest.raises(ValueError, match=r"piece 1 of rows \[0, 1\] comes next, got piece 2 of rows \[0, 1\]"):
        collator([streams[4], streams[5]])
    # And as one process would read streams made for two.
    streams = DocumentStreams(documents(), batch_size=2, world_size=2, sequence_length=24)
    collator([streams[0], streams[1]])
    with pytest.raises(ValueError, match=r"got piece 0 of rows \[2, 3\]"):
        collator([streams[2], streams[3]])


def test_a_batch_that_is_left_out_is_noticed_by_the_model() -> None:
    batches = list(loader(DocumentStreams(documents(), batch_size=2, sequence_length=24)))
    model = tiny_model().train()
    model(**batches[0])
    with pytest.raises(ValueError, match="got batch 2 after 1 batches"):
        model(**batches[2])


def test_models_without_memory_are_refused(trainer: Callable[..., Trainer]) -> None:
    config = ReformerLSHConfig(vocab_size=60, hidden_size=16, num_attention_heads=2, attn_layers=["local"])
    streams = DocumentStreams(documents(), batch_size=2, sequence_length=24)
    with pytest.raises(ValueError, match="for a model whose forward has memory, got items with input_ids"):
        trainer(streams, model=ReformerLSHForCausalLM(config)).train()
