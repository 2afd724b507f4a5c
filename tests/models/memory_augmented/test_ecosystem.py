"""A memory around a model in the hands of Trainer, accelerate, peft and whoever follows the README."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from processes import Processes
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, ByT5Tokenizer, Trainer, TrainingArguments

import hf_longmem
from hf_longmem import (
    DataCollatorForStreams,
    DocumentStreams,
    LongTermMemoryConfig,
    StreamMemoryCallback,
    add_long_term_memory,
    memory_parameter_groups,
    set_trainable,
)

Make = Callable[..., Any]
PROGRAM = Path(__file__).parent / "data_parallel_program.py"


class Documents(Dataset):
    """A few documents of several segments."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(2, 60, (40,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def settings(folder: Path, **overrides: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 3e-2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**(defaults | overrides))


def test_the_readmes_lines_with_a_local_model(base_model: Make, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    base_model("gpt2", vocab_size=384).save_pretrained("gpt2")
    tokenizer = ByT5Tokenizer()
    whole_book = "It was a dark and stormy night; the rain fell in torrents. " * 2

    model = AutoModelForCausalLM.from_pretrained("gpt2")
    model = hf_longmem.add_long_term_memory(
        model, LongTermMemoryConfig(segment_length=16, num_basis=16, basis_widths=(0.05, 0.1)), train="memory"
    )
    trainer = Trainer(model=model, args=settings(tmp_path), train_dataset=Documents())
    trainer.train()
    model.save_pretrained("gpt2-longmem", memory_only=True)
    reloaded = AutoModelForCausalLM.from_pretrained("gpt2-longmem")
    prompt = tokenizer(whole_book, return_tensors="pt")
    written = reloaded.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(written, model.eval().generate(**prompt, max_new_tokens=20, do_sample=False))
    assert written.shape[1] > 100


def test_the_stock_trainer_with_groups_accumulation_and_bf16(augmented: Make, tmp_path: Path) -> None:
    model = augmented("llama", memory_zero_init=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(memory_parameter_groups(model, 0.0, memory_lr=3e-2))
    arguments = settings(tmp_path, gradient_accumulation_steps=2, bf16=True)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Documents(),
        eval_dataset=Documents(),
        optimizers=(optimizer, None),
    )
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < first - 0.01
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if name.startswith("long_term_memory.")}


def streams(batch_size: int = 2) -> DocumentStreams:
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(2, 60, (length,), generator=generator) for length in (100, 33, 65, 130)]
    return DocumentStreams(documents, batch_size=batch_size, sequence_length=24)


def train_on_streams(model: Any, folder: Path, resume: bool = False, **overrides: Any) -> Any:
    trainer = Trainer(
        model=model,
        args=settings(folder, train_sampling_strategy="sequential", logging_steps=1, seed=1, **overrides),
        data_collator=DataCollatorForStreams(),
        train_dataset=streams(),
        eval_dataset=streams(),
        callbacks=[StreamMemoryCallback()],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_document_streams_carry_the_memory_and_resume_bit_for_bit(augmented: Make, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    whole = train_on_streams(augmented("llama", sticky_memories=True), tmp_path / "whole", **saving)
    resumed = augmented("llama", sticky_memories=True)
    (tmp_path / "whole" / "checkpoint-6").rename(tmp_path / "later")
    again = train_on_streams(resumed, tmp_path / "whole", resume=True, **saving)
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, dict(again.model.named_parameters())[name]), name
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (whole, again)]
    assert losses[0] == losses[1]


def test_streams_are_scored_as_whole_documents(augmented: Make, tmp_path: Path) -> None:
    model, documents = augmented("gpt2"), streams()
    trainer = Trainer(
        model=model,
        args=settings(tmp_path, per_device_eval_batch_size=2, prediction_loss_only=True),
        data_collator=DataCollatorForStreams(),
        eval_dataset=documents,
    )
    batch = DataCollatorForStreams()([documents[0], documents[1]])
    with torch.no_grad():
        piece = model(**batch).logits
        alone = model(batch["input_ids"][:1]).logits
    torch.testing.assert_close(piece[:1], alone, atol=2e-5, rtol=2e-5)
    assert trainer.evaluate()["eval_loss"] > 0


def test_low_rank_adapters_around_the_model_and_its_memory(augmented: Make, tokens: Make, tmp_path: Path) -> None:
    ids = tokens(2, 40)
    # Around both: the memory is trained and saved as it is, next to the adapters of the model's own projections.
    model = augmented("llama", train="memory")
    with torch.no_grad():
        before = model(ids).logits
    inner = r"language_model\..*\.(q_proj|v_proj)"
    adapted = get_peft_model(model, LoraConfig(target_modules=inner, r=2, modules_to_save=["long_term_memory"]))
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, before)
    optimizer = torch.optim.AdamW(memory_parameter_groups(adapted, 1e-2, memory_lr=3e-2))
    losses = []
    for _ in range(3):
        loss = adapted.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
        assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert any("lora" in name for name in trained)
    assert any("long_term_memory" in name for name in trained)
    adapted.eval().save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(augmented("llama", train="memory"), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, adapted(ids).logits)
    assert adapted.generate(input_ids=ids, max_new_tokens=20).shape == (2, 60)


def test_adapters_first_then_the_memory(base_model: Make, tokens: Make) -> None:
    base, ids = base_model("llama"), tokens(2, 40)
    base = inject_adapter_in_model(LoraConfig(target_modules=["q_proj", "v_proj"], r=2), base)
    model = add_long_term_memory(base, LongTermMemoryConfig(segment_length=16, num_basis=16, basis_widths=(0.05, 0.1)))
    for name, parameter in base.named_parameters():
        parameter.requires_grad_("lora" in name)
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None} == {
        "language_model",
        "long_term_memory",
    }
    assert all(p.grad is not None for name, p in base.named_parameters() if "lora" in name)
    set_trainable(model, "memory")
    assert not any(p.requires_grad for p in base.parameters())


def test_data_parallel_processes_equal_one_with_both_batches(tmp_path: Path) -> None:
    with Processes(PROGRAM, "distances", tmp_path / "processes", world_size=2) as processes:
        results = processes.results()
    for errors in results:
        assert len(errors) == 4
        assert max(errors) < 1e-9
