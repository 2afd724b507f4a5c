"""``from_pretrained`` for checkpoints of transformers' own Reformer."""

from __future__ import annotations

from pickle import UnpicklingError
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.reformer.configuration_reformer import ReformerConfig

from hf_longmem._errors import complaint
from hf_longmem.models.loading import HUB_ARGUMENTS, SafetensorsOnly
from hf_longmem.models.reformer_lsh.reformer_checkpoints import (
    REFORMER,
    reformer_architecture,
    weights_from_reformer,
)

_READING_ARGUMENTS = (*HUB_ARGUMENTS, "use_safetensors", "variant", "weights_only")


class ReformerCheckpoints(SafetensorsOnly):
    """A model whose ``from_pretrained`` takes checkpoints of transformers' Reformer too.

    Those are the one exception from safetensors: ``google/reformer-*`` are published as pickles.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does; a checkpoint of its Reformer is read by its own class, and renamed.

        Raises:
            ValueError: ``weights_only=False`` for such a checkpoint. A pickle is read by torch's restricted unpickler
                alone, which builds tensors and runs no code.
            OSError: a pickle that is damaged or holds anything else.
        """
        source = pretrained_model_name_or_path
        load = super().from_pretrained
        if source is None:
            return load(None, *args, **kwargs)
        hub_arguments = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        saved, _ = PreTrainedConfig.get_config_dict(source, **hub_arguments)
        if saved.get("model_type") != REFORMER:
            return load(source, *args, **kwargs)
        if not kwargs.get("weights_only", True):
            rule = "weights_only must be True for a checkpoint of transformers' Reformer"
            raise ValueError(complaint(rule, False, "leave it out: nothing is unpickled that could run code"))
        reading_arguments = {name: kwargs.pop(name) for name in _READING_ARGUMENTS if name in kwargs}
        reformer, missing = _read_reformer(source, saved, dtype=kwargs.get("dtype", "auto"), **reading_arguments)
        weights = reformer.state_dict()
        weights = weights_from_reformer({name: weights[name] for name in weights if name not in missing})
        loaded = load(None, *args, state_dict=weights, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.name_or_path = model.config.name_or_path = str(source)
        if model.can_generate() and reformer.can_generate():
            model.generation_config = reformer.generation_config
        return loaded


def _read_reformer(source: Any, saved: dict[str, Any], **kwargs: Any) -> tuple[PreTrainedModel, set[str]]:
    """A checkpoint in transformers' own class, and the weights which it lacks."""
    from transformers.models.reformer import modeling_reformer

    # Written as 0 by some, which transformers' validation does not take for a float.
    rate = saved.get("lsh_attention_probs_dropout_prob")
    config = ReformerConfig.from_dict(
        saved | ({} if rate is None else {"lsh_attention_probs_dropout_prob": float(rate)})
    )
    model_class = getattr(modeling_reformer, reformer_architecture(saved))
    try:
        model, loading = model_class.from_pretrained(source, config=config, output_loading_info=True, **kwargs)
    except UnpicklingError as error:
        rule = f"the weights of {str(source)!r} must be whole, and tensors only"
        raise OSError(complaint(rule, "a pickle that is not", "get a checkpoint in safetensors")) from error
    return model, set(loading["missing_keys"])
