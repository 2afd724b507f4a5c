"""The family in transformers' own machinery, and its retention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)

import hf_longmem
from hf_longmem import InfiniteFormerConfig, memory_retention

Make = Callable[..., Any]


def test_auto_classes_know_the_family(tiny: Make, tmp_path: Path) -> None:
    assert isinstance(AutoConfig.for_model("infinite_former"), InfiniteFormerConfig)
    for auto, name in (
        (AutoModel, "InfiniteFormerModel"),
        (AutoModelForCausalLM, "InfiniteFormerForCausalLM"),
        (AutoModelForSequenceClassification, "InfiniteFormerForSequenceClassification"),
        (AutoModelForTokenClassification, "InfiniteFormerForTokenClassification"),
    ):
        model = auto.from_config(tiny())
        assert type(model) is getattr(hf_longmem, name)
        model.save_pretrained(tmp_path / name)
        assert type(auto.from_pretrained(tmp_path / name)) is type(model)


def test_a_model_can_be_loaded_with_fewer_layers_and_other_segments(tiny: Make, tmp_path: Path) -> None:
    whole = AutoModelForCausalLM.from_config(tiny()).eval()
    whole.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=1, segment_length=8)
    assert model.config.memory_layers == (0,)
    assert model.config.short_term_window == model.model.layers[0].window == 8
    assert torch.equal(model.lm_head.weight, whole.lm_head.weight)
    assert torch.isfinite(model(torch.randint(2, 60, (1, 30))).logits).all()


class Documents(Dataset):
    """A few short documents."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(2, 60, (40,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def test_the_stock_trainer_trains_and_evaluates(causal_lm: Make, tmp_path: Path) -> None:
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=8,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(model=causal_lm(), args=arguments, train_dataset=Documents(), eval_dataset=Documents())
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.2


def test_a_collator_can_hand_a_memory_through_the_stock_trainer(causal_lm: Make, tmp_path: Path) -> None:
    model, seen = causal_lm(), []

    def collate(documents: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        batch = {name: torch.stack([document[name] for document in documents]) for name in documents[0]}
        with torch.no_grad():
            memory = model.model(batch["input_ids"], memory=model.model.empty_memory(len(documents))).memory
        return batch | {"memory": memory, "reset_memory": torch.tensor([True, False])}

    model.model.register_forward_hook(lambda *args: seen.append(args[-1].memory))
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=2,
        report_to=[],
        use_cpu=True,
        bf16=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    Trainer(model=model, args=arguments, train_dataset=Documents(), data_collator=collate).train()
    assert [40, 80] in [memory.seen_B.tolist() for memory in seen]
    assert {memory.layers[0].memory.coefficients_BNE.dtype for memory in seen} == {torch.float32}


@pytest.mark.parametrize(("decay", "kept"), [(0.5, 7), (0.75, 13), ("uniform", 24)])
def test_retention_tells_how_many_segments_can_be_read(decay: Any, kept: int) -> None:
    config = InfiniteFormerConfig(segment_length=256, num_basis=256, num_samples=256, memory_decay=decay)
    retention = memory_retention(config, 24, read_variance=0.0)
    assert retention.kept() == kept
    assert len(retention.fidelity_A) == 24
    # A density as wide as the config's floor cannot read more than a point does.
    assert memory_retention(config, 24).kept() <= kept
