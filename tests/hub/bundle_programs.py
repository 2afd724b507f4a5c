"""What `test_bundle.py` runs in a Python without this package."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

IDS = torch.arange(2, 39)[None]


def load(folder: str) -> dict[str, Any]:
    """Load every head of every bundle, all in one process, then use the first models."""
    assert importlib.util.find_spec("hf_longmem") is None
    families = ("reformer_lsh", "infinite_former", "memory_augmented")
    models = {family: load_one(Path(folder) / family) for family in families}
    answers: dict[str, Any] = {family: {"heads": heads(Path(folder) / family)} for family in families}
    for family, model in models.items():
        answers[family] |= use(model, load_file(Path(folder) / f"{family}.safetensors")["logits"], Path(folder))
    tokenizer = AutoTokenizer.from_pretrained(Path(folder) / "reformer_lsh", trust_remote_code=True)
    ids = tokenizer("né")["input_ids"]
    answers["tokenizer"] = {"ids": ids, "text": tokenizer.decode(ids), "class": type(tokenizer).__name__}
    return answers


def load_one(path: Path) -> Any:
    """The causal language model of a bundle."""
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules.")
    return model


def heads(path: Path) -> dict[str, str]:
    """The class that each Auto class makes of a bundle, once it has computed something."""
    names = {}
    for auto in json.loads((path / "config.json").read_text())["auto_map"]:
        if auto != "AutoConfig":
            # Only a bidirectional model fills in masks.
            changes = {"is_decoder": False} if auto == "AutoModelForMaskedLM" else {}
            model = getattr(transformers, auto).from_pretrained(path, trust_remote_code=True, **changes)
            with torch.no_grad():
                assert torch.isfinite(model(IDS)[0]).all()
            names[auto] = type(model).__name__
    return names


def use(model: Any, expected: torch.Tensor, folder: Path) -> dict[str, Any]:
    """Compute, generate with and without a cache, train a step, save and load again."""
    settings = {"max_new_tokens": 12, "do_sample": False}
    with torch.no_grad():
        answers: dict[str, Any] = {"same logits": bool(torch.equal(model(IDS).logits, expected))}
    answers["cached"] = model.generate(IDS, **settings).tolist()
    answers["uncached"] = model.generate(IDS, use_cache=False, **settings).tolist()
    answers["beams"] = model.generate(IDS, num_beams=2, **settings).tolist()
    answers["beams uncached"] = model.generate(IDS, num_beams=2, use_cache=False, **settings).tolist()
    model.train()(IDS, labels=IDS).loss.backward()
    answers["trains"] = all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    again = folder / "work" / f"{model.config.model_type}-again"
    model.save_pretrained(again)
    reloaded = load_one(again)
    answers["cached, after another copy of the code has come"] = model.eval().generate(IDS, **settings).tolist()
    with torch.no_grad():
        same = bool(torch.equal(reloaded(IDS).logits, expected))
    answers["saved again"] = same and set(heads(again)) == set(heads(folder / model.config.model_type))
    return answers
