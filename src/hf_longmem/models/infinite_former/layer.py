"""One layer of the infinity-former."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longmem.layers.continuous_attention import ContinuousAttention
from hf_longmem.layers.feed_forward import FeedForward
from hf_longmem.layers.short_term_attention import ShortTermAttention
from hf_longmem.models.infinite_former.configuration_infinite_former import InfiniteFormerConfig
from hf_longmem.models.infinite_former.segments import Step, append
from hf_longmem.models.infinite_former.state import LayerState


class InfiniteFormerLayer(GradientCheckpointingLayer):
    """``y = x + ShortTerm(LN(x)) + LongTerm(LN(x))``, then ``y + FeedForward(LN(y))``."""

    def __init__(self, config: InfiniteFormerConfig, layer_idx: int) -> None:
        super().__init__()
        sizes = (config.hidden_size, config.num_attention_heads, config.attention_head_size)
        self.window: int = config.short_term_window  # type: ignore[assignment]  # resolved when the config was built
        self.segment_length = config.segment_length
        self.dropout = config.hidden_dropout_prob
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = ShortTermAttention(
            *sizes,  # type: ignore[arg-type]
            positions=config.position_embedding_type,  # type: ignore[arg-type]
            theta=config.rope_theta,
            dropout=config.attention_probs_dropout_prob,
        )
        self.long_term_memory: ContinuousAttention | None = None
        if layer_idx in config.memory_layers:  # type: ignore[operator]
            self.long_term_memory = ContinuousAttention(
                *sizes,  # type: ignore[arg-type]
                spec=config.regression,
                decay=config.decay,
                uniform_segments=config.uniform_segments,
                sticky=config.sticky_memories,
                draw=config.sticky_draw,  # type: ignore[arg-type]
                num_bins=config.histogram_bins,
                variance_floor=config.memory_variance_floor,
                prior_std=config.memory_prior_std,
                gate=config.memory_gate == "convolution",
                zero_init=config.memory_zero_init,
            )
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = FeedForward(
            config.hidden_size,
            config.feed_forward_size,  # type: ignore[arg-type]
            activation=ACT2FN[config.hidden_act],
            dropout=config.hidden_dropout_prob,
            chunk_size=config.chunk_size_feed_forward,
        )

    def empty_state(self, batch_size: int, device: torch.device) -> LayerState:
        """Make a state that remembers nothing."""
        weight = self.input_layernorm.weight
        inputs_BSE = torch.zeros(batch_size, self.window, len(weight), dtype=weight.dtype, device=device)
        memory = None
        if self.long_term_memory is not None:
            memory_dtype = torch.promote_types(weight.dtype, torch.float32)
            memory = self.long_term_memory.empty(batch_size, device, memory_dtype)
        return LayerState(inputs_BSE, None, None, memory)

    def forward(self, hidden_states: Tensor, state: LayerState, step: Step) -> tuple[Tensor, LayerState, Tensor]:
        """Map ``[B, T, E]`` to the same, the state to the next one; also each token's regulariser ``[B, T]``."""
        inputs = self.input_layernorm(hidden_states)
        inputs_BSE = append(state.inputs_BSE, inputs, step.move)
        reuse = not torch.is_grad_enabled()
        keys, values, kept_keys, kept_values = self._keys_values(inputs, inputs_BSE, state, step, reuse)
        attended = self.self_attn(inputs, keys, values, step.places_BT, step.first, step.mask_BTS)

        memory, projection = state.memory, state.projection if reuse else None
        divergence = hidden_states.new_zeros(hidden_states.shape[:2])
        if self.long_term_memory is not None and memory is not None:
            if step.write:
                segment = state.inputs_BSE[:, self.window : self.window + self.segment_length]
                memory, projection = self.long_term_memory.write(memory, segment, step.write_B), None
            # An empty memory is read too where gradients may be asked for: none of its parameters goes without.
            if step.holds or not reuse:
                if projection is None:
                    projection = self.long_term_memory.project(memory)
                recalled, memory, divergence = self.long_term_memory(inputs, projection, memory, step.real_BT)
                attended = attended + recalled
            if not step.write and not reuse:
                attended = attended + self.long_term_memory.unused().to(attended.dtype)
        hidden_states = hidden_states + nn.functional.dropout(attended, self.dropout, self.training)
        fed_forward = self.mlp(self.post_attention_layernorm(hidden_states))
        hidden_states = hidden_states + nn.functional.dropout(fed_forward, self.dropout, self.training)
        new_state = LayerState(inputs_BSE, kept_keys, kept_values, memory, projection if reuse else None)
        return hidden_states, new_state, divergence

    def _keys_values(
        self, inputs: Tensor, inputs_BSE: Tensor, state: LayerState, step: Step, reuse: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys and values from ``step.first`` on, and what of them is kept."""
        if not reuse:
            # As Transformer-XL does: the window's inputs are constants, their projections are not.
            return *self.self_attn.keys_values(inputs_BSE[:, step.first :]), None, None
        if state.keys_BSE is None or state.values_BSE is None:
            keys, values = self.self_attn.keys_values(inputs_BSE)
        else:
            keys, values = self.self_attn.keys_values(inputs)
            keys, values = append(state.keys_BSE, keys, step.move), append(state.values_BSE, values, step.move)
        return keys[:, step.first :], values[:, step.first :], keys, values


__all__ = ["InfiniteFormerLayer"]
