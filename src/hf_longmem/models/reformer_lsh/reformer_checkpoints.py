"""Checkpoints of transformers' own Reformer, ``google/reformer-*`` among them: their config and weights in our names.

The rules that those models were trained with are ``lsh_candidates="chunk"``, ``round_merge="sum"``,
``local_candidates="chunk"`` and ``stream_merge="concat"``; with the same rotations the numbers are the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.reformer.configuration_reformer import ReformerConfig

from hf_longmem._errors import complaint

if TYPE_CHECKING:
    from torch import Tensor

REFORMER = "reformer"
PUBLISHED_RULES = {
    "lsh_candidates": "chunk",
    "round_merge": "sum",
    "local_candidates": "chunk",
    "stream_merge": "concat",
}
# transformers' class, ours
ARCHITECTURES = {
    "ReformerModel": "ReformerLSHModel",
    "ReformerModelWithLMHead": "ReformerLSHForCausalLM",
    "ReformerForMaskedLM": "ReformerLSHForMaskedLM",
    "ReformerForSequenceClassification": "ReformerLSHForSequenceClassification",
    "ReformerForQuestionAnswering": "ReformerLSHForQuestionAnswering",
}
_SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "attn_layers",
    "num_attention_heads",
    "attention_head_size",
    "feed_forward_size",
    "hidden_act",
    "hidden_dropout_prob",
    "lsh_attention_probs_dropout_prob",
    "local_attention_probs_dropout_prob",
    "lsh_attn_chunk_length",
    "lsh_num_chunks_before",
    "lsh_num_chunks_after",
    "local_attn_chunk_length",
    "local_num_chunks_before",
    "local_num_chunks_after",
    "num_hashes",
    "num_buckets",
    "hash_seed",
    "axial_norm_std",
    "max_position_embeddings",
    "is_decoder",
    "layer_norm_eps",
    "initializer_range",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "classifier_dropout",
)
_OF_EVERY_CONFIG = ("id2label", "label2id", "problem_type", "dtype", "torch_dtype")
# Beginnings of names: transformers', ours. Where one begins with another, the longer comes first.
_BEGINNINGS = (
    ("reformer.embeddings.word_embeddings.", "model.embed_tokens."),
    ("reformer.embeddings.position_embeddings.weights.", "model.position_embeddings.weights."),
    ("reformer.embeddings.position_embeddings.embedding.", "model.position_embeddings."),
    ("reformer.encoder.layer_norm.", "model.norm."),
    ("reformer.encoder.layers.", "model.layers."),
    ("lm_head.decoder.", "lm_head."),
    ("classifier.dense.", "dense."),
    ("classifier.out_proj.", "score."),
)
_PARTS_OF_A_LAYER = (
    (".attention.layer_norm.", ".input_layernorm."),
    (".attention.self_attention.query_key.", ".self_attn.qk_proj."),
    (".attention.self_attention.query.", ".self_attn.q_proj."),
    (".attention.self_attention.key.", ".self_attn.k_proj."),
    (".attention.self_attention.value.", ".self_attn.v_proj."),
    (".attention.output.dense.", ".self_attn.o_proj."),
    (".feed_forward.layer_norm.", ".post_attention_layernorm."),
    (".feed_forward.dense.dense.", ".mlp.up_proj."),
    (".feed_forward.output.dense.", ".mlp.down_proj."),
)


def config_from_reformer(reformer: Mapping[str, Any]) -> dict[str, Any]:
    """What a ``ReformerLSHConfig`` needs to be the model that a saved ``ReformerConfig`` describes.

    Args:
        reformer: the content of its ``config.json``; fields left out have ``ReformerConfig``'s defaults.
    """
    defaults: dict[str, Any] = {field.name: field.default for field in fields(ReformerConfig)}
    reformer = defaults | dict(reformer)
    config = {name: reformer[name] for name in _SAME_NAME if reformer.get(name) is not None}
    config |= {name: reformer[name] for name in _OF_EVERY_CONFIG if reformer.get(name) is not None}
    config |= {"model_type": "reformer_lsh", "classifier_pooling": "first", "classifier_activation": "tanh"}
    config |= PUBLISHED_RULES
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        config[name] = reformer[name]
    config["chunk_size_feed_forward"] = reformer.get("chunk_size_feed_forward") or 0
    if reformer["chunk_size_lm_head"]:
        config["chunk_size_lm_head"] = reformer["chunk_size_lm_head"]
    config["axial_pos_shape"] = config["axial_pos_embds_dim"] = None
    config["position_embedding_type"] = "axial" if reformer["axial_pos_embds"] else "learned"
    if reformer["axial_pos_embds"]:
        shape = list(reformer["axial_pos_shape"])
        config["axial_pos_shape"], config["axial_pos_embds_dim"] = shape, list(reformer["axial_pos_embds_dim"])
        config["max_position_embeddings"] = min(config["max_position_embeddings"], math.prod(shape))
    if names := reformer.get("architectures"):
        config["architectures"] = [ARCHITECTURES.get(name, name) for name in names]
    return config


def reformer_architecture(reformer: Mapping[str, Any]) -> str:
    """transformers' class for a saved ``ReformerConfig``: the one it names, or the language model of its kind."""
    for name in reformer.get("architectures") or ():
        if name in ARCHITECTURES:
            return name
    return "ReformerModelWithLMHead" if reformer.get("is_decoder") else "ReformerForMaskedLM"


def config_to_reformer(config: PreTrainedConfig) -> ReformerConfig:
    """The inverse of :func:`config_from_reformer`.

    Raises:
        ValueError: the model is one that transformers' Reformer cannot be.
    """
    for name, needed in PUBLISHED_RULES.items():
        if (value := getattr(config, name)) != needed:
            fix = "only models trained by the published rules can go back"
            raise ValueError(complaint(f"transformers' Reformer needs {name}={needed!r}", repr(value), fix))
    kind, shape = config.position_embedding_type, config.axial_pos_shape
    if kind == "rotary" or (kind == "axial" and len(shape) != 2):
        received = kind if kind == "rotary" else f"{len(shape)} axes"
        rule = "transformers' Reformer has learned positions, or axial ones of two axes"
        raise ValueError(complaint(rule, received, "train such a model to convert it"))
    values = {name: getattr(config, name) for name in _SAME_NAME}
    values |= {name: getattr(config, name) for name in _OF_EVERY_CONFIG if name != "torch_dtype"}
    # transformers accepts only a float here, and factors only as a list.
    values["lsh_attention_probs_dropout_prob"] = float(values["lsh_attention_probs_dropout_prob"])
    if not isinstance(values["num_buckets"], int):
        values["num_buckets"] = list(values["num_buckets"])
    # In transformers the rotations of all layers are those of this seed, and it reseeds the global generator.
    values["hash_seed"] = None
    values["axial_pos_embds"] = kind == "axial"
    if kind == "axial":
        values |= {"axial_pos_shape": list(shape), "axial_pos_embds_dim": list(config.axial_pos_embds_dim)}
        # There an input may be no longer than max_position_embeddings, however many rows the table has.
        values["max_position_embeddings"] = config.num_positions
    return ReformerConfig(**values)


def weights_from_reformer(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a Reformer's weights; what has no place in our models keeps its name.

    ``lm_head.bias`` is a second, unused copy of ``lm_head.decoder.bias`` today, and was the bias itself in early
    versions: it counts where the other is missing. Mask constants, once saved as weights, are dropped.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        unused = name == "lm_head.bias" and "lm_head.decoder.bias" in weights
        if unused or re.search(r"\.(self_)?mask_value_float(16|32)$", name):
            continue
        if name.startswith(("embeddings.", "encoder.")):
            name = f"reformer.{name}"
        renamed[_rename(name, 0, 1)] = tensor
    return renamed


def weights_to_reformer(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`weights_from_reformer`; both copies of the head's bias are written."""
    bare = not any(name.startswith("model.") for name in weights)
    renamed = {_rename(f"model.{name}" if bare else name, 1, 0): tensor for name, tensor in weights.items()}
    if bare:
        renamed = {name.removeprefix("reformer."): tensor for name, tensor in renamed.items()}
    if "lm_head.decoder.bias" in renamed:
        renamed["lm_head.bias"] = renamed["lm_head.decoder.bias"].clone()
    return renamed


def _rename(name: str, old: int, new: int) -> str:
    for pair in _BEGINNINGS:
        if name.startswith(pair[old]):
            name = pair[new] + name[len(pair[old]) :]
            break
    for pair in _PARTS_OF_A_LAYER:
        if pair[old] in name:
            return name.replace(pair[old], pair[new])
    return name
