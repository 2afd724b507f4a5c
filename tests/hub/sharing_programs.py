"""What `test_sharing.py` runs in processes of its own."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, ByT5Tokenizer


def run(code: str, commands: list[list[str]]) -> dict[str, Any]:
    """Save a model as `longmem train` does, then do what the README shows."""
    from tiny_models import causal_lm

    from hf_longmem.cli.main import main

    causal_lm("reformer_lsh", vocab_size=384).save_pretrained("my-model")
    ByT5Tokenizer().save_pretrained("my-model")
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    return {"logits": logits(names["model"]), "statuses": [main(command) for command in commands]}


def load(expression: str) -> dict[str, Any]:
    """Evaluate what the README says for those without this package."""
    model = eval(expression, {"AutoModelForCausalLM": AutoModelForCausalLM})
    return {"logits": logits(model), "module": type(model).__module__}


def logits(model: Any) -> list[float]:
    """A few logits, as numbers that JSON keeps exactly."""
    with torch.no_grad():
        return model.eval()(torch.arange(2, 39)[None]).logits[0, -1, :8].tolist()
