"""Configuration of the Reformer with angular LSH attention, ``reformer_lsh``."""

import math
from dataclasses import fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from hf_longmem._errors import complaint
from hf_longmem.models.config_safety import check_entries, check_parameters, without_code_map
from hf_longmem.models.reformer_lsh.reformer_checkpoints import REFORMER, config_from_reformer

_INT32_MAX = 2**31 - 1
_MOST_KEYS = 2**24  # tokens that a chunk attends to
_MOST_ROTATIONS = 2**28  # numbers in a layer's rotations
_MOST_IN_RINGS = 2**32  # places in a layer's cache of one row
_CHOICES = {
    "lsh_candidates": ("bucket", "chunk"),
    "round_merge": ("union", "sum"),
    "local_candidates": ("sliding", "chunk"),
    "position_embedding_type": ("axial", "learned", "rotary"),
    "stream_merge": ("mean", "concat"),
    "classifier_pooling": ("first", "last", "mean"),
}
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "attention_head_size",
    "feed_forward_size",
    "num_hashes",
    "lsh_attn_chunk_length",
    "local_attn_chunk_length",
    "max_position_embeddings",
)
_COUNTS_FROM_ZERO = (
    "lsh_num_chunks_before",
    "lsh_num_chunks_after",
    "local_num_chunks_before",
    "local_num_chunks_after",
    "chunk_size_feed_forward",
    "chunk_size_lm_head",
)
_PROBABILITIES = (
    "hidden_dropout_prob",
    "lsh_attention_probs_dropout_prob",
    "local_attention_probs_dropout_prob",
    "classifier_dropout",
)

# The cache layers of hf_longmem.models.cache register themselves with transformers under these names.
CACHE_LAYER_TYPES = {"lsh": "reformer_lsh_attention", "local": "reformer_local_attention"}


@strict
class ReformerLSHConfig(PreTrainedConfig):
    r"""Everything that fixes a ``reformer_lsh`` model; what is left ``None`` is derived once, here, and saved resolved.

    Args:
        vocab_size: tokens the model knows; the default is that of ``ByT5Tokenizer``.
        hidden_size: width E of each of the two residual streams.
        attn_layers: ``"lsh"`` or ``"local"`` for each layer, first to last.
        num_hidden_layers: derived, ``len(attn_layers)``; a value that contradicts it is an error.
        num_attention_heads: heads H.
        attention_head_size: width D of a head; default ``hidden_size // num_attention_heads``.
        feed_forward_size: inner width of the feed-forward part; default ``4 * hidden_size``.
        hidden_act: its activation, a name that transformers knows.
        hidden_dropout_prob: dropout of embeddings, branch outputs and the merged streams.
        lsh_attention_probs_dropout_prob, local_attention_probs_dropout_prob: dropout of attention weights.
        lsh_attn_chunk_length, local_attn_chunk_length: chunk length C in tokens, the unit in which reach is counted.
        lsh_num_chunks_before, local_num_chunks_before: how many chunks back a query may look.
        lsh_num_chunks_after, local_num_chunks_after: how many chunks ahead; default 0 when causal, else as before.
        num_hashes: hash rounds R.
        num_buckets: buckets K of a round, even, or its even factors; default the power of two nearest to
            ``max_position_embeddings / lsh_attn_chunk_length``, in two factors from 64 on.
        hash_seed: what the rotations of evaluation are drawn from (training draws fresh ones each forward).
        lsh_candidates: ``"bucket"``, strictly the query's own bucket, or ``"chunk"``, whole neighbouring chunks
            (as in Trax and transformers; there a later token can change an earlier output).
        round_merge: ``"union"`` counts a key once however many rounds found it, ``"sum"`` once per round.
        local_candidates: ``"sliding"``, an exact window per token, or ``"chunk"``, whole neighbouring chunks.
        position_embedding_type: ``"axial"``, ``"learned"`` or ``"rotary"``.
        axial_pos_shape: positions along each axis, any number of axes; their product is the longest input.
            Default: two near-equal axes that cover ``max_position_embeddings``.
        axial_pos_embds_dim: width of each axis, summing to ``hidden_size``.
        axial_norm_std: standard deviation with which axial tables are initialised.
        rope_theta: base of the rotary frequencies.
        max_position_embeddings: the longest input in tokens.
        is_decoder: whether attention is causal.
        reversible: keep no activations and rebuild them in the backward pass; the numbers do not depend on it.
        stream_merge: how the two streams end, ``"mean"`` (width E) or ``"concat"`` (2E, as ``google/reformer-*``).
        chunk_size_feed_forward: tokens the feed-forward part takes at a time, 0 for all.
        chunk_size_lm_head: tokens whose logits exist at a time while the training loss is computed, 0 for all.
        layer_norm_eps: epsilon of every LayerNorm.
        initializer_range: standard deviation with which weights are initialised.
        classifier_dropout: dropout before a classification head; default ``hidden_dropout_prob``.
        classifier_pooling: which real token a sequence classifier reads, ``"first"`` or ``"last"``, or their
            ``"mean"``; default the last when causal, else the mean.
        classifier_activation: give the sequence classifier a hidden layer of width E with this activation (``"tanh"``
            in transformers' Reformer); default none.

    Raises:
        ValueError: a combination that cannot work, worded as rule, value received and fix.

    Example:
        >>> config = ReformerLSHConfig(max_position_embeddings=65536)
        >>> config.num_buckets, config.axial_pos_shape, config.lsh_num_chunks_after
        ((32, 32), (256, 256), 0)
    """

    model_type = "reformer_lsh"
    keys_to_ignore_at_inference = ["cache"]

    vocab_size: int = 384
    hidden_size: int = 256
    attn_layers: list[str] | tuple[str, ...] = ("local", "lsh", "local", "lsh", "local", "lsh")
    num_hidden_layers: int | None = None
    num_attention_heads: int = 4
    attention_head_size: int | None = None
    feed_forward_size: int | None = None
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.05
    lsh_attention_probs_dropout_prob: float | int = 0.0
    local_attention_probs_dropout_prob: float | int = 0.05
    lsh_attn_chunk_length: int = 64
    lsh_num_chunks_before: int = 1
    lsh_num_chunks_after: int | None = None
    local_attn_chunk_length: int = 64
    local_num_chunks_before: int = 1
    local_num_chunks_after: int | None = None
    num_hashes: int = 4
    num_buckets: int | list[int] | tuple[int, ...] | None = None
    hash_seed: int = 0
    lsh_candidates: str = "bucket"
    round_merge: str = "union"
    local_candidates: str = "sliding"
    position_embedding_type: str = "axial"
    axial_pos_shape: list[int] | tuple[int, ...] | None = None
    axial_pos_embds_dim: list[int] | tuple[int, ...] | None = None
    axial_norm_std: float | int = 1.0
    rope_theta: float | int = 10000.0
    max_position_embeddings: int = 4096
    is_decoder: bool = True
    reversible: bool = True
    stream_merge: str = "mean"
    chunk_size_lm_head: int = 1024
    layer_norm_eps: float | int = 1e-5
    initializer_range: float | int = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1
    classifier_dropout: float | int | None = None
    classifier_pooling: str | None = None
    classifier_activation: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_sizes()
        self._resolve()
        self._check_layers()
        super().__post_init__(**kwargs)
        # Strict dataclasses wrap what a validator raises; raised from here it reaches the caller as ValueError.
        self.validate_architecture()

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a ``config.json``; that of transformers' own Reformer comes out as ours."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if config_dict.get("model_type") == REFORMER:
            config_dict = config_from_reformer(config_dict)
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build from a saved dictionary with overrides, deriving again what an override leaves open.

        The base class sets overrides on the finished object, past every check.
        """
        own_fields = {field.name for field in fields(cls)} - {field.name for field in fields(PreTrainedConfig)}
        own_fields |= {*_COUNTS, *_COUNTS_FROM_ZERO}  # one of them is the base class's
        overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in own_fields}
        stale: set[str] = set()
        if "is_decoder" in overrides:
            stale |= {"lsh_num_chunks_after", "local_num_chunks_after"}
            if config_dict.get("classifier_pooling") != "first":
                stale.add("classifier_pooling")
        if "attn_layers" in overrides:
            stale.add("num_hidden_layers")
        kept = {name: value for name, value in config_dict.items() if name not in stale}
        return super().from_dict(without_code_map(cls, kept) | overrides, **kwargs)

    @property
    def num_positions(self) -> int:
        """How many positions an input may have: the table's size when axial, else ``max_position_embeddings``."""
        if self.position_embedding_type == "axial" and self.axial_pos_shape is not None:
            return math.prod(self.axial_pos_shape)
        return self.max_position_embeddings

    @property
    def last_hidden_size(self) -> int:
        """Width of ``last_hidden_state``: E when the streams are averaged, 2E when they are concatenated."""
        return self.hidden_size if self.stream_merge == "mean" else 2 * self.hidden_size

    def _resolve(self) -> None:
        self.attn_layers = tuple(self.attn_layers)
        if self.num_hidden_layers is None:
            self.num_hidden_layers = len(self.attn_layers)
        if self.attention_head_size is None:
            if self.hidden_size % self.num_attention_heads:
                rule = "hidden_size must be divisible by num_attention_heads when attention_head_size is not given"
                below = max(self.hidden_size // self.num_attention_heads, 1) * self.num_attention_heads
                raise ValueError(
                    complaint(rule, f"{self.hidden_size} and {self.num_attention_heads}", f"use hidden_size={below}")
                )
            self.attention_head_size = self.hidden_size // self.num_attention_heads
        if self.feed_forward_size is None:
            self.feed_forward_size = 4 * self.hidden_size
        if self.lsh_num_chunks_after is None:
            self.lsh_num_chunks_after = 0 if self.is_decoder else self.lsh_num_chunks_before
        if self.local_num_chunks_after is None:
            self.local_num_chunks_after = 0 if self.is_decoder else self.local_num_chunks_before
        if self.classifier_pooling is None:
            self.classifier_pooling = "last" if self.is_decoder else "mean"
        if self.num_buckets is None:
            self.num_buckets = _derive_num_buckets(self.max_position_embeddings, self.lsh_attn_chunk_length)
        elif not isinstance(self.num_buckets, int):
            self.num_buckets = tuple(self.num_buckets)
        if self.position_embedding_type == "axial":
            if self.axial_pos_shape is None:
                num_axes = 2 if self.axial_pos_embds_dim is None else len(self.axial_pos_embds_dim)
                self.axial_pos_shape = _derive_axial_shape(self.max_position_embeddings, num_axes)
            if self.axial_pos_embds_dim is None:
                self.axial_pos_embds_dim = _derive_axial_widths(self.hidden_size, len(self.axial_pos_shape))
        if self.axial_pos_shape is not None:
            self.axial_pos_shape = tuple(self.axial_pos_shape)
        if self.axial_pos_embds_dim is not None:
            self.axial_pos_embds_dim = tuple(self.axial_pos_embds_dim)

    @property
    def layer_types(self) -> list[str]:
        """Kind of each layer's cache, by which `DynamicCache(config=config)` chooses its layers."""
        return [CACHE_LAYER_TYPES[kind] for kind in self.attn_layers]

    def validate_layer_type(self) -> None:
        """Nothing to check: transformers' list of layer types is closed, and ours follow from ``attn_layers``."""

    def _check_sizes(self) -> None:
        for names, smallest in ((_COUNTS, 1), (_COUNTS_FROM_ZERO, 0)):
            for name in names:
                value = getattr(self, name)
                if value is not None and not smallest <= value <= _INT32_MAX:
                    fix = f"use {smallest}" if value < smallest else "use a smaller one"
                    raise ValueError(complaint(f"{name} must be from {smallest} to {_INT32_MAX}", value, fix))

    def validate_architecture(self) -> None:
        """Check every rule that spans values; run at construction and again when the config is saved."""
        self._check_sizes()
        check_entries(vars(self))
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(complaint(f"{name} must be one of {choices}", repr(value), f"use {choices[0]!r}"))
        from transformers.activations import ACT2FN  # imports kernels and hub clients: not before a config is built

        for name in ("hidden_act", "classifier_activation"):
            value = getattr(self, name)
            if value is not None and value not in ACT2FN:
                rule = f"{name} must be an activation that transformers knows"
                raise ValueError(complaint(rule, repr(value), "use 'gelu' or 'relu'"))
        for name in _PROBABILITIES:
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(complaint(f"{name} must be at least 0 and below 1", value, "use 0.1"))
        if not 0 <= self.hash_seed < 2**63:
            raise ValueError(complaint("hash_seed must be from 0 to 2^63 - 1", self.hash_seed, "use 0"))
        for name in ("layer_norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ValueError(complaint(f"{name} must be positive", getattr(self, name), "leave it at its default"))
        for name in ("initializer_range", "axial_norm_std"):
            if not getattr(self, name) >= 0:
                raise ValueError(complaint(f"{name} must not be negative", getattr(self, name), "use 0.02"))
        self._check_layers()
        self._check_reach()
        self._check_buckets()
        self._check_positions()
        if self.tie_word_embeddings and self.stream_merge != "mean":
            rule = "tie_word_embeddings needs stream_merge='mean', so that both have width hidden_size"
            raise ValueError(complaint(rule, repr(self.stream_merge), "use stream_merge='mean' or untie them"))
        check_parameters(self._estimate_parameters())

    def _check_layers(self) -> None:
        if not self.attn_layers:
            raise ValueError(complaint("attn_layers must name at least one layer", "none", "use ['local', 'lsh']"))
        unknown = sorted(set(self.attn_layers) - {"lsh", "local"})
        if unknown:
            rule = "attn_layers may hold only 'lsh' and 'local'"
            raise ValueError(complaint(rule, ", ".join(map(repr, unknown)), "replace it by one of the two"))
        if self.num_hidden_layers != len(self.attn_layers):
            rule = f"num_hidden_layers must be the length of attn_layers, {len(self.attn_layers)}"
            raise ValueError(complaint(rule, self.num_hidden_layers, "leave it out, or give as many attn_layers"))

    def _check_reach(self) -> None:
        for kind, exact_rule, candidates in (
            ("lsh", "bucket", self.lsh_candidates),
            ("local", "sliding", self.local_candidates),
        ):
            before, after = getattr(self, f"{kind}_num_chunks_before"), getattr(self, f"{kind}_num_chunks_after")
            if self.is_decoder and after:
                rule = f"{kind}_num_chunks_after must be 0 when is_decoder=True"
                raise ValueError(complaint(rule, after, "use 0, or is_decoder=False to look both ways"))
            keys = getattr(self, f"{kind}_attn_chunk_length") * (before + 1 + after)
            if keys > _MOST_KEYS:
                rule = f"{kind}_attn_chunk_length times the chunks of {kind} attention must be at most {_MOST_KEYS}"
                raise ValueError(complaint(rule, keys, "use shorter chunks, or fewer"))
            if candidates == exact_rule and before == 0:
                rule = f"{kind}_num_chunks_before must be at least 1 with {kind}_candidates={exact_rule!r}"
                raise ValueError(complaint(rule, before, "use 1"))

    def _check_buckets(self) -> None:
        factors = (self.num_buckets,) if isinstance(self.num_buckets, int) else tuple(self.num_buckets or ())
        name = "num_buckets" if len(factors) == 1 else "every factor of num_buckets"
        for factor in factors:
            if factor < 2 or factor % 2:
                rule, fix = "even", f"use {factor - 1} or {factor + 1}"
                if factor < 2:
                    rule, fix = "at least 2", "use 2"
                raise ValueError(complaint(f"{name} must be {rule}", factor, fix))
        if not factors:
            raise ValueError(complaint("num_buckets must have at least one factor", "none", "use 64 or [8, 8]"))
        if math.prod(factors) > _INT32_MAX:
            rule = f"num_buckets must be at most {_INT32_MAX} in all"
            raise ValueError(complaint(rule, math.prod(factors), "use about max_position_embeddings / chunk length"))
        # Refused here, for training would only fail where it asks for that much memory.
        of_heads = self.num_attention_heads * self.num_hashes
        rotations = of_heads * (self.attention_head_size or 0) * sum(factors) // 2
        if rotations > _MOST_ROTATIONS:
            rule = (
                f"the rotations of a layer must have at most {_MOST_ROTATIONS} numbers (heads, width, rounds, buckets)"
            )
            raise ValueError(
                complaint(rule, rotations, "use fewer num_buckets, or factors of them, or fewer num_hashes")
            )
        rings = of_heads * math.prod(factors) * self.lsh_attn_chunk_length * self.lsh_num_chunks_before
        if self.is_decoder and self.lsh_candidates == "bucket" and rings > _MOST_IN_RINGS:
            rule = f"num_hashes, num_buckets and the window must take at most {_MOST_IN_RINGS} places in a cache"
            raise ValueError(complaint(rule, rings, "use fewer num_buckets, or shorter chunks"))

    def _check_positions(self) -> None:
        if self.position_embedding_type == "rotary" and (self.attention_head_size or 0) % 2:
            rule = "attention_head_size must be even for rotary positions"
            raise ValueError(complaint(rule, self.attention_head_size, "use an even one, or axial positions"))
        if self.position_embedding_type != "axial":
            return
        shape, widths = tuple(self.axial_pos_shape or ()), tuple(self.axial_pos_embds_dim or ())
        if not shape or min(shape) < 1 or min(widths, default=0) < 1 or len(shape) != len(widths):
            rule = "axial_pos_shape and axial_pos_embds_dim must be positive and equally many"
            raise ValueError(complaint(rule, f"{shape} and {widths}", "leave both out to have them derived"))
        if sum(widths) != self.hidden_size:
            rule = f"axial_pos_embds_dim must sum to hidden_size, {self.hidden_size}"
            raise ValueError(complaint(rule, f"{widths}, {sum(widths)} in all", "leave it out to have it derived"))
        if math.prod(shape) < self.max_position_embeddings:
            rule = f"axial_pos_shape must cover max_position_embeddings, {self.max_position_embeddings}"
            fix = f"lower max_position_embeddings to {math.prod(shape)}, or enlarge the first axis"
            raise ValueError(complaint(rule, f"{shape}, {math.prod(shape)} positions", fix))

    def _estimate_parameters(self) -> int:
        width = self.hidden_size
        attention = 4 * width * self.num_attention_heads * (self.attention_head_size or 0)
        per_layer = attention + 2 * width * (self.feed_forward_size or 0)
        positions = {
            "learned": width * self.max_position_embeddings,
            "axial": sum(map(math.prod, zip(self.axial_pos_shape or (), self.axial_pos_embds_dim or (), strict=True))),
        }.get(self.position_embedding_type, 0)
        return len(self.attn_layers) * per_layer + self.vocab_size * (width + self.last_hidden_size) + positions


def _derive_num_buckets(num_positions: int, chunk_length: int) -> int | tuple[int, int]:
    exponent = max(round(math.log2(num_positions / chunk_length)), 1)
    if exponent < 6:
        return 2**exponent
    return 2 ** (exponent // 2), 2 ** (exponent - exponent // 2)


def _derive_axial_shape(num_positions: int, num_axes: int) -> tuple[int, ...]:
    power_of_two = num_positions & (num_positions - 1) == 0
    shape: list[int] = []
    left = num_positions
    for axes_left in range(max(num_axes, 1), 0, -1):
        side = next(side for side in range(int(left ** (1 / axes_left)), left + 1) if side**axes_left >= left)
        if power_of_two:
            side = 2 ** math.ceil(math.log2(side))
        shape.append(side)
        left = -(-left // side)
    return tuple(sorted(shape))


def _derive_axial_widths(hidden_size: int, num_axes: int) -> tuple[int, ...]:
    # As in the published checkpoints: with two axes the coarse one has a quarter of the width.
    coarse = hidden_size // (2 * num_axes)
    return (*[coarse] * (num_axes - 1), hidden_size - coarse * (num_axes - 1))


__all__ = ["ReformerLSHConfig"]
