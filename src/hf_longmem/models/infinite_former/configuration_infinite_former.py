"""Configuration of the infinity-former, ``infinite_former``."""

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from hf_longmem._errors import complaint
from hf_longmem.models.config_safety import check_entries, check_parameters, without_code_map

if TYPE_CHECKING:
    from hf_longmem.ops.continuous import RegressionSpec

_INT32_MAX = 2**31 - 1
_MOST_LAYERS = 2**16  # what holds one entry a layer is built before anything else could refuse it
_LARGEST_MAPS = 2**30  # numbers in the maps of a write
_MOST_KEYS = 2**24  # tokens that a segment attends to directly, and bins of a histogram
_CHOICES = {
    "position_embedding_type": ("rotary", "relative"),
    "sticky_draw": ("inverse_cdf", "multinomial"),
    "classifier_pooling": ("last", "mean"),
}
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "attention_head_size",
    "feed_forward_size",
    "segment_length",
    "num_basis",
    "num_samples",
    "uniform_segments",
    "histogram_bins",
    "bptt_segments",
)
_COUNTS_FROM_ZERO = ("short_term_window", "chunk_size_feed_forward", "chunk_size_lm_head")
_PROBABILITIES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")

# Multiplications of a regression, N^2 (M + L). With more, checking its contraction would take over two seconds.
_LARGEST_CHECKED_REGRESSION = 2**32

# The cache layer of hf_longmem.models.infinite_cache registers itself with transformers under this name.
CACHE_LAYER_TYPE = "infinite_former_memory"


@strict
class InfiniteFormerConfig(PreTrainedConfig):
    r"""Everything that fixes an ``infinite_former`` model; what is left ``None`` is derived here and saved.

    Args:
        vocab_size: tokens the model knows; the default is that of ``ByT5Tokenizer``.
        hidden_size: width E.
        num_hidden_layers: layers.
        num_attention_heads: heads H, of either attention.
        attention_head_size: width D of a head; default ``hidden_size // num_attention_heads``.
        feed_forward_size: inner width of the feed-forward part; default ``4 * hidden_size``.
        hidden_act: its activation, a name that transformers knows.
        hidden_dropout_prob: dropout of embeddings and branch outputs.
        attention_probs_dropout_prob: dropout of short-term attention weights.
        position_embedding_type: ``"rotary"``, or ``"relative"`` as in Transformer-XL; both count within the
            short-term window, so that a document may have any length.
        rope_theta: base of the frequencies of either.
        segment_length: L, tokens that are written to the memory at once, counted from the document's start.
        short_term_window: how many tokens before its segment a token attends to directly; default ``segment_length``.
        memory_layers: indices of the layers that have a long-term memory, rising; default all, ``()`` for none.
        num_basis: N, basis functions of a memory.
        basis_widths: their standard deviations, in units of the memory's length; default the published two. One width,
            ``(0.5 / num_basis,)``, is read more evenly and for longer; see ``hf_longmem/ops/continuous/README.md``.
        memory_ridge: lambda of the regression.
        num_samples: M, at how many points the past is sampled when it is contracted; default ``2 * num_basis``. More
            cost nothing unless the memory is sticky.
        memory_decay: the share tau of the line that the past keeps at each write, or ``"uniform"``, tau = n / (n + 1).
        uniform_segments: how many segments a uniform decay holds before it becomes a fixed one; default as many as
            there are centres, ``num_basis // len(basis_widths)``.
        sticky_memories: sample the past where attention went, instead of evenly. That the memory stays bounded then
            rests on attention that moves or is spread; see ``hf_longmem/ops/continuous/README.md``.
        sticky_draw: ``"inverse_cdf"``, or ``"multinomial"`` draws, which are random in evaluation too.
        histogram_bins: K, in how many bins attention is recorded for it.
        memory_variance_floor: smallest sigma^2 of a reading density.
        memory_kl_weight: weight in the loss of ``KL(N(mu, sigma^2) || N(mu, sigma_0^2))``, 0 for none.
        memory_prior_std: sigma_0.
        memory_gate: ``"convolution"`` weakens what is written by a learned gate; default ``None``.
        memory_zero_init: start the memory's output projections at zero.
        bptt_segments: gradients flow through groups of so many segments of a call. 1, the authors', stops them at
            every segment's border; a call never back-propagates into the one before.
        chunk_size_feed_forward: tokens the feed-forward part takes at a time, 0 for all.
        chunk_size_lm_head: tokens whose logits exist at a time while the training loss is computed, 0 for all.
        layer_norm_eps: epsilon of every LayerNorm.
        initializer_range: standard deviation with which weights are initialised. With embeddings of deviation 1 (set
            them anew after construction) the sorting benchmark is learned far sooner: what the memory keeps then
            hardly moves while the rest learns.
        classifier_dropout: dropout before a classification head; default ``hidden_dropout_prob``.
        classifier_pooling: what a sequence classifier reads, the ``"last"`` real token or the ``"mean"`` of all.

    Raises:
        ValueError: a combination that cannot work, worded as rule, value received and fix. Among them a contraction
            that amplifies the memory without bound (checked for even samples, while ``N^2 (M + L)`` is at most 2^32).

    Example:
        >>> config = InfiniteFormerConfig(segment_length=128, num_basis=64)
        >>> config.short_term_window, config.num_samples, config.memory_layers
        (128, 128, (0, 1, 2, 3, 4, 5))
    """

    model_type = "infinite_former"
    keys_to_ignore_at_inference = ["cache", "memory", "memory_loss"]

    vocab_size: int = 384
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    attention_head_size: int | None = None
    feed_forward_size: int | None = None
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.05
    attention_probs_dropout_prob: float | int = 0.05
    position_embedding_type: str = "rotary"
    rope_theta: float | int = 10000.0
    segment_length: int = 256
    short_term_window: int | None = None
    memory_layers: list[int] | tuple[int, ...] | None = None
    num_basis: int = 256
    basis_widths: list[float | int] | tuple[float | int, ...] = (0.01, 0.05)
    memory_ridge: float | int = 1.0
    num_samples: int | None = None
    memory_decay: float | int | str = 0.75
    uniform_segments: int | None = None
    sticky_memories: bool = False
    sticky_draw: str = "inverse_cdf"
    histogram_bins: int = 128
    memory_variance_floor: float | int = 1e-4
    memory_kl_weight: float | int = 1e-5
    memory_prior_std: float | int = 0.05
    memory_gate: str | None = None
    memory_zero_init: bool = False
    bptt_segments: int = 1
    chunk_size_feed_forward: int = 0
    chunk_size_lm_head: int = 1024
    layer_norm_eps: float | int = 1e-5
    initializer_range: float | int = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1
    classifier_dropout: float | int | None = None
    classifier_pooling: str = "last"

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_sizes()
        self._resolve()
        super().__post_init__(**kwargs)
        # Strict dataclasses wrap what a validator raises; raised from here it reaches the caller as ValueError.
        self.validate_architecture()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build from a saved dictionary with overrides, which are checked like everything else.

        The base class sets overrides on the finished object, past every check. What the saved config derived from a
        value that is overridden is derived anew.
        """
        own_fields = {field.name for field in fields(cls)} - {field.name for field in fields(PreTrainedConfig)}
        own_fields |= {*_COUNTS, *_COUNTS_FROM_ZERO}  # one of them is the base class's
        overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in own_fields}
        if overrides:
            saved = {field.name: config_dict.get(field.name, field.default) for field in fields(cls)}
            derived = {name for name, value in _derived(saved).items() if _plain(saved[name]) == _plain(value)}
            config_dict = {name: value for name, value in config_dict.items() if name not in derived}
        return super().from_dict(without_code_map(cls, config_dict) | overrides, **kwargs)

    @property
    def layer_types(self) -> list[str]:
        """Kind of each layer's cache, by which `DynamicCache(config=config)` chooses its layers."""
        return [CACHE_LAYER_TYPE] * self.num_hidden_layers

    def validate_layer_type(self) -> None:
        """Nothing to check: transformers' list of layer types is closed, and ours has one kind."""

    @property
    def regression(self) -> "RegressionSpec":
        """Basis and regression of the memories, as the operators take them."""
        from hf_longmem.ops.continuous import GaussianBasis, RegressionSpec  # imports torch

        basis = GaussianBasis(self.num_basis, tuple(self.basis_widths))
        return RegressionSpec(basis, self.segment_length, self.num_samples, float(self.memory_ridge))  # type: ignore[arg-type]

    @property
    def decay(self) -> float | Literal["uniform"]:
        """``memory_decay``, as the operators take it."""
        return "uniform" if isinstance(self.memory_decay, str) else float(self.memory_decay)

    def _resolve(self) -> None:
        if self.attention_head_size is None and self.hidden_size % self.num_attention_heads:
            rule = "hidden_size must be divisible by num_attention_heads when attention_head_size is not given"
            below = max(self.hidden_size // self.num_attention_heads, 1) * self.num_attention_heads
            received = f"{self.hidden_size} and {self.num_attention_heads}"
            raise ValueError(complaint(rule, received, f"use hidden_size={below}"))
        for name, value in _derived(vars(self)).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self.memory_layers = tuple(self.memory_layers)  # type: ignore[arg-type]
        self.basis_widths = tuple(float(width) for width in self.basis_widths)

    def _check_sizes(self) -> None:
        for names, smallest in ((_COUNTS, 1), (_COUNTS_FROM_ZERO, 0)):
            for name in names:
                value = getattr(self, name)
                if value is not None and not smallest <= value <= _INT32_MAX:
                    fix = f"use {smallest}" if value < smallest else "use a smaller one"
                    raise ValueError(complaint(f"{name} must be from {smallest} to {_INT32_MAX}", value, fix))
        if self.num_hidden_layers > _MOST_LAYERS:
            rule = f"num_hidden_layers must be at most {_MOST_LAYERS}"
            raise ValueError(complaint(rule, self.num_hidden_layers, "use fewer"))
        keys = self.segment_length + (self.short_term_window or 0)
        for name, value in (("segment_length + short_term_window", keys), ("histogram_bins", self.histogram_bins)):
            if value > _MOST_KEYS:
                raise ValueError(complaint(f"{name} must be at most {_MOST_KEYS}", value, "use less"))

    def _estimate_parameters(self) -> int:
        width, inner = self.hidden_size, self.num_attention_heads * (self.attention_head_size or 0)
        per_layer = 4 * width * inner + 2 * width * (self.feed_forward_size or 0)
        memories = 4 * width * inner * len(self.memory_layers or ())
        return self.num_hidden_layers * per_layer + memories + 2 * self.vocab_size * width

    def validate_architecture(self) -> None:
        """Check every rule that spans values; run at construction and again when the config is saved."""
        self._check_sizes()
        check_entries(vars(self))
        check_parameters(self._estimate_parameters())
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(complaint(f"{name} must be one of {choices}", repr(value), f"use {choices[0]!r}"))
        from transformers.activations import ACT2FN  # imports kernels and hub clients: not before a config is built

        if self.hidden_act not in ACT2FN:
            rule = "hidden_act must be an activation that transformers knows"
            raise ValueError(complaint(rule, repr(self.hidden_act), "use 'gelu' or 'relu'"))
        for name in _PROBABILITIES:
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(complaint(f"{name} must be at least 0 and below 1", value, "use 0.1"))
        for name in ("layer_norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ValueError(complaint(f"{name} must be positive", getattr(self, name), "leave it at its default"))
        # Its square divides: less would leave float32's range.
        if not 1e-15 <= self.memory_prior_std <= 1e15:
            rule = "memory_prior_std must be from 1e-15 to 1e15"
            raise ValueError(complaint(rule, self.memory_prior_std, "use 0.05"))
        for name in ("initializer_range", "memory_variance_floor", "memory_kl_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                rule = f"{name} must be finite and not negative"
                raise ValueError(complaint(rule, getattr(self, name), "leave it at its default"))
        self._check_positions()
        self._check_memory()

    def _check_positions(self) -> None:
        rotary = self.position_embedding_type == "rotary"
        name = "attention_head_size" if rotary else "hidden_size"
        width = getattr(self, name)
        if width % 2:
            rule = f"{name} must be even for {self.position_embedding_type} positions"
            raise ValueError(complaint(rule, width, f"use {width + 1}"))

    def _check_memory(self) -> None:
        layers = tuple(self.memory_layers or ())
        if list(layers) != sorted(set(layers)) or not all(0 <= index < self.num_hidden_layers for index in layers):
            rule = f"memory_layers must be rising layer indices from 0 to {self.num_hidden_layers - 1}"
            raise ValueError(complaint(rule, layers, "leave it out for all layers, or use () for none"))
        if self.memory_gate not in (None, "convolution"):
            rule = "memory_gate must be None or 'convolution'"
            raise ValueError(complaint(rule, repr(self.memory_gate), "leave it out"))
        from hf_longmem.ops.continuous import contraction_radius, decay_tau

        spec = self.regression  # checks basis, widths and ridge
        tau = decay_tau(self.decay if self.memory_decay == "uniform" else self.memory_decay, self.uniform_segments)  # type: ignore[arg-type]
        if not layers:
            return
        points = self.num_samples + self.segment_length  # type: ignore[operator]
        entries = self.uniform_segments if self.memory_decay == "uniform" else 1
        size = self.num_basis * max(self.num_basis, points) * entries  # type: ignore[operator]
        if size > _LARGEST_MAPS:
            rule = f"the maps of a write must have at most {_LARGEST_MAPS} numbers"
            fix = "use a smaller num_basis, segment_length, num_samples or uniform_segments"
            raise ValueError(complaint(rule, size, fix))
        if self.num_basis**2 * points > _LARGEST_CHECKED_REGRESSION:
            return
        radius = contraction_radius(spec, tau)
        if not radius < 1:
            rule = "a contraction must not amplify the memory, its spectral radius must be below 1"
            fix = "use more num_samples, wider basis_widths, a larger num_basis, or a smaller memory_decay"
            raise ValueError(complaint(rule, f"{radius:.2f} at tau = {tau:.3g}", fix))


def _derived(values: dict[str, Any]) -> dict[str, Any]:
    """What each value that may be left open is then."""
    num_basis, widths = values["num_basis"], values["basis_widths"]
    return {
        "attention_head_size": values["hidden_size"] // values["num_attention_heads"],
        "feed_forward_size": 4 * values["hidden_size"],
        "short_term_window": values["segment_length"],
        "memory_layers": tuple(range(min(values["num_hidden_layers"], _MOST_LAYERS))),
        "num_samples": 2 * num_basis,
        "uniform_segments": max(num_basis // max(len(widths), 1), 1),
    }


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


__all__ = ["InfiniteFormerConfig"]
