"""A memory that goes from batch to batch in a holder, and what handles batches on the way."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from accelerate.utils import send_to_device
from torch.nn.parallel.scatter_gather import scatter_kwargs
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from hf_longmem.models.infinite_former.configuration_infinite_former import InfiniteFormerConfig
from hf_longmem.models.infinite_former.modeling_infinite_former import InfiniteFormerForCausalLM
from hf_longmem.models.infinite_former.state import InfiniteFormerMemory
from hf_longmem.models.stream_memory import StreamMemory


def tiny_model() -> InfiniteFormerForCausalLM:
    torch.manual_seed(0)
    config = InfiniteFormerConfig(
        vocab_size=60,
        hidden_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        segment_length=16,
        num_basis=16,
        basis_widths=(0.05, 0.1),
        initializer_range=0.15,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return InfiniteFormerForCausalLM(config)


def pieces(count: int = 4, rows: int = 2, length: int = 24) -> list[torch.Tensor]:
    tokens = torch.randint(2, 60, (rows, count * length), generator=torch.Generator().manual_seed(1))
    return list(tokens.split(length, dim=1))


def same(first: InfiniteFormerMemory, second: InfiniteFormerMemory) -> bool:
    def tensors(memory: InfiniteFormerMemory) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        memory.map_rows(lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return found

    pairs = zip(tensors(first), tensors(second), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_training_goes_on_as_with_memory_passed_by_hand() -> None:
    model = tiny_model().train()
    by_hand, holder = None, StreamMemory()
    for number, piece in enumerate(pieces()):
        reset = torch.tensor([number == 2, False])
        expected = model(piece, labels=piece, memory=by_hand, reset_memory=reset)
        outputs = model(piece, labels=piece, memory=holder, reset_memory=reset)
        by_hand = expected.memory
        assert torch.equal(outputs.loss, expected.loss)
        assert outputs.memory is None
        assert outputs.cache is None
        assert same(holder.value, by_hand)


def test_evaluation_goes_on_as_with_a_cache() -> None:
    model = tiny_model().eval()
    holder, cache = StreamMemory(), None
    with torch.no_grad():
        for piece in pieces():
            expected = model(piece, cache=cache, use_cache=True)
            outputs = model(piece, memory=holder)
            cache = expected.cache
            torch.testing.assert_close(outputs.logits, expected.logits, rtol=0, atol=1e-5)
            assert outputs.cache is None
            assert "memory" not in outputs


def test_a_tuple_has_no_memory_and_no_place_for_it() -> None:
    model = tiny_model().eval()
    piece = pieces()[0]
    with torch.no_grad():
        outputs = model(piece, memory=StreamMemory(), return_dict=False)
        bare = model.model(inputs_embeds=model.model.embed_tokens(piece), memory=StreamMemory(), return_dict=False)
    assert all(isinstance(item, torch.Tensor) for item in (*outputs, *bare))


def test_a_forward_that_raises_leaves_the_memory() -> None:
    model = tiny_model().train()
    holder = StreamMemory()
    model(pieces()[0], memory=holder)
    before = holder.value
    with pytest.raises(ValueError, match="token ids must lie"):
        model(torch.full((2, 3), 999), memory=holder)
    with pytest.raises(ValueError, match="the 2 rows that are remembered"):
        model(pieces()[0][:1], memory=holder)
    assert holder.value is before


def test_nobody_on_the_way_makes_another_holder(tmp_path) -> None:
    holder = StreamMemory(object())
    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "memory": holder}
    loader = DataLoader([0, 1], batch_size=2, collate_fn=lambda items: batch)
    trainer = Trainer(tiny_model(), TrainingArguments(str(tmp_path), report_to="none"))
    assert next(iter(loader))["memory"] is holder
    assert trainer._prepare_inputs(batch)["memory"] is holder
    assert send_to_device(batch, "cpu")["memory"] is holder
    assert all(kwargs["memory"] is holder for kwargs in scatter_kwargs((), {"memory": holder}, [0, 1])[1])


def test_batches_with_a_holder_can_be_copied() -> None:
    model = tiny_model().train()
    holder = StreamMemory()
    model(pieces()[0], memory=holder)
    again = pickle.load(io.BytesIO(pickle.dumps({"memory": holder})))["memory"]
    for other in (copy.deepcopy(holder), again):
        assert other is not holder
        assert same(other.value, holder.value)


def test_replicas_of_data_parallel_share_no_memory() -> None:
    replica = tiny_model().model._replicate_for_data_parallel()
    with pytest.raises(ValueError, match=r"got torch\.nn\.DataParallel; start with torchrun"):
        replica(pieces()[0], memory=StreamMemory())
