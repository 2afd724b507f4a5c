"""PyTorch long-term memory around another causal language model, ``memory_augmented``."""

import copy
import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from hf_longmem._errors import complaint
from hf_longmem.layers.continuous_attention import ContinuousAttention
from hf_longmem.models.continuing import ContinuesFromCache
from hf_longmem.models.documents import next_token_labels, unpack_documents
from hf_longmem.models.infinite_former.modeling_infinite_former import add_memory_loss, mean_memory_loss
from hf_longmem.models.memory_augmented.attachment import DecoderLayers, find_decoder_layers
from hf_longmem.models.memory_augmented.cache import MemoryAugmentedCache, check_cache
from hf_longmem.models.memory_augmented.configuration_memory_augmented import (
    LongTermMemoryConfig,
    MemoryAugmentedConfig,
)
from hf_longmem.models.memory_augmented.loading import MemoryCheckpoints
from hf_longmem.models.memory_augmented.loop import SegmentLoop
from hf_longmem.models.memory_augmented.outputs import MemoryAugmentedCausalLMOutput, MemoryAugmentedOutput
from hf_longmem.models.memory_augmented.state import MemoryAugmentedState, check_state
from hf_longmem.models.padding import check_size, finite_padding, pop_documents, real_tokens
from hf_longmem.models.segments import gather_tokens
from hf_longmem.models.stream_memory import StreamMemory, carried_memory


class LongTermMemory(nn.Module):
    """The memories' parameters, one `ContinuousAttention` for each layer that has one, named by its index."""

    def __init__(self, config: LongTermMemoryConfig, hidden_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for index in config.memory_layers or ():
            self.layers[str(index)] = ContinuousAttention(
                hidden_size,
                config.num_attention_heads,  # type: ignore[arg-type]  # resolved when the model's config was built
                config.attention_head_size,  # type: ignore[arg-type]
                spec=config.regression,
                decay=config.decay,
                uniform_segments=config.uniform_segments,
                sticky=config.sticky_memories,
                draw=config.sticky_draw,  # type: ignore[arg-type]
                num_bins=config.histogram_bins,
                variance_floor=float(config.memory_variance_floor),
                prior_std=float(config.memory_prior_std),
                gate=config.memory_gate == "convolution",
                zero_init=config.memory_zero_init,
            )


class MemoryAugmentedForCausalLM(MemoryCheckpoints, ContinuesFromCache, GenerationMixin):
    """A causal language model, untouched as ``language_model``, and a memory of everything before its window.

    A document may have any length and be given in any pieces. It is read in segments of ``segment_length`` tokens; with
    each, the model reads the ``window_length`` tokens before it again, at positions that start from 0 in every block,
    and what its attention gives in each of ``memory_layers`` is complemented by what that layer's memory of all
    segments before gives. Up to one segment that is the model as it was, until a memory is trained.

    Args:
        config: the config of both.
        base_model: the model; made from ``config.base_config`` if it is not given.
    """

    config: MemoryAugmentedConfig
    config_class = MemoryAugmentedConfig
    base_model_prefix = "language_model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _is_stateful = True

    def __init__(self, config: MemoryAugmentedConfig, base_model: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        place: dict[str, Any] = {}
        if base_model is None:
            base_model = AutoModelForCausalLM.from_config(config.base_config)
        else:
            weight = base_model.get_input_embeddings().weight
            place = {"device": weight.device, "dtype": weight.dtype}
            self.generation_config = copy.deepcopy(base_model.generation_config)
        self.language_model = base_model
        # One object, so that resized embeddings or another attention implementation are known to both.
        config.base_config = base_model.config
        self.long_term_memory = LongTermMemory(config.memory, config.hidden_size).to(**place)
        self.hooks_key = self.decoder_layers().attach()
        self.post_init()

    @property
    def base_takes(self) -> frozenset[str]:
        """Names of the arguments that the model takes."""
        return frozenset(inspect.signature(self.language_model.forward).parameters)

    def init_weights(self) -> None:
        """Initialise the memory; the model around which it is has initialised itself, or comes with its weights."""
        if not next(self.long_term_memory.parameters()).is_meta:
            for module in reversed(list(self.long_term_memory.modules())):  # the parts before the whole
                self._initialize_weights(module)
        self.tie_weights(recompute_mapping=False)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ContinuousAttention):
            bound = module.spec.basis.num_basis**-0.5
            init.uniform_(module.density_heads, -bound, bound)
            if module.zero_init:
                init.zeros_(module.o_proj.weight)

    def decoder_layers(self) -> DecoderLayers:
        """The model's decoder layers, and what is known of them."""
        return find_decoder_layers(self.language_model, self.config.layers_path, self.config.attention_name)

    def get_input_embeddings(self) -> nn.Module:
        """The model's token embeddings."""
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the model's token embeddings."""
        self.language_model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module | None:
        """The model's head."""
        return self.language_model.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the model's head."""
        self.language_model.set_output_embeddings(new_embeddings)

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
        memory: MemoryAugmentedState | StreamMemory | None = None,
        reset_memory: torch.Tensor | None = None,
        document_ids: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> MemoryAugmentedCausalLMOutput:
        """Predict the next token at every position of a batch of documents, or of the next pieces of them.

        Args:
            input_ids: token ids ``[B, T]``; or else ``inputs_embeds``, ``[B, T, E]``.
            attention_mask: ``[B, T]``, 0 for padding, which may stand anywhere.
            position_ids: not used: tokens are counted from each document's start.
            cache: `MemoryAugmentedCache(config)`, or what an earlier call returned; the input goes on where it ended.
            labels: ``[B, T]``, as ``input_ids`` (shifted in here), -100 where nothing is to be predicted. With them
                the logits of all tokens exist at once.
            use_cache: whether to return a cache. One is made where gradients are off (`torch.no_grad()`, `generate`).
            memory: while training, what the last call returned, to go on with its documents; or a `StreamMemory`, which
                is read and written in every mode.
            reset_memory: ``[B]``, rows that begin a new document; what ``cache`` or ``memory`` hold of them is
                forgotten first.
            document_ids: integer ``[B, T]``, rising within a row: the tokens of one id are a document of their own,
                computed as if alone. Excludes ``cache``, ``memory`` and ``reset_memory``; returns neither.
            logits_to_keep: compute logits for the last so many positions only, 0 for all.
            output_hidden_states: also return what the model gives as its ``hidden_states``.

        Returns:
            ``loss`` if labels are given: the mean cross entropy, or its sum over ``num_items_in_batch``; while
            training, ``memory_kl_weight * memory_loss`` more, weighted by this batch's share of the items.
            ``memory_loss`` is the mean over the tokens whose labels count. ``logits`` ``[B, T, V]``.

        Raises:
            ValueError: an empty input, both a cache and a memory, or a cache or memory of another model or batch.
        """
        if (input_ids is None) == (inputs_embeds is None):
            rule = "exactly one of input_ids and inputs_embeds must be given"
            raise ValueError(complaint(rule, "both" if input_ids is not None else "neither", "pass one"))
        if cache is not None and memory is not None:
            fix = "pass memory while training and cache otherwise"
            raise ValueError(complaint("cache and memory exclude each other", "both", fix))
        document_ids = pop_documents(kwargs, document_ids)
        if use_cache and cache is None and memory is None and document_ids is None and not self.training:
            # Asked for by name, and not by the config's default, a cache is made even where gradients are on.
            cache = MemoryAugmentedCache(self.config)
        if not isinstance(logits_to_keep, int) or labels is not None or document_ids is not None:
            kept, logits_to_keep = logits_to_keep, 0
        else:
            kept = 0
        outputs = self._read(
            input_ids=input_ids,
            attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            memory=memory,
            reset_memory=reset_memory,
            document_ids=document_ids,
            last=logits_to_keep,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        logits, loss, memory_loss = outputs.last_hidden_state, None, None
        if labels is None and torch.is_grad_enabled():
            memory_loss = mean_memory_loss(outputs.memory_loss, attention_mask)
        elif labels is not None:
            shift_labels = kwargs.pop("shift_labels", None)
            if shift_labels is None:
                shift_labels = next_token_labels(labels, document_ids, attention_mask)
            num_items = kwargs.get("num_items_in_batch")
            items = (shift_labels != -100).sum() if num_items is None else torch.as_tensor(num_items)
            loss = self.loss_function(
                logits.contiguous(),
                None,
                logits.shape[-1],
                num_items_in_batch=items.clamp(min=1),  # nothing to predict costs nothing
                shift_labels=shift_labels.contiguous(),
            )
            memory_loss = mean_memory_loss(outputs.memory_loss, shift_labels != -100)
            if self.training:
                loss = add_memory_loss(loss, memory_loss, self.config, shift_labels, num_items)  # type: ignore[arg-type]
        if not isinstance(kept, int) or kept:
            logits = logits[:, -kept:] if isinstance(kept, int) else logits[:, kept]
        return MemoryAugmentedCausalLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            memory=outputs.memory,
            memory_loss=memory_loss,  # type: ignore[arg-type]
            hidden_states=outputs.hidden_states,
        )

    def empty_memory(self, batch_size: int, device: torch.device | None = None) -> MemoryAugmentedState:
        """Make a memory of documents not yet begun."""
        weight = self.get_input_embeddings().weight
        device = weight.device if device is None else device  # type: ignore[assignment]
        window = torch.zeros(batch_size, self.config.memory.window_length, dtype=torch.long, device=device)  # type: ignore[arg-type]
        width = self.config.hidden_size
        inputs, memories = [], []
        for attention in self.long_term_memory.layers.values():  # type: ignore[operator]
            dtype = torch.promote_types(attention.dtype, torch.float32)
            inputs.append(torch.zeros(batch_size, 0, width, dtype=attention.dtype, device=device))
            memories.append(attention.empty(batch_size, device, dtype))
        seen_B = torch.zeros(batch_size, dtype=torch.int64, device="cpu")
        return MemoryAugmentedState(seen_B, window, tuple(inputs), tuple(memories))

    @unpack_documents
    @carried_memory
    def _read(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        memory: MemoryAugmentedState | None = None,
        reset_memory: Tensor | None = None,
        last: int = 0,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> MemoryAugmentedOutput:
        """See `forward`; the logits of the ``last`` tokens, 0 for all, are ``last_hidden_state``."""
        tokens: Tensor = input_ids if input_ids is not None else inputs_embeds  # type: ignore[assignment]
        rows, length = tokens.shape[:2]
        check_size(tokens)
        grads = torch.is_grad_enabled()
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if cache is None and memory is None and use_cache and not self.training and not grads:
            cache = MemoryAugmentedCache(self.config)
        state, block, layer = memory, None, None
        if cache is not None:
            layer = check_cache(cache, self.config)
            # Until this call has succeeded the state goes without the block, which the call changes in place.
            state, block, layer.block = layer.state, None if grads else layer.block, None
        if state is None:
            state = self.empty_memory(rows, tokens.device)
        check_state(state, self.config, rows)
        state = state.detach()
        if reset_memory is not None:
            state, block = state.reset(reset_memory), None

        real_BT = None if attention_mask is None else real_tokens(attention_mask, tokens)
        counts = [length] * rows
        if real_BT is not None:
            counts = real_BT.sum(dim=1).tolist()
            if tokens.is_floating_point():
                tokens = finite_padding(tokens, real_BT)
            tokens = gather_tokens(tokens, torch.argsort(~real_BT, dim=1, stable=True))
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        loop = SegmentLoop(self, state, block, keeps_block=layer is not None and not grads)
        outputs = loop.run(tokens, counts, real_BT, min(last or length, length), bool(output_hidden_states))
        if layer is not None:
            if reset_memory is not None and bool(reset_memory.all()):
                layer.reset()
            layer.keep(loop.state, loop.block, length)
        keep_memory = cache is None and (memory is not None or self.training)
        return replace(outputs, cache=cache, memory=loop.state if keep_memory else None)


__all__ = ["MemoryAugmentedCausalLMOutput", "MemoryAugmentedForCausalLM", "MemoryAugmentedState"]
