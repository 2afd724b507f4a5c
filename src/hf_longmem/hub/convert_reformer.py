"""Convert whole checkpoints between transformers' Reformer and ``reformer_lsh``, ``google/reformer-*`` among them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.reformer import modeling_reformer
from transformers.utils.hub import cached_file

from hf_longmem._errors import complaint
from hf_longmem.hub.folders import empty_folder
from hf_longmem.models.reformer_lsh import modeling_reformer_lsh, modeling_reformer_lsh_heads
from hf_longmem.models.reformer_lsh.configuration_reformer_lsh import ReformerLSHConfig
from hf_longmem.models.reformer_lsh.reformer_checkpoints import (
    ARCHITECTURES,
    REFORMER,
    config_to_reformer,
    reformer_architecture,
    weights_to_reformer,
)
from hf_longmem.models.reformer_lsh.tokenization_reformer_lsh import ReformerLSHByteTokenizer

_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "spiece.model")


@dataclass(frozen=True)
class Conversion:
    """What was converted: the class of the saved model, its parameters, and the tokenizer's class if one was saved."""

    architecture: str
    num_parameters: int
    tokenizer: str | None


def from_reformer(source: str | Path, destination: str | Path) -> Conversion:
    """Write a checkpoint of transformers' Reformer as one of ``reformer_lsh``, with its tokenizer.

    Rules, weights and therefore outputs stay what they are, up to the rotations drawn. One that has the vocabulary of
    ``google/reformer-enwik8``, 258, and no tokenizer gets the byte tokenizer which that model was trained with. A
    pickle is read by ``torch.load(weights_only=True)``, which builds tensors and runs no code; safetensors are written.

    Args:
        source: a folder, or a name on the Hub.
        destination: a folder that is empty or does not exist.

    Raises:
        ValueError: the source is another kind of model, or lacks weights; the destination is not empty.
        OSError: the source does not exist, or is damaged.
    """
    destination = empty_folder(destination)
    saved = _config_of(source, REFORMER, "transformers' Reformer")
    model_class = _our_class(ARCHITECTURES[reformer_architecture(saved)])
    model, loading = model_class.from_pretrained(source, output_loading_info=True)
    _check_complete(source, loading["missing_keys"])
    tokenizer = _tokenizer_of(source)
    if tokenizer is None and model.config.vocab_size == ReformerLSHByteTokenizer().vocab_size:
        tokenizer = ReformerLSHByteTokenizer()
    return _save(model, tokenizer, destination)


def to_reformer(source: str | Path, destination: str | Path) -> Conversion:
    """Write a ``reformer_lsh`` checkpoint as one of transformers' Reformer: the inverse of :func:`from_reformer`.

    Args:
        source: a folder, or a name on the Hub.
        destination: a folder that is empty or does not exist.

    Raises:
        ValueError: the source is another kind of model, uses what transformers' Reformer does not have, or lacks
            weights; the destination is not empty.
        OSError: the source does not exist, or is damaged.
    """
    destination = empty_folder(destination)
    saved = _config_of(source, ReformerLSHConfig.model_type, "reformer_lsh")
    theirs = {ours: theirs for theirs, ours in ARCHITECTURES.items()}
    name = (saved.get("architectures") or ["ReformerLSHModel"])[0]
    if name not in theirs:
        raise ValueError(complaint(f"the model must be one of {', '.join(theirs)}", name, "save it as one of these"))
    ours, loading = _our_class(name).from_pretrained(source, output_loading_info=True)
    _check_complete(source, loading["missing_keys"])
    config = config_to_reformer(ours.config)
    if name == "ReformerLSHForSequenceClassification":
        _check_classifier(ours.config)
    model_class = getattr(modeling_reformer, theirs[name])
    weights = weights_to_reformer(ours.state_dict())
    model, loading = model_class.from_pretrained(None, config=config, state_dict=weights, output_loading_info=True)
    _check_complete(source, loading["missing_keys"])
    if ours.can_generate():
        model.generation_config = ours.generation_config
    return _save(model, _tokenizer_of(source), destination)


def _config_of(source: str | Path, model_type: str, kind: str) -> dict[str, Any]:
    saved, _ = PreTrainedConfig.get_config_dict(source)
    if not saved:
        raise OSError(complaint(f"{source} must be a checkpoint", "no config.json", "check the path"))
    if saved.get("model_type") != model_type:
        rule = f"{source} must be a checkpoint of {kind} (model_type {model_type!r})"
        fix = "check the path, and whether `--to reformer` is the direction you want"
        raise ValueError(complaint(rule, repr(saved.get("model_type")), fix))
    return saved


def _our_class(name: str) -> Any:
    return getattr(modeling_reformer_lsh, name, None) or getattr(modeling_reformer_lsh_heads, name)


def _check_complete(source: str | Path, missing: Any) -> None:
    if missing:
        rule = f"{source} must hold every weight of its model"
        raise ValueError(complaint(rule, f"none for {', '.join(sorted(missing)[:5])}", "save it again whole"))


def _check_classifier(config: ReformerLSHConfig) -> None:
    received = f"{config.classifier_pooling!r} and {config.classifier_activation!r}"
    if received != "'first' and 'tanh'":
        rule = "transformers' Reformer classifies by classifier_pooling='first' and classifier_activation='tanh'"
        raise ValueError(complaint(rule, received, "convert the model without its head"))


def _tokenizer_of(source: str | Path) -> PreTrainedTokenizerBase | None:
    found = (cached_file(source, name, _raise_exceptions_for_missing_entries=False) for name in _TOKENIZER_FILES)
    return AutoTokenizer.from_pretrained(source) if any(found) else None


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, destination: Path) -> Conversion:
    model.save_pretrained(destination)
    if tokenizer is not None:
        tokenizer.save_pretrained(destination)
    name = None if tokenizer is None else type(tokenizer).__name__
    return Conversion(type(model).__name__, model.num_parameters(), name)
