"""PyTorch infinity-former, ``infinite_former``."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults

from hf_longmem._errors import complaint
from hf_longmem.layers.continuous_attention import ContinuousAttention
from hf_longmem.layers.short_term_attention import ShortTermAttention
from hf_longmem.layers.token_loss import head_cross_entropy
from hf_longmem.models.continuing import ContinuesFromCache
from hf_longmem.models.documents import next_token_labels, unpack_documents
from hf_longmem.models.infinite_cache import InfiniteFormerCache, check_cache, keep
from hf_longmem.models.infinite_former.configuration_infinite_former import InfiniteFormerConfig
from hf_longmem.models.infinite_former.layer import InfiniteFormerLayer
from hf_longmem.models.infinite_former.outputs import InfiniteFormerCausalLMOutput, InfiniteFormerModelOutput
from hf_longmem.models.infinite_former.segments import join_tokens, plan_steps, steps_of_all, take_tokens, token_order
from hf_longmem.models.infinite_former.state import InfiniteFormerMemory, LayerState, check_memory
from hf_longmem.models.loading import CheckedLoading
from hf_longmem.models.padding import check_size, compact_padding, pop_documents
from hf_longmem.models.stream_memory import StreamMemory, carried_memory
from hf_longmem.models.token_ids import check_range


class InfiniteFormerPreTrainedModel(CheckedLoading):
    """Weight initialisation, loading, and what transformers needs to know of the family."""

    config: InfiniteFormerConfig
    config_class = InfiniteFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["InfiniteFormerLayer"]
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ContinuousAttention):
            bound = self.config.num_basis**-0.5
            init.uniform_(module.density_heads, -bound, bound)
            if module.zero_init:
                init.zeros_(module.o_proj.weight)
        if isinstance(module, ShortTermAttention) and module.positions == "relative":
            init.zeros_(module.content_bias)
            init.zeros_(module.position_bias)


class InfiniteFormerModel(InfiniteFormerPreTrainedModel):
    """The bare model: embeddings, layers of short-term attention and long-term memory, a final norm.

    Infinity-former (Martins, Marinho, Martins 2021, arXiv 2109.00301). A document may have any length and be given
    in any pieces; padding may stand anywhere; the same input gives the same output alone or in any batch.
    """

    def __init__(self, config: InfiniteFormerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([InfiniteFormerLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @unpack_documents
    @compact_padding
    @carried_memory
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        memory: InfiniteFormerMemory | None = None,
        reset_memory: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_memory_loss: bool | None = None,
        **kwargs: Any,
    ) -> InfiniteFormerModelOutput:
        """Encode a batch of documents, or the next pieces of them.

        Args:
            input_ids: token ids ``[B, T]``; or else ``inputs_embeds``, ``[B, T, E]``.
            attention_mask: ``[B, T]``, 0 for padding, which may stand anywhere.
            position_ids: not used: tokens are counted from each document's start.
            cache: `InfiniteFormerCache(config)`, or what an earlier call returned; the input goes on where it ended.
            use_cache: whether to return a cache. One is made where gradients are off (`torch.no_grad()`, `generate`).
            memory: while training, what the last call returned, to go on with its documents; or a `StreamMemory`, which
                is read and written in every mode.
            reset_memory: ``[B]``, rows that begin a new document; what ``cache`` or ``memory`` hold of them is
                forgotten first.
            output_hidden_states: also return the embeddings and every layer's output.
            output_memory_loss: whether to return the regulariser; default, where gradients are on. (A head's is one
                number, and a pipeline takes each output apart by rows.)
            kwargs: ``document_ids``, integer ``[B, T]``, rising within a row: the tokens of one id are a document of
                their own, computed as if alone. Excludes ``cache``, ``memory`` and ``reset_memory``; returns neither.

        Raises:
            ValueError: an empty input, both a cache and a memory, a cache or memory of another model or batch, and, on
                the CPU, ids outside the vocabulary.
        """
        if (input_ids is None) == (inputs_embeds is None):
            rule = "exactly one of input_ids and inputs_embeds must be given"
            raise ValueError(complaint(rule, "both" if input_ids is not None else "neither", "pass one"))
        if cache is not None and memory is not None:
            fix = "pass memory while training and cache otherwise"
            raise ValueError(complaint("cache and memory exclude each other", "both", fix))
        if input_ids is not None:
            check_range("token ids", input_ids, self.config.vocab_size, "use the model's tokenizer")
        embeddings: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        rows, length = embeddings.shape[:2]
        check_size(embeddings)
        if cache is None and memory is None and use_cache and not self.training and not torch.is_grad_enabled():
            cache = InfiniteFormerCache(self.config)

        state = self._begin(cache, memory, rows, embeddings.device)
        if reset_memory is not None:
            state = state.reset(reset_memory)
        counts = [length] * rows if attention_mask is None else attention_mask.sum(dim=1).tolist()
        output_hidden_states = (
            self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        )
        outputs = self._run(embeddings, state, counts, bool(output_hidden_states))
        if cache is not None:
            if reset_memory is not None and bool(reset_memory.all()):
                cache.reset()
            keep(cache, outputs.memory, length)  # type: ignore[arg-type]
        keep_memory = cache is None and (memory is not None or self.training)
        keep_loss = torch.is_grad_enabled() if output_memory_loss is None else output_memory_loss
        return InfiniteFormerModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            cache=cache,
            memory=outputs.memory if keep_memory else None,
            memory_loss=outputs.memory_loss if keep_loss else None,
            hidden_states=outputs.hidden_states,
        )

    def empty_memory(self, batch_size: int, device: torch.device | None = None) -> InfiniteFormerMemory:
        """Make a memory of documents not yet begun."""
        device = self.embed_tokens.weight.device if device is None else device
        layers = tuple(layer.empty_state(batch_size, device) for layer in self.layers)  # type: ignore[operator]
        return InfiniteFormerMemory(torch.zeros(batch_size, dtype=torch.int64, device="cpu"), layers)

    def _begin(
        self, cache: Cache | None, memory: InfiniteFormerMemory | None, rows: int, device: torch.device
    ) -> InfiniteFormerMemory:
        if cache is not None:
            memory = check_cache(cache, self.config)
        if memory is None:
            return self.empty_memory(rows, device)
        check_memory(memory, self.config, rows)
        return memory.detach()

    def _run(
        self, embeddings: Tensor, state: InfiniteFormerMemory, counts: list[int], output_hidden_states: bool
    ) -> InfiniteFormerModelOutput:
        """The segment loop: every layer over one segment, then every layer over the next."""
        config = self.config
        seen: list[int] = state.seen_B.tolist()
        width = state.layers[0].inputs_BSE.shape[1]
        sizes: tuple[Any, ...] = (config.segment_length, config.short_term_window, width, embeddings.device)
        steps = list(plan_steps(seen, counts, *sizes))
        at_least = steps_of_all(len(steps), self.layers, embeddings.device)
        if at_least > len(steps):
            steps = list(plan_steps(seen, counts, *sizes, at_least=at_least))
        embeddings = nn.functional.dropout(embeddings, config.hidden_dropout_prob, self.training)
        states = list(state.layers)
        outputs: list[list[Tensor]] = []
        divergences: list[Tensor] = []
        memory_dtype = torch.promote_types(embeddings.dtype, torch.float32)
        for number, step in enumerate(steps):
            if torch.is_grad_enabled() and number % config.bptt_segments == 0:
                states = [layer_state.map(torch.Tensor.detach) for layer_state in states]
            hidden_states = take_tokens(embeddings, step)
            recorded = [hidden_states]
            divergence = hidden_states.new_zeros(hidden_states.shape[:2], dtype=memory_dtype)
            for index, layer in enumerate(self.layers):
                given = hidden_states
                hidden_states, states[index], of_layer = layer(given, states[index], step)
                if config.bptt_segments > 1 and len(steps) > 1:
                    _check_graph(given, states[index])
                divergence = divergence + of_layer
                recorded.append(hidden_states)
            outputs.append(recorded if output_hidden_states else recorded[-1:])
            divergences.append(divergence[..., None])

        order = token_order(steps, counts, embeddings.shape[1])
        per_layer = [join_tokens(parts, order) for parts in zip(*outputs, strict=True)]
        last_hidden_state = self.norm(per_layer[-1])
        memory_loss = None
        if config.memory_layers:
            memory_loss = join_tokens(divergences, order)[..., 0] / len(config.memory_layers)
            if order is not None:
                token_T = torch.arange(memory_loss.shape[1], device=memory_loss.device)
                real_BT = token_T < torch.tensor(counts, device=memory_loss.device)[:, None]
                memory_loss = torch.where(real_BT, memory_loss, torch.zeros_like(memory_loss))
        kept = InfiniteFormerMemory(state.seen_B + torch.tensor(counts, device="cpu"), tuple(states)).detach()
        return InfiniteFormerModelOutput(
            last_hidden_state=last_hidden_state,
            memory=kept,
            memory_loss=memory_loss,  # type: ignore[arg-type]
            hidden_states=(*per_layer[:-1], last_hidden_state) if output_hidden_states else None,  # type: ignore[arg-type]
        )


def _check_graph(given: Tensor, state: LayerState) -> None:
    if given.requires_grad and torch.is_grad_enabled() and not state.inputs_BSE.requires_grad:
        rule = "bptt_segments above 1 needs gradients through what a layer remembers"
        fix = 'pass {"use_reentrant": False} as gradient_checkpointing_kwargs, or use bptt_segments=1'
        raise ValueError(complaint(rule, "a layer that cuts them, as reentrant checkpointing does", fix))


class InfiniteFormerForCausalLM(InfiniteFormerPreTrainedModel, ContinuesFromCache, GenerationMixin):
    """The model with a language-model head: predicts each next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _is_stateful = True

    def __init__(self, config: InfiniteFormerConfig) -> None:
        super().__init__(config)
        self.model = InfiniteFormerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

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
        memory: InfiniteFormerMemory | StreamMemory | None = None,
        reset_memory: torch.Tensor | None = None,
        document_ids: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> InfiniteFormerCausalLMOutput:
        """Predict the next token at every position.

        Args:
            labels: ``[B, T]``, as ``input_ids`` (shifted in here), -100 where nothing is to be predicted. While
                training, the loss is computed a few tokens' logits at a time and ``logits`` is None.
            logits_to_keep: compute logits for the last so many positions only, 0 for all.
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, memory, reset_memory,
                document_ids: see `InfiniteFormerModel`.

        Returns:
            ``loss`` if labels are given: the mean cross entropy, or its sum over ``num_items_in_batch``; while
            training, ``memory_kl_weight * memory_loss`` more, weighted by this batch's share of the items.
            ``memory_loss`` is the mean over the tokens whose labels count: as a token's share of the loss depends on
            no other token, it does not matter how documents are split among batches and processes.
            ``logits`` ``[B, T, V]``.
        """
        document_ids = pop_documents(kwargs, document_ids)
        asked = use_cache and cache is None and memory is None and document_ids is None
        if asked and torch.is_grad_enabled() and not self.training:
            # Asked for by name, and not by the config's default, a cache is made even where gradients are on.
            cache = InfiniteFormerCache(self.config)
        if labels is not None:
            kwargs.setdefault("output_memory_loss", True)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            memory=memory,
            reset_memory=reset_memory,
            document_ids=document_ids,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        loss = logits = None
        memory_loss = outputs.memory_loss
        if labels is None:
            memory_loss = mean_memory_loss(memory_loss, attention_mask)
        else:
            shift_labels = kwargs.get("shift_labels")
            if shift_labels is None:
                shift_labels = next_token_labels(labels, document_ids, attention_mask)
            num_items = kwargs.get("num_items_in_batch")
            loss = head_cross_entropy(
                self.lm_head,
                hidden_states,
                shift_labels,
                chunk_size=self.config.chunk_size_lm_head,
                num_items=num_items,
            )
            memory_loss = mean_memory_loss(memory_loss, shift_labels != -100)
            if self.training:
                loss = add_memory_loss(loss, memory_loss, self.config, shift_labels, num_items)
        if labels is None or not self.training:
            logits = self.lm_head(slice_logits_to_keep(hidden_states, logits_to_keep))
        return InfiniteFormerCausalLMOutput(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,
            cache=outputs.cache,
            memory=outputs.memory,
            memory_loss=memory_loss,  # type: ignore[arg-type]
            hidden_states=outputs.hidden_states,
        )


def mean_memory_loss(memory_loss_BT: Tensor | None, counted_BT: Tensor | None) -> Tensor | None:
    """The mean of the tokens' regulariser over those that count, all if None; 0 if none does."""
    if memory_loss_BT is None or counted_BT is None:
        return None if memory_loss_BT is None else memory_loss_BT.mean()
    counted_BT = counted_BT[:, -memory_loss_BT.shape[1] :].to(memory_loss_BT.device, memory_loss_BT.dtype)
    return (memory_loss_BT * counted_BT).sum() / counted_BT.sum().clamp(min=1)


def add_memory_loss(
    loss: Tensor,
    memory_loss: Tensor | None,
    config: InfiniteFormerConfig,
    labels: Tensor,
    num_items: Tensor | int | None,
) -> Tensor:
    """Add the weighted regulariser to a loss, as a mean over the same items as that one.

    Args:
        loss: a mean over the labels that count, or their sum over ``num_items``.
        memory_loss: the regulariser, a mean over those same labels of this batch.
        config: says its weight.
        labels: -100 where nothing counts.
        num_items: items of all batches that make one optimizer step together.
    """
    if memory_loss is None or config.memory_kl_weight == 0:
        return loss
    weighted = config.memory_kl_weight * memory_loss
    if num_items is not None:
        items = torch.as_tensor(num_items, device=loss.device).clamp(min=1)
        weighted = weighted * (labels != -100).sum() / items
    return loss + weighted.to(loss.dtype)


__all__ = [
    "InfiniteFormerCausalLMOutput",
    "InfiniteFormerForCausalLM",
    "InfiniteFormerMemory",
    "InfiniteFormerModel",
    "InfiniteFormerModelOutput",
    "InfiniteFormerPreTrainedModel",
]
