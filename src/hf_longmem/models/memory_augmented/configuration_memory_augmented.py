"""Configuration of a long-term memory around another causal language model, ``memory_augmented``."""

from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig, SubConfigSpec
from transformers.models.auto.configuration_auto import AutoConfig

from hf_longmem._errors import complaint
from hf_longmem.models.config_safety import check_entries, check_parameters, without_code_map
from hf_longmem.models.infinite_former.configuration_infinite_former import InfiniteFormerConfig

if TYPE_CHECKING:
    from hf_longmem.ops.continuous import RegressionSpec

# The cache layer of hf_longmem.models.memory_augmented.cache registers itself with transformers under this name.
CACHE_LAYER_TYPE = "memory_augmented_state"

_MOST_LAYERS = 2**16  # what holds one entry a layer is built before anything else could refuse it

# What a memory has in common with those of an infinity-former, whose config checks it.
_SHARED = (
    "segment_length",
    "num_basis",
    "basis_widths",
    "memory_ridge",
    "num_samples",
    "memory_decay",
    "uniform_segments",
    "sticky_memories",
    "sticky_draw",
    "histogram_bins",
    "memory_variance_floor",
    "memory_kl_weight",
    "memory_prior_std",
    "memory_gate",
    "memory_zero_init",
    "bptt_segments",
)


@strict
class LongTermMemoryConfig(PreTrainedConfig):
    r"""Everything that fixes the memory which `add_long_term_memory` puts around a model.

    What is left ``None`` and depends on the model is derived when the two meet.

    Args:
        segment_length: L, tokens that are written to the memory at once, counted from the document's start.
        window_length: W, how many tokens before its segment the model reads again together with it; at most what
            its positions leave beside a segment. Default: the smaller of that and ``segment_length``. Costs
            ``(W + L) / L`` of the model's time on long inputs.
        memory_layers: indices of the decoder layers that have a memory, rising; default all that have attention.
        num_attention_heads: heads of the memory; default the model's.
        attention_head_size: width of a head; default the model's.
        memory_input_norm: divide a layer's input by its root mean square before it is written and before it asks the
            memory. The residual stream of a trained model grows from layer to layer. False is the authors' way.
        num_basis, basis_widths, memory_ridge, num_samples, memory_decay, uniform_segments, sticky_memories,
            sticky_draw, histogram_bins, memory_variance_floor, memory_kl_weight, memory_prior_std, memory_gate,
            bptt_segments: see `InfiniteFormerConfig`.
        memory_zero_init: start the output projections at zero, so that adding a memory changes nothing at first.

    Raises:
        ValueError: a combination that cannot work, worded as rule, value received and fix.

    Example:
        >>> config = LongTermMemoryConfig(segment_length=128, num_basis=64)
        >>> config.num_samples, config.memory_zero_init
        (128, True)
    """

    model_type = "long_term_memory"
    base_config_key = "memory_config"

    segment_length: int = 512
    window_length: int | None = None
    memory_layers: list[int] | tuple[int, ...] | None = None
    num_attention_heads: int | None = None
    attention_head_size: int | None = None
    memory_input_norm: bool = True
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
    memory_zero_init: bool = True
    bptt_segments: int = 1

    def __post_init__(self, **kwargs: Any) -> None:
        settings = self._check()
        for name in ("num_samples", "uniform_segments", "basis_widths"):
            setattr(self, name, getattr(settings, name))
        if self.memory_layers is not None:
            self.memory_layers = tuple(self.memory_layers)
        super().__post_init__(**kwargs)

    def validate_memory(self) -> None:
        """Check every rule that does not need the model; run again when the config is saved."""
        self._check()

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

    def fitted_to(self, base: PreTrainedConfig, layers: tuple[int, ...] | None = None) -> "LongTermMemoryConfig":
        """Derive what is open from the model's config, and check that the two fit.

        Args:
            base: the model's config.
            layers: which of its layers have attention; default all.

        Raises:
            ValueError: they do not fit.
        """
        base = base.get_text_config(decoder=True)
        heads = self.num_attention_heads or base.num_attention_heads
        width = self.attention_head_size or getattr(base, "head_dim", None) or max(base.hidden_size // heads, 1)
        layers = tuple(range(base.num_hidden_layers)) if layers is None else layers
        chosen = layers if self.memory_layers is None else tuple(self.memory_layers)
        if not chosen or list(chosen) != sorted(set(chosen)) or not set(chosen) <= set(layers):
            rule = f"memory_layers must be rising indices of layers with attention, {list(layers)}"
            raise ValueError(complaint(rule, list(chosen), "leave it out for all of them"))
        derived = {
            "num_attention_heads": heads,
            "attention_head_size": width,
            "memory_layers": chosen,
            "window_length": self._fitting_window(getattr(base, "max_position_embeddings", None)),
        }
        own = {field.name: getattr(self, field.name) for field in _own_fields(type(self))}
        return type(self)(**(own | derived))

    def _fitting_window(self, positions: int | None) -> int:
        if positions is None:
            return self.segment_length if self.window_length is None else self.window_length
        if self.segment_length > positions:
            rule = f"segment_length must be at most the model's {positions} positions"
            raise ValueError(complaint(rule, self.segment_length, f"use {positions} or less"))
        beside = positions - self.segment_length
        window = min(self.segment_length, beside) if self.window_length is None else self.window_length
        if window > beside:
            rule = f"window_length and segment_length must together be at most the model's {positions} positions"
            fix = f"use window_length={beside}, or a smaller segment_length"
            raise ValueError(complaint(rule, f"{window} and {self.segment_length}", fix))
        return window

    def _check(self) -> InfiniteFormerConfig:
        for name in ("num_attention_heads", "attention_head_size", "window_length"):
            value, smallest = getattr(self, name), 0 if name == "window_length" else 1
            if value is not None and value < smallest:
                raise ValueError(complaint(f"{name} must be at least {smallest}", value, "leave it out"))
        widths = tuple(self.basis_widths)
        return _settings(*(widths if name == "basis_widths" else getattr(self, name) for name in _SHARED))


@lru_cache(maxsize=32)
def _settings(*shared: Any) -> InfiniteFormerConfig:
    """Check what memories have in common; not to be written to. Kept, as it solves for eigenvalues."""
    settings: dict[str, Any] = dict(zip(_SHARED, shared, strict=True))
    return InfiniteFormerConfig(hidden_size=2, num_attention_heads=1, num_hidden_layers=1, **settings)


@strict
class MemoryAugmentedConfig(PreTrainedConfig):
    r"""A causal language model's config and that of the memory around it.

    Args:
        base_config: the model's own config, of any causal language model.
        memory_config: the memory's, a `LongTermMemoryConfig`; saved with everything that the model decided.
        base_model_name_or_path: where the model's weights came from; a ``memory_only`` checkpoint gets them there.
        base_weights: a few of those weights as they were when the memory was added, by which a ``memory_only``
            checkpoint knows its model again; None knows every model of the same sizes.
        layers_path: name of the list of decoder layers within the model; found by structure when not given.
        attention_name: name of the attention module within a layer; found by structure when not given.

    Raises:
        ValueError: the two do not fit, worded as rule, value received and fix.
    """

    model_type = "memory_augmented"
    sub_configs_defaults = {
        "base_config": SubConfigSpec(config_class=AutoConfig, model_type="gpt2"),
        "memory_config": SubConfigSpec(config_class=LongTermMemoryConfig),
    }
    keys_to_ignore_at_inference = ["cache", "memory", "memory_loss"]

    base_config: dict[str, Any] | PreTrainedConfig | None = None
    memory_config: dict[str, Any] | PreTrainedConfig | None = None
    base_model_name_or_path: str | None = None
    base_weights: dict[str, Any] | None = None
    layers_path: str | None = None
    attention_name: str | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(self.text_part, name, None))
        if self.num_hidden_layers > _MOST_LAYERS:
            rule = f"the model within must have at most {_MOST_LAYERS} layers (num_hidden_layers)"
            raise ValueError(complaint(rule, self.num_hidden_layers, "use fewer"))
        self.memory_config = self.memory.fitted_to(self.base_config)  # type: ignore[arg-type]
        self._check_parameters()
        check_entries(vars(self))

    def _check_parameters(self) -> None:
        memory = self.memory
        inner = memory.num_attention_heads * memory.attention_head_size  # type: ignore[operator]
        memories = 4 * inner * len(memory.memory_layers or ())
        # Of the model within at the least, whatever its kind.
        check_parameters(self.hidden_size * (memories + self.vocab_size + self.num_hidden_layers * self.hidden_size))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build from a saved dictionary, without its map of code and with no code that the model is to fetch."""
        check_entries(config_dict.get("base_config") or {})
        return super().from_dict(without_code_map(cls, config_dict), **kwargs)

    @property
    def memory(self) -> LongTermMemoryConfig:
        """``memory_config``, which is no dictionary any more."""
        return self.memory_config  # type: ignore[return-value]

    @property
    def text_part(self) -> PreTrainedConfig:
        """The part of ``base_config`` that says how the decoder looks."""
        return self.base_config.get_text_config(decoder=True)  # type: ignore[union-attr]

    @property
    def vocab_size(self) -> int:
        """Tokens the model knows."""
        return self.text_part.vocab_size

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:
        self.text_part.vocab_size = value

    @property
    def hidden_size(self) -> int:
        """Width of the model."""
        return self.text_part.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers."""
        return self.text_part.num_hidden_layers

    @property
    def num_attention_heads(self) -> int:
        """Heads of the model's own attention."""
        return self.text_part.num_attention_heads

    @property
    def initializer_range(self) -> float:
        """Standard deviation with which the memory's weights are initialised."""
        return float(getattr(self.text_part, "initializer_range", None) or 0.02)

    @property
    def segment_length(self) -> int:
        """The memory's segment length."""
        return self.memory.segment_length

    @property
    def memory_kl_weight(self) -> float:
        """Weight of the regulariser in the loss."""
        return float(self.memory.memory_kl_weight)

    @property
    def layer_types(self) -> list[str]:
        """Kind of the one cache layer that holds everything, by which `DynamicCache(config=config)` makes it."""
        return [CACHE_LAYER_TYPE]

    def validate_layer_type(self) -> None:
        """Nothing to check: transformers' list of layer types is closed, and ours has one kind."""


def _own_fields(config_class: type) -> list[Any]:
    inherited = {field.name for field in fields(PreTrainedConfig)}
    return [field for field in fields(config_class) if field.name not in inherited]


__all__ = ["LongTermMemoryConfig", "MemoryAugmentedConfig"]
