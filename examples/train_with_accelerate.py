"""The training of `longmem train`, written out as a plain Accelerate loop: no Trainer.

    python examples/train_with_accelerate.py --model_type infinite_former --output_dir my-model
    accelerate launch --config_file examples/accelerate_ddp.yaml examples/train_with_accelerate.py

`infinite_former` reads documents as streams, and remembers what came before each piece; `reformer_lsh` reads packed
sequences. Without --text it trains on Python's own documentation and library.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, ByT5Tokenizer, get_cosine_schedule_with_warmup

from hf_longmem import DataCollatorForLongSequences, DataCollatorForStreams, DocumentStreams
from hf_longmem.cli.first_run import CONFIG
from hf_longmem.data.text import pack_documents, python_documents, read_documents, split_documents, tokenize_documents
from hf_longmem.training.stream_checkpoints import load_carried_memory, save_carried_memory


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_type", choices=list(CONFIG), default="infinite_former")
    parser.add_argument("--config", type=json.loads, default={}, help='config fields, as JSON: {"hidden_size": 256}')
    parser.add_argument("--text", nargs="+", help="text files, one document each")
    parser.add_argument("--output_dir", type=Path, default=Path("longmem-accelerate"))
    parser.add_argument("--sequence_length", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=8, help="rows of each process")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=400)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--save_steps", type=int, default=100)
    parser.add_argument("--resume", type=Path, help="a folder output_dir/step-N to go on from")
    return parser.parse_args(arguments)


def loader_of(
    documents: Any, tokenizer: Any, collator: Any, options: argparse.Namespace, world_size: int
) -> DataLoader:
    """Streams are read in order; packed sequences come in the order in which documents were drawn."""
    data: Any
    if isinstance(collator, DataCollatorForStreams):
        tokens = tokenize_documents(documents, tokenizer, seed=options.seed)
        sizes = {"batch_size": options.batch_size, "sequence_length": options.sequence_length, "world_size": world_size}
        data = DocumentStreams(tokens, balanced=True, **sizes)
    else:
        data = pack_documents(documents, tokenizer, options.sequence_length, seed=options.seed)
    return DataLoader(data, batch_size=options.batch_size, collate_fn=collator)


def num_labels(batch: dict[str, Any]) -> torch.Tensor:
    return (batch["shift_labels"] != -100).sum() if "shift_labels" in batch else (batch["labels"][:, 1:] != -100).sum()


def endless(accelerator: Accelerator, loader: DataLoader, start: int) -> Iterator[dict[str, Any]]:
    """Batches from number ``start`` on, epoch after epoch."""
    yield from accelerator.skip_first_batches(loader, start % len(loader))
    yield from itertools.chain.from_iterable(itertools.repeat(loader))


@torch.no_grad()
def bits_per_token(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    """Mean over every token (here: byte) of the held-out text."""
    model.eval()
    total = torch.zeros(2, device=accelerator.device)
    for batch in loader:
        count = num_labels(batch)
        total += torch.stack((model(**batch).loss * count, count))
    model.train()
    nll, count = accelerator.reduce(total).tolist()
    return nll / count / math.log(2)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, and return the loss of every step."""
    options = parse(arguments)
    accelerator = Accelerator()
    set_seed(options.seed)
    tokenizer = ByT5Tokenizer()
    config = AutoConfig.for_model(options.model_type, **(CONFIG[options.model_type] | options.config))
    model = AutoModelForCausalLM.from_config(config)
    streamed = options.model_type == "infinite_former"
    collator: Any = (
        DataCollatorForStreams(tokenizer.pad_token_id) if streamed else DataCollatorForLongSequences(tokenizer)
    )
    documents = split_documents(read_documents(options.text) if options.text else python_documents())
    train, held_out = (
        loader_of(documents[part], tokenizer, collator, options, accelerator.num_processes)
        for part in ("train", "held_out")
    )
    streams = train.dataset

    model.train()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))
    schedule = get_cosine_schedule_with_warmup(optimizer, math.ceil(0.05 * options.max_steps), options.max_steps)
    model, optimizer, train, held_out = accelerator.prepare(model, optimizer, train, held_out)
    accelerator.register_for_checkpointing(schedule)  # not prepared: Accelerate would step it once for each process

    done = int(options.resume.name.removeprefix("step-")) if options.resume else 0
    batches = endless(accelerator, train, done * options.gradient_accumulation_steps)
    losses = []
    for step in range(done, options.max_steps):
        group = list(itertools.islice(batches, options.gradient_accumulation_steps))
        if step == done and options.resume:
            # After the first batch, as reading it draws from the random generators that are restored here.
            accelerator.load_state(str(options.resume))
            if streamed:
                load_carried_memory(
                    options.resume,
                    collator.carried(streams),
                    accelerator.unwrap_model(model),
                    batch_size=options.batch_size,
                    rank=accelerator.process_index,
                    world_size=accelerator.num_processes,
                )
        # Every token of every process and micro-batch counts the same, the regulariser of the memory included.
        items = accelerator.reduce(sum(num_labels(batch) for batch in group))
        loss = torch.zeros((), device=accelerator.device)
        for number, batch in enumerate(group, start=1):
            with contextlib.nullcontext() if number == len(group) else accelerator.no_sync(model):
                part = model(**batch, num_items_in_batch=items).loss
                accelerator.backward(part * accelerator.num_processes)  # gradients are averaged over processes
            loss += part.detach()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss).item())
        accelerator.print(f"step {step + 1}: loss {losses[-1]:.4f}")
        if (step + 1) % options.save_steps == 0:
            folder = options.output_dir / f"step-{step + 1}"
            accelerator.save_state(str(folder))
            if streamed:
                carried, rank = collator.carried(streams), accelerator.process_index
                save_carried_memory(folder, carried, rank=rank, world_size=accelerator.num_processes)

    accelerator.print(f"held-out bits per byte: {bits_per_token(accelerator, model, held_out):.3f}")
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(options.output_dir, state_dict=weights)
        tokenizer.save_pretrained(options.output_dir)
    accelerator.wait_for_everyone()  # a process that left early could keep another from finishing its last exchange
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
