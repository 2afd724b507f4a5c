"""What the tests of the Hub run in processes of their own; `test_hub.py` says what has to hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard, snapshot_download
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

FAMILIES = ("reformer_lsh", "infinite_former")
WAYS = ("pushed", "saved", "trained", "bundled")
PROMPT = "Nodes, née 1965"


def share(folder: str) -> dict[str, Any]:
    """Put a model of each family on the Hub in every way, and load each again."""
    return {family: _share(family, Path(folder) / family) for family in FAMILIES}


def _share(family: str, folder: Path) -> dict[str, Any]:
    from tiny_models import causal_lm, collate

    from hf_longmem import bundle
    from hf_longmem.cli.main import main
    from hf_longmem.hub.cards import CardFacts, model_card

    tokenizer = tokenizer_of(family)
    model = causal_lm(family, vocab_size=len(tokenizer)).eval()
    model.generation_config.max_new_tokens = 6
    model.generation_config.no_repeat_ngram_size = 3
    folder.mkdir(parents=True)
    expected = {way: logits(model) for way in WAYS}

    model.push_to_hub(f"user/{family}-pushed")
    tokenizer.push_to_hub(f"user/{family}-pushed")
    card = model_card(model.config, CardFacts(f"{family}-pushed", license="apache-2.0", language="en"))
    card.validate()
    card.push_to_hub(f"user/{family}-pushed")

    model.save_pretrained(folder / "saved", push_to_hub=True, repo_id=f"user/{family}-saved")
    tokenizer.save_pretrained(folder / "saved", push_to_hub=True, repo_id=f"user/{family}-saved")

    bundle(model, folder / "bundle", tokenizer=tokenizer, push_to=f"user/{family}-bundled")

    arguments = TrainingArguments(
        str(folder / "trained"),
        push_to_hub=True,
        hub_model_id=f"user/{family}-trained",
        max_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        per_device_train_batch_size=1,
    )
    rows = [dict.fromkeys(("input_ids", "labels"), torch.tensor(tokenizer(PROMPT)["input_ids"])) for _ in range(2)]
    trainer = Trainer(model, arguments, collate, rows, processing_class=tokenizer)  # type: ignore[arg-type]
    trainer.train()
    trainer.save_model()
    expected["trained"] = logits(model.eval())
    save_file(expected, folder.parent / f"{family}.safetensors")

    text = folder / "book.txt"
    text.write_text("Once upon a time there was a text.\n" * 60)
    arguments = ["--text", str(text), "--sequence_length", "64", "--hidden_size", "16", "--max_train_samples", "2"]
    arguments += ["--max_new_tokens", "0", "--held_out_fraction", "0.2", "--model_type", family]
    hub_arguments = ["--push_to_hub", "true", "--hub_model_id", f"user/{family}-command"]
    status = main(["train", *arguments, *hub_arguments, "--output_dir", str(folder / "command")])

    loaded = check_all(family, folder.parent)
    local = snapshot_download(f"user/{family}-bundled")
    from_snapshot = AutoModelForCausalLM.from_pretrained(local)
    return loaded | {
        "longmem train": status,
        "snapshot": bool(torch.equal(logits(from_snapshot), expected["bundled"])),
        "class with the plugin": type(from_snapshot).__module__,
        "class when told to trust": type(
            AutoModelForCausalLM.from_pretrained(f"user/{family}-bundled", trust_remote_code=True)
        ).__module__,
        "tokenizer when told to trust": type(
            AutoTokenizer.from_pretrained(f"user/{family}-bundled", trust_remote_code=True)
        ).__module__,
    }


def offline(folder: str) -> dict[str, Any]:
    """Load everything again from the cache, and ask for what is not there."""
    import hf_longmem  # noqa: F401

    answers: dict[str, Any] = {family: check_all(family, Path(folder)) for family in FAMILIES}
    answers["snapshot"] = sorted(file.name for file in Path(snapshot_download("user/reformer_lsh-bundled")).iterdir())
    answers["unknown"] = error(AutoModelForCausalLM.from_pretrained, "user/never-seen")
    return answers


def without_plugin(folder: str, online: bool) -> dict[str, Any]:
    """Load the bundles by remote code alone."""
    import importlib.util

    assert importlib.util.find_spec("hf_longmem") is None
    answers = {}
    for family in FAMILIES:
        model = AutoModelForCausalLM.from_pretrained(f"user/{family}-bundled", trust_remote_code=True)
        expected = load_file(Path(folder) / f"{family}.safetensors")["bundled"]
        ids = torch.tensor([tokenizer_of(family, remote=True)(PROMPT)["input_ids"]])
        answers[family] = {
            "same": bool(torch.equal(logits(model), expected)),
            "module": type(model).__module__,
            "cached": model.generate(ids, max_new_tokens=12).tolist(),
            "uncached": model.generate(ids, max_new_tokens=12, use_cache=False).tolist(),
        }
    if online:
        load = AutoModelForCausalLM.from_pretrained
        answers["untrusted"] = error(load, "user/reformer_lsh-bundled", trust_remote_code=False)
    return answers


def failures(folder: str) -> dict[str, str]:
    """Everything that goes wrong, in the words a user reads; ``hub`` has the faults ready."""
    import hf_longmem

    answers = {}
    load = AutoModelForCausalLM.from_pretrained
    for family in FAMILIES:
        answers |= {
            f"{family} wrong revision": error(load, f"user/{family}-pushed", revision="v9"),
            f"{family} no weights": error(load, f"user/{family}-without-weights"),
            f"{family} no shard": error(load, f"user/{family}-without-shard"),
            f"{family} no config": error(load, f"user/{family}-without-config"),
            f"{family} only a pickle": error(load, f"user/{family}-pickle"),
            f"{family} unknown": error(load, "user/never-seen"),
        }
    answers["bundle unknown"] = error(hf_longmem.bundle, "user/never-seen", Path(folder) / "unknown")
    answers["bundle pickle"] = error(hf_longmem.bundle, "user/reformer_lsh-pickle", Path(folder) / "pickle")
    answers["private, with the token"] = type(load("user/secret")).__name__
    return answers


def interrupted(source: str, folder: str, name: str) -> dict[str, Any]:
    """Push a bundle while the hub does what it was told to, and once more; then load it."""
    from hf_longmem import bundle
    from hf_longmem.hub.bundle import push_folder

    answers: dict[str, Any] = {"first": None}
    try:
        bundle(source, folder, push_to=name)
    except OSError as raised:
        answers["first"] = f"{type(raised).__name__}: {raised}"
        answers["in between"] = HfApi().list_repo_files(name)
        push_folder(folder, name)
    answers["again"] = sorted(HfApi().list_repo_files(name))
    model = AutoModelForCausalLM.from_pretrained(name)
    answers["same"] = bool(torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(source))))
    return answers


def private(name: str) -> dict[str, str]:
    """Load a private repository."""
    import hf_longmem

    return {
        "model": error(AutoModelForCausalLM.from_pretrained, name),
        "snapshot": error(snapshot_download, name),
        "push": error(hf_longmem.bundle, name, "out", push_to="user/new"),
    }


def check_all(family: str, folder: Path) -> dict[str, Any]:
    """Load what was shared in every way, and say what came back as it had been."""
    expected = load_file(folder / f"{family}.safetensors")
    answers: dict[str, Any] = {}
    for way in WAYS:
        name = f"user/{family}-{way}"
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
        generation = GenerationConfig.from_pretrained(name)
        answers[way] = {
            "same": bool(torch.equal(logits(model), expected[way])),
            "tokenizer": type(tokenizer).__name__,
            "text": tokenizer.decode(tokenizer(PROMPT, add_special_tokens=False)["input_ids"]),
            "generation": [model.generation_config.max_new_tokens, generation.no_repeat_ngram_size],
            "card": ModelCard.load(name).data.to_dict() if way != "saved" else None,
        }
    return answers


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Logits of fixed tokens, longer than a chunk and a segment."""
    with torch.no_grad():
        return model.eval()(torch.arange(2, 39)[None]).logits


def tokenizer_of(family: str, remote: bool = False) -> PreTrainedTokenizerBase:
    """Our byte tokenizer for the Reformer, ByT5's for the infinity-former."""
    if family == "infinite_former":
        return ByT5Tokenizer()
    if remote:
        return AutoTokenizer.from_pretrained("user/reformer_lsh-bundled", trust_remote_code=True)
    from hf_longmem import ReformerLSHByteTokenizer

    return ReformerLSHByteTokenizer()


def error(action: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The class of the exception that ``action`` raises, and its words; nothing else may happen."""
    try:
        result = action(*args, **kwargs)
    except (OSError, ValueError) as raised:
        return f"{type(raised).__name__}: {raised}"
    raise AssertionError(f"no error, but {type(result).__name__}")
