"""Put a long-term memory around a model, and train it."""

from __future__ import annotations

import copy
from typing import Any, Literal, get_args

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from hf_longmem._errors import complaint
from hf_longmem.models.memory_augmented.attachment import DecoderLayers, find_decoder_layers
from hf_longmem.models.memory_augmented.base_sample import sample_weights
from hf_longmem.models.memory_augmented.configuration_memory_augmented import (
    LongTermMemoryConfig,
    MemoryAugmentedConfig,
)
from hf_longmem.models.memory_augmented.modeling_memory_augmented import MemoryAugmentedForCausalLM

Train = Literal["memory", "all", "last_n"]


def add_long_term_memory(
    model: PreTrainedModel,
    config: LongTermMemoryConfig | None = None,
    *,
    train: Train = "memory",
    last_n: int = 1,
    layers: str | None = None,
    attention: str | None = None,
) -> MemoryAugmentedForCausalLM:
    """Put a long-term memory around a causal language model, whose modules, weights and names stay as they are.

    Args:
        model: any causal language model of transformers whose layers have an attention module each. It is used, not
            copied; called by itself it is what it was.
        config: the memory's; default `LongTermMemoryConfig()`.
        train: what is to be trained, see `set_trainable`.
        last_n: of how many of the model's layers, with ``train="last_n"``.
        layers: name of the list of decoder layers within the model, where structure does not tell.
        attention: name of the attention within a layer, where structure does not tell.

    Returns:
        The model with a memory; ``language_model`` is the given one. Its logits are the same bit for bit up to one
        segment, and beyond one until a memory is trained those of the model in sight of its block alone.

    Raises:
        ValueError: the model does not fit; the message says why.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> base = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=64))
        >>> model = add_long_term_memory(base, LongTermMemoryConfig(segment_length=32, num_basis=32))
        >>> model(torch.randint(50, (1, 200))).logits.shape
        torch.Size([1, 200, 50])
    """
    if isinstance(model, MemoryAugmentedForCausalLM):
        raise ValueError(complaint("a model can have one long-term memory", "one that has one", "go on with that"))
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        rule = "the model must be a causal language model of transformers"
        raise ValueError(complaint(rule, f"a {type(model).__name__}", "load it with AutoModelForCausalLM"))
    if model.config.is_encoder_decoder:
        rule = "the model must be a decoder alone"
        raise ValueError(complaint(rule, f"{type(model).__name__}, an encoder and a decoder", "use a causal one"))
    found = find_decoder_layers(model, layers, attention)
    _check_train(train, last_n, found)
    whole = MemoryAugmentedConfig(
        base_config=copy.deepcopy(model.config),
        memory_config=(config or LongTermMemoryConfig()).fitted_to(model.config, found.with_attention),
        base_model_name_or_path=model.name_or_path or None,
        base_weights=sample_weights(model) if model.name_or_path else None,
        layers_path=found.path,
        attention_name=found.attention_name,
        dtype=model.config.dtype,
    )
    augmented = MemoryAugmentedForCausalLM(whole, model).train(model.training)
    set_trainable(augmented, train, last_n=last_n)
    return augmented


def set_trainable(model: MemoryAugmentedForCausalLM, train: Train, *, last_n: int = 1) -> None:
    """Say which parameters get gradients.

    Args:
        model: the model with a memory.
        train: ``"memory"``, the memory's alone; ``"last_n"``, those and the model's last layers'; ``"all"``.
        last_n: how many layers ``"last_n"`` means.

    Raises:
        ValueError: another word, or more layers than there are.
    """
    found: DecoderLayers = model.decoder_layers()
    _check_train(train, last_n, found)
    model.language_model.requires_grad_(train == "all")
    model.long_term_memory.requires_grad_(True)
    if train == "last_n":
        for layer in found.layers[-last_n:]:
            layer.requires_grad_(True)


def _check_train(train: Train, last_n: int, found: DecoderLayers) -> None:
    if train not in get_args(Train):
        raise ValueError(complaint(f"train must be one of {get_args(Train)}", repr(train), "use 'memory'"))
    if train == "last_n" and not 1 <= last_n <= len(found.layers):
        rule = f"last_n must be from 1 to the model's {len(found.layers)} layers"
        raise ValueError(complaint(rule, last_n, "use 1"))


def memory_parameter_groups(
    model: nn.Module, lr: float, *, memory_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Make the groups of an optimizer that gives the memory a learning rate of its own.

    The memory's parameters do not decay, nor do the model's biases and norms (what has one axis). To be used as
    ``Trainer(optimizers=(torch.optim.AdamW(memory_parameter_groups(model, 1e-5, memory_lr=1e-3)), None))``.

    Args:
        model: the model with a memory, or what wraps it.
        lr: learning rate of the model's parameters.
        memory_lr: learning rate of the memory's; default ``lr``.
        weight_decay: of the model's matrices.

    Returns:
        Groups of the parameters that get gradients; none is empty.

    Raises:
        ValueError: nothing gets gradients.
    """
    groups: dict[str, list[nn.Parameter]] = {"memory": [], "decayed": [], "plain": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            of_memory = "long_term_memory." in name
            groups["memory" if of_memory else "decayed" if parameter.dim() > 1 else "plain"].append(parameter)
    if not any(groups.values()):
        rule = "some parameters must be trainable"
        raise ValueError(complaint(rule, "a model without any", "see set_trainable(model, train=...)"))
    rates = {"memory": lr if memory_lr is None else memory_lr}
    return [
        {
            "params": parameters,
            "lr": rates.get(name, lr),
            "weight_decay": weight_decay if name == "decayed" else 0.0,
        }
        for name, parameters in groups.items()
        if parameters
    ]


__all__ = ["add_long_term_memory", "memory_parameter_groups", "set_trainable"]
