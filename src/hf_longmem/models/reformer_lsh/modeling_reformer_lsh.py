"""PyTorch Reformer with angular LSH attention, ``reformer_lsh``."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from hf_longmem._errors import complaint
from hf_longmem.layers.feed_forward import FeedForward
from hf_longmem.layers.local_attention import LocalAttention
from hf_longmem.layers.lsh_attention import LSHAttention
from hf_longmem.layers.positions import AxialPositionEmbeddings, AxialTables, rotary_angles
from hf_longmem.layers.token_loss import head_cross_entropy
from hf_longmem.models.cache import check_cache, check_hashing, next_positions
from hf_longmem.models.documents import next_token_labels
from hf_longmem.models.padding import compact_padding, pop_documents
from hf_longmem.models.reformer_lsh.configuration_reformer_lsh import ReformerLSHConfig
from hf_longmem.models.reformer_lsh.reformer_loading import ReformerCheckpoints
from hf_longmem.models.reformer_lsh.resizing import ResizablePositions
from hf_longmem.models.token_ids import check_range
from hf_longmem.ops.documents import document_positions
from hf_longmem.ops.reversible import ReversibleTape, reversible_block


def _build_attention(config: ReformerLSHConfig, layer_idx: int) -> LSHAttention | LocalAttention:
    sizes: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "head_dim": config.attention_head_size,
        "causal": config.is_decoder,
    }
    if config.attn_layers[layer_idx] == "lsh":
        options: dict[str, Any] = {
            "layer_idx": layer_idx,
            "num_hashes": config.num_hashes,
            "num_buckets": config.num_buckets,
            "hash_seed": config.hash_seed,
            "chunk_length": config.lsh_attn_chunk_length,
            "chunks_before": config.lsh_num_chunks_before,
            "chunks_after": config.lsh_num_chunks_after,
            "candidates": config.lsh_candidates,
            "merge": config.round_merge,
            "dropout": config.lsh_attention_probs_dropout_prob,
        }
        if config.lsh_candidates == "chunk" and config.round_merge == "sum" and "local" in config.attn_layers:
            chunks = config.lsh_attn_chunk_length, config.local_attn_chunk_length
            options |= {"pad_beyond": min(chunks), "pad_to_multiple_of": math.lcm(*chunks)}
        return LSHAttention(**sizes, **options)
    options = {
        "rule": config.local_candidates,
        "chunk_length": config.local_attn_chunk_length,
        "chunks_before": config.local_num_chunks_before,
        "chunks_after": config.local_num_chunks_after,
        "dropout": config.local_attention_probs_dropout_prob,
    }
    return LocalAttention(**sizes, **options)


class ReformerLSHLayer(GradientCheckpointingLayer):
    """``y1 = x1 + Attention(LayerNorm(x2))``, ``y2 = x2 + FeedForward(LayerNorm(y1))``."""

    def __init__(self, config: ReformerLSHConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = _build_attention(config, layer_idx)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = FeedForward(
            config.hidden_size,
            config.feed_forward_size,  # type: ignore[arg-type]  # resolved when the config was built
            activation=ACT2FN[config.hidden_act],
            dropout=config.hidden_dropout_prob,
            chunk_size=config.chunk_size_feed_forward,
        )
        self.dropout = config.hidden_dropout_prob

    def forward(
        self,
        hidden_states: Tensor,
        attention_stream: Tensor,
        attention_mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        tape: ReversibleTape | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Map the streams (x2, x1) to (y2, y1), each ``[B, T, E]``; ``hidden_states`` is the second of the paper."""

        def attend(x: Tensor) -> Tensor:
            out, _ = self.self_attn(_normalise(self.input_layernorm, x), attention_mask, rotary, **kwargs)
            return nn.functional.dropout(out, self.dropout, self.training)

        def feed_forward(x: Tensor) -> Tensor:
            out = self.mlp(_normalise(self.post_attention_layernorm, x))
            return nn.functional.dropout(out, self.dropout, self.training)

        attention_stream, hidden_states = reversible_block(attend, feed_forward, attention_stream, hidden_states, tape)
        return hidden_states, attention_stream


def _normalise(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    # The streams are float32 in a half-precision model too: their sums have to be undone in the backward pass.
    return norm(x.to(norm.weight.dtype))


class ReformerLSHPreTrainedModel(ResizablePositions, ReformerCheckpoints):
    """Weight initialisation, loading, and what transformers needs to know of the family."""

    config: ReformerLSHConfig
    config_class = ReformerLSHConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ReformerLSHLayer"]
    _can_record_outputs = {"hidden_states": ReformerLSHLayer, "attentions": [LSHAttention, LocalAttention]}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, AxialTables):
            for weight in module:
                init.normal_(weight, std=self.config.axial_norm_std)


class ReformerLSHModel(ReformerLSHPreTrainedModel):
    """The bare model: embeddings, reversible layers, merged and normalised streams.

    Reformer (Kitaev, Kaiser, Levskaya 2020, arXiv 2001.04451). Padding may stand anywhere; no length has to match
    anything; the same input gives the same output alone or in any batch.
    """

    def __init__(self, config: ReformerLSHConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings: nn.Module | None = None
        if config.position_embedding_type == "axial":
            self.position_embeddings = AxialPositionEmbeddings(
                config.axial_pos_shape,  # type: ignore[arg-type]
                config.axial_pos_embds_dim,  # type: ignore[arg-type]
            )
        elif config.position_embedding_type == "learned":
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList([ReformerLSHLayer(config, i) for i in range(len(config.attn_layers))])
        self.norm = nn.LayerNorm(config.last_hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @compact_padding
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        num_hashes: int | None = None,
        hash_seed: int | None = None,
        document_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Encode a batch of sequences.

        Args:
            input_ids: token ids ``[B, T]``; or else ``inputs_embeds``, ``[B, T, E]``.
            attention_mask: ``[B, T]``, 0 for padding, which may stand anywhere.
            position_ids: ``[B, T]`` or ``[1, T]``; default: how many real tokens stand before in the document.
            cache: `DynamicCache(config=config)`, or what an earlier call returned; the input goes on where it ended.
            use_cache: whether to return a cache. One is made where gradients are off (`torch.no_grad()`, `generate`).
            num_hashes: hash rounds of this call instead of ``config.num_hashes``.
            hash_seed: fixes the hash rotations of this call, in training too.
            document_ids: integer ``[B, T]``, rising within a row: the tokens of one id are a document of their own,
                which gives what it gives alone (under the ``"chunk"`` rules, whose chunks are counted from the row's
                start, it only sees no other). Excludes ``cache``, and none is made.

        Raises:
            ValueError: an empty or too long input, and, on the CPU, ids outside the vocabulary or the positions.
        """
        if (input_ids is None) == (inputs_embeds is None):
            received = "both" if input_ids is not None else "neither"
            rule = "exactly one of input_ids and inputs_embeds must be given"
            raise ValueError(complaint(rule, received, "pass one"))
        output_attentions = kwargs.get("output_attentions", self.config.output_attentions)
        if cache is not None and document_ids is not None:
            fix = "go on with one document a row, or leave the cache out"
            raise ValueError(complaint("document_ids and cache exclude each other", "both", fix))
        if cache is not None:
            rows = len(input_ids if input_ids is not None else inputs_embeds)  # type: ignore[arg-type]
            kinds, causal = self.config.layer_types, self.config.is_decoder
            check_cache(cache, rows, kinds, causal=causal, output_attentions=output_attentions)
            rounds = self.config.num_hashes if num_hashes is None else num_hashes
            check_hashing(cache, (rounds, self.config.hash_seed if hash_seed is None else hash_seed))
            if self.gradient_checkpointing and self.training:
                rule = "layers that are checkpointed in training take no cache"
                raise ValueError(complaint(rule, "a cache", "pass use_cache=False, or call model.eval()"))
        elif self._makes_cache(use_cache, output_attentions, document_ids):
            cache = DynamicCache(config=self.config)
        if num_hashes is not None and num_hashes < 1:
            raise ValueError(complaint("num_hashes must be at least 1", num_hashes, "leave it out or use 1"))
        if hash_seed is not None and not 0 <= hash_seed < 2**63:
            raise ValueError(complaint("hash_seed must be from 0 to 2^63 - 1", hash_seed, "leave it out or use 0"))
        if input_ids is not None:
            check_range("token ids", input_ids, self.embed_tokens.num_embeddings, "use the model's tokenizer")
        embeddings: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if embeddings.dim() != 3 or embeddings.shape[-1] != self.config.hidden_size:
            rule = f"inputs must be ids [batch, tokens] or embeddings [batch, tokens, {self.config.hidden_size}]"
            given: Any = input_ids if inputs_embeds is None else inputs_embeds
            fix = "add the batch axis, or use the model's own embeddings"
            raise ValueError(complaint(rule, tuple(given.shape), fix))
        length = embeddings.shape[1]
        # Packed documents each have positions from 0 on, and together may be longer.
        if not 0 < length <= (self.config.num_positions if document_ids is None else length):
            rule = f"an input must have from 1 to {self.config.num_positions} tokens (max_position_embeddings)"
            raise ValueError(complaint(rule, length, "cut it, or build the model for more positions"))
        positions: Tensor | None = position_ids
        if positions is None and document_ids is not None:
            positions = document_positions(document_ids)
        elif positions is None:
            positions = next_positions(cache, length, embeddings.device)
        if attention_mask is not None:
            # Padding, counted on after a row's real tokens, could leave the table.
            positions = torch.where(attention_mask, positions, 0)
        check_range(
            "position_ids",
            positions,
            self.config.num_positions,
            "use a shorter text, or max_position_embeddings for more",
        )

        rotary = None
        if self.position_embeddings is not None:
            embeddings = embeddings + self.position_embeddings(positions)
        else:
            rotary = rotary_angles(positions, self.config.attention_head_size, self.config.rope_theta)  # type: ignore[arg-type]
        hidden_states = self._dropout(embeddings)
        hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        attention_stream = hidden_states

        # Checkpointing, where the user turns it on, keeps each layer's inputs instead; and what runs again in the
        # backward would enter its tokens into a cache twice.
        reversible = self.config.reversible and not self.gradient_checkpointing and cache is None
        tape = ReversibleTape() if reversible else None
        for layer_idx, layer in enumerate(self.layers):
            hidden_states, attention_stream = layer(
                hidden_states,
                attention_stream,
                attention_mask=attention_mask,
                rotary=rotary,
                tape=tape,
                num_hashes=num_hashes,
                hash_seed=hash_seed,
                output_attentions=output_attentions,
                cache=None if cache is None else cache.layers[layer_idx],
                document_ids=document_ids,
            )

        if self.config.stream_merge == "concat":
            merged = torch.cat((attention_stream, hidden_states), dim=-1)
        else:
            merged = (attention_stream + hidden_states) / 2
        return BaseModelOutputWithPast(last_hidden_state=self._dropout(_normalise(self.norm, merged)), cache=cache)

    def _makes_cache(self, use_cache: bool | None, output_attentions: bool, document_ids: Tensor | None) -> bool:
        wanted = bool(use_cache) and self.config.is_decoder and not torch.is_grad_enabled()
        return wanted and not output_attentions and document_ids is None

    def _dropout(self, hidden_states: Tensor) -> Tensor:
        return nn.functional.dropout(hidden_states, self.config.hidden_dropout_prob, self.training)


class ReformerLSHForCausalLM(ReformerLSHPreTrainedModel, GenerationMixin):
    """The model with a language-model head: predicts each next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _is_stateful = True

    def __init__(self, config: ReformerLSHConfig) -> None:
        super().__init__(config)
        if not config.is_decoder:
            rule = "ReformerLSHForCausalLM needs a causal model, is_decoder=True"
            raise ValueError(complaint(rule, config.is_decoder, "set is_decoder=True, or use ReformerLSHForMaskedLM"))
        self.model = ReformerLSHModel(config)
        self.lm_head = nn.Linear(config.last_hidden_size, config.vocab_size)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # transformers answers False for every class with "reformer" in its name.
        return True

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        next_sequence_length: int | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As transformers does; without a cache, every step runs on the whole sequence, embedded prompts included."""
        if cache is None:
            next_sequence_length = None
            if inputs_embeds is not None and not is_first_iteration:
                generated: Any = self.get_input_embeddings()(input_ids)
                inputs_embeds = torch.cat((inputs_embeds, generated), dim=1)  # type: ignore[assignment]
                is_first_iteration = True
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            cache=cache,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        num_hashes: int | None = None,
        hash_seed: int | None = None,
        document_ids: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token at every position.

        Args:
            labels: ``[B, T]``, as ``input_ids`` (shifted in here), -100 where nothing is to be predicted. While
                training, the loss is computed a few tokens' logits at a time and ``logits`` is None.
            logits_to_keep: compute logits for the last so many positions only, 0 for all.
            input_ids, attention_mask, position_ids, inputs_embeds, num_hashes, hash_seed, document_ids: see
                `ReformerLSHModel`.

        Returns:
            ``loss`` if labels are given (the mean, or the sum over ``num_items_in_batch``), ``logits`` ``[B, T, V]``.
        """
        document_ids = pop_documents(kwargs, document_ids)
        attentions = kwargs.get("output_attentions", self.config.output_attentions)
        asked = use_cache and cache is None and document_ids is None and not attentions
        if asked and torch.is_grad_enabled() and not self.training:
            # Asked for by name, and not by the config's default, a cache is made even where gradients are on.
            cache = DynamicCache(config=self.config)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_hashes=num_hashes,
            hash_seed=hash_seed,
            document_ids=document_ids,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        loss = logits = None
        if labels is not None:
            shift_labels = kwargs.get("shift_labels")
            if shift_labels is None:
                shift_labels = next_token_labels(labels, document_ids, attention_mask)
            loss = token_loss(self, hidden_states, shift_labels, kwargs)
        if labels is None or not self.training:
            logits = self.lm_head(slice_logits_to_keep(hidden_states, logits_to_keep))
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def token_loss(model: Any, hidden_states: Tensor, labels: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Cross entropy of ``model.lm_head`` over labels that are already shifted, as a forward's ``kwargs`` ask for it."""
    return head_cross_entropy(
        model.lm_head,
        hidden_states,
        labels,
        chunk_size=model.config.chunk_size_lm_head,
        num_items=kwargs.get("num_items_in_batch"),
    )


__all__ = ["ReformerLSHForCausalLM", "ReformerLSHModel", "ReformerLSHPreTrainedModel"]
