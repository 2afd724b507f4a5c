"""Pushes and pulls a memory alone and everything; a process of its own, which knows the hub from its environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import hf_longmem

USER = "user"


def main(answer: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).push_to_hub(f"{USER}/base")
    base = AutoModelForCausalLM.from_pretrained(f"{USER}/base")
    memory = {"segment_length": 16, "num_basis": 16, "basis_widths": (0.05, 0.1), "memory_zero_init": False}
    model = hf_longmem.add_long_term_memory(base, hf_longmem.LongTermMemoryConfig(**memory))
    model.generation_config.max_length = 33
    model.push_to_hub(f"{USER}/memory", memory_only=True)
    model.push_to_hub(f"{USER}/everything")
    ids, found = torch.randint(40, (1, 60), generator=torch.Generator().manual_seed(1)), {}
    for name in ("memory", "everything"):
        pulled = AutoModelForCausalLM.from_pretrained(f"{USER}/{name}")
        with torch.no_grad():
            same = torch.equal(pulled(ids).logits, model(ids).logits)
        found[name] = {"same": same, "max_length": pulled.generation_config.max_length}
    answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
