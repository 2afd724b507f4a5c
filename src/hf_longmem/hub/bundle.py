"""One checkpoint for both worlds: with this package installed, and without it by ``trust_remote_code=True``."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import httpx
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_longmem._errors import complaint
from hf_longmem.hub.cards import CARD, facts_of_folder, name_on_hub, write_card
from hf_longmem.hub.folders import empty_folder, listed_shards, open_safetensors, variant_files, weight_files
from hf_longmem.hub.sources import flat_name, flat_sources
from hf_longmem.models.auto import MODEL_TYPES, model_classes
from hf_longmem.models.loading import PICKLE_WAY_OUT, other_shards
from hf_longmem.models.memory_augmented.loading import holds_memory_alone

# What a checkpoint is made of beside its weights. Pickles, code, optimizer states, what a model remembers of a text and
# folders of other checkpoints stay behind.
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*")
_LEFT_BEHIND = ("trainer_state.json", "*_results.json")
_TOKENIZERS = {"ReformerLSHByteTokenizer": "hf_longmem.models.reformer_lsh.tokenization_reformer_lsh"}


def bundle(
    model_or_dir: PreTrainedModel | str | Path,
    out: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    push_to: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
) -> Path:
    """Write a checkpoint with the code of its model, ``configuration_*.py``, ``modeling_*.py`` and siblings, beside it.

    Who has this package installed loads the checkpoint as ever. Who has not loads it by
    ``AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)``, every head and the tokenizer likewise. The
    files are this package's own sources, made flat; their first line names its version and commit. A model card is
    written where there is none.

    Args:
        model_or_dir: a model of this package, or the folder or the Hub's name of a checkpoint of one. Of a folder, the
            weights, configs, tokenizer and card are taken, and nothing that Trainer keeps for resuming. A memory
            without its model (``memory_only``) must name one on the Hub.
        out: a folder that is empty or does not exist.
        tokenizer: saved with the model.
        push_to: name of a repository on the Hub, which is created if it does not exist, to upload the folder to.
        private: whether a created repository is private; default, what the account has set.
        token: of the account; default, the one it is logged in with.

    Returns:
        The folder.

    Raises:
        ValueError: the model is of another package, its weights are no safetensors, ``out`` is not empty, or a memory
            is for a model in a folder, which others have not.
        OSError: the checkpoint does not exist or is damaged.
    """
    destination = empty_folder(out)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".bundle-") as work:
        folder = Path(work) / "bundle"
        folder.mkdir()
        if isinstance(model_or_dir, PreTrainedModel):
            _check_type(model_or_dir.config.model_type, type(model_or_dir).__name__)
            model_or_dir.save_pretrained(folder)
        else:
            _copy_checkpoint(model_or_dir, folder, token)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        _add_code(folder)
        if not (folder / CARD).is_file():
            facts = facts_of_folder(folder, results=None if isinstance(model_or_dir, PreTrainedModel) else model_or_dir)
            name = (push_to or destination.name).rpartition("/")[2]
            write_card(folder, dataclasses.replace(facts, name=name, path=push_to))
        if destination.exists():
            destination.rmdir()
        # All or nothing: what went wrong above leaves no half of a checkpoint behind.
        folder.rename(destination)
    if push_to is not None:
        push_folder(destination, push_to, private=private, token=token)
    return destination


def push_folder(folder: str | Path, name: str, *, private: bool | None = None, token: str | bool | None = None) -> str:
    """Upload a folder to the repository ``name``, which is created if it does not exist, and give the commit's address.

    Args:
        folder: what to upload, all of it.
        name: ``"user/name"``.
        private: whether a created repository is private; default, what the account has set.
        token: of the account; default, the one it is logged in with.

    Raises:
        OSError: the connection breaks off, or the hub refuses; then nothing of the repository has changed.
    """
    api = HfApi(token=token)
    try:
        created = api.create_repo(name, private=private, exist_ok=True)
        # Code of an earlier version that this one lacks goes.
        done = api.upload_folder(
            folder_path=folder,
            repo_id=created.repo_id,
            commit_message="Upload a bundle",
            delete_patterns=["hf_longmem_*.py"],
        )
        return str(done)
    except (httpx.HTTPError, RuntimeError) as error:
        if isinstance(error, HfHubHTTPError):
            raise
        rule = f"the upload of {folder} to {name} must come to its end"
        received = f"{type(error).__name__}: {error}" + (f" {error.__cause__}" if error.__cause__ else "")
        fix = f"the repository is as it was; `hf upload {name} {folder}` goes on where it broke off"
        raise OSError(complaint(rule, received, fix)) from error


def _check_type(model_type: Any, source: Any) -> None:
    if model_type not in MODEL_TYPES:
        rule = f"{source} must be a model of this package ({', '.join(MODEL_TYPES)})"
        raise ValueError(complaint(rule, f"model_type {model_type!r}", "check the path, or convert it first"))


def _copy_checkpoint(source: str | Path, folder: Path, token: str | bool | None) -> None:
    saved, _ = PreTrainedConfig.get_config_dict(source, token=token)
    if not isinstance(saved, dict) or not saved:
        raise OSError(complaint(f"{source} must be a checkpoint", "no config.json", "check the path"))
    _check_type(saved.get("model_type"), source)
    if not Path(source).is_dir():
        source = snapshot_download(str(source), allow_patterns=[*_COPIED, "*.safetensors"], token=token)
    left_behind = {file for pattern in _LEFT_BEHIND for file in Path(source).glob(pattern)}
    weights = sorted({*weight_files(source), *variant_files(source)})
    copied = {file for pattern in _COPIED for file in Path(source).glob(pattern)} - left_behind
    for file in sorted({*copied, *weights}):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    _check_weights(Path(source), weights)
    base = saved.get("base_model_name_or_path")
    if base and name_on_hub(base) is None and all(map(holds_memory_alone, weights)):
        rule = f"the model around which the memory in {source} is must be on the Hub, where others find it"
        fix = "load both by AutoModelForCausalLM.from_pretrained and bundle that model, which holds everything"
        raise ValueError(complaint(rule, f"the folder {base!r}", fix))


def _check_weights(source: Path, weights: list[Path]) -> None:
    index = source / SAFE_WEIGHTS_INDEX_NAME
    needs_index = index.is_file() and not (source / SAFE_WEIGHTS_NAME).is_file()
    pickles = other_shards(str(index)) if needs_index else []
    if pickles or not (weights or needs_index):
        received = pickles[0] if pickles else "none"
        raise ValueError(complaint(f"{source} must hold its weights as safetensors", received, PICKLE_WAY_OUT))
    for file in weights:
        with open_safetensors(file):
            pass
    if needs_index and (missing := sorted(listed_shards(index) - {file.name for file in weights})):
        rule = f"{source} must hold every shard that its index lists"
        raise OSError(complaint(rule, f"no {missing[0]}", "download or copy it again"))


def _add_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    classes = model_classes(config["model_type"])
    auto_map = {auto: f"{flat_name(module)}.{name}" for auto, (module, name) in classes.items()}
    _write_json(folder / "config.json", config | {"auto_map": auto_map})
    modules = {module for module, _ in classes.values()}
    models = {flat_name(module): name for auto, (module, name) in classes.items() if auto != "AutoConfig"}
    tokenizer_config = folder / "tokenizer_config.json"
    if tokenizer_config.is_file():
        saved = json.loads(tokenizer_config.read_text(encoding="utf-8"))
        if "--" not in json.dumps(saved.get("auto_map")):  # what is in another repository stays there
            saved.pop("auto_map", None)
        if module := _TOKENIZERS.get(str(saved.get("tokenizer_class"))):
            modules.add(module)
            saved["auto_map"] = {"AutoTokenizer": [f"{flat_name(module)}.{saved['tokenizer_class']}", None]}
        _write_json(tokenizer_config, saved)
    for name, text in flat_sources(sorted(modules)).items():
        others = {other: head for other, head in models.items() if other != Path(name).stem}
        if Path(name).stem in models and others:
            # transformers reads this, Python does not: who saves one head again gets the others' code too.
            imports = [f"    from .{other} import {head}  # noqa: F401" for other, head in others.items()]
            text = "\n".join([text, "if False:", *imports, ""])
        (folder / name).write_text(text, encoding="utf-8")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


__all__ = ["bundle", "push_folder"]
