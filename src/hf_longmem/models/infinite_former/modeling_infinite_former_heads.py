"""Heads for tasks other than causal language modelling on the infinity-former."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from hf_longmem.layers.token_loss import head_cross_entropy
from hf_longmem.models.infinite_former.configuration_infinite_former import InfiniteFormerConfig
from hf_longmem.models.infinite_former.modeling_infinite_former import (
    InfiniteFormerModel,
    InfiniteFormerPreTrainedModel,
    add_memory_loss,
)
from hf_longmem.models.infinite_former.outputs import InfiniteFormerClassifierOutput


class _InfiniteFormerClassifier(InfiniteFormerPreTrainedModel):
    def __init__(self, config: InfiniteFormerConfig) -> None:
        super().__init__(config)
        self.model = InfiniteFormerModel(config)
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(rate)
        self.score = nn.Linear(config.hidden_size, config.num_labels)  # type: ignore[arg-type]
        self.post_init()

    def _encode(self, kwargs: dict[str, Any], **inputs: Any) -> Any:
        # A document is read whole, so that there is nothing to go on with.
        return self.model(**inputs, **(kwargs | {"use_cache": False, "return_dict": True}))

    def _output(
        self, loss: Tensor | None, logits: Tensor, outputs: Any, labels: Tensor | None, kwargs: dict[str, Any]
    ) -> InfiniteFormerClassifierOutput:
        if loss is not None and labels is not None and self.training:
            num_items = kwargs.get("num_items_in_batch")
            loss = add_memory_loss(loss, outputs.memory_loss, self.config, labels, num_items)
        return InfiniteFormerClassifierOutput(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,  # type: ignore[arg-type]
            memory_loss=outputs.memory_loss,
            hidden_states=outputs.hidden_states,
        )


class InfiniteFormerForSequenceClassification(_InfiniteFormerClassifier):
    """The model with a class (or a number) per document, read from its real tokens as ``classifier_pooling`` says."""

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> InfiniteFormerClassifierOutput:
        """Score every document.

        Args:
            labels: classes ``[B]``, or floats ``[B]`` (regression) or ``[B, num_labels]`` (several classes at once).
            attention_mask: ``[B, T]``; what it hides is no part of the document, whatever its token id.
            input_ids, position_ids, inputs_embeds, kwargs: see `InfiniteFormerModel`.
        """
        outputs = self._encode(kwargs, input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds)
        logits = self.score(self.dropout(self._pool(outputs.last_hidden_state, attention_mask)))
        loss = None
        if labels is not None:
            problem = SimpleNamespace(num_labels=self.config.num_labels, problem_type=self._problem_type(labels))
            loss = self.loss_function(labels=labels, logits=logits, pooled_logits=logits, config=problem)
            num_items = kwargs.get("num_items_in_batch")
            if num_items is not None:
                loss = loss * (labels.numel() / torch.as_tensor(num_items, device=loss.device))
        return self._output(loss, logits, outputs, labels, kwargs)

    def _pool(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is None:
            attention_mask = hidden_states.new_ones(hidden_states.shape[:2])
        # As in the model, a longer mask's last columns are those of the input.
        real = attention_mask[:, -hidden_states.shape[1] :].to(hidden_states.device) != 0
        if self.config.classifier_pooling == "mean":
            total = hidden_states.masked_fill(~real[..., None], 0).sum(1)
            return total / real.sum(1, keepdim=True).clamp(min=1)
        last = (real * torch.arange(1, real.shape[1] + 1, device=real.device)).argmax(-1)
        return hidden_states.take_along_dim(last[:, None, None], 1).squeeze(1)

    def _problem_type(self, labels: Tensor) -> str:
        # transformers would write its guess into the config, where it would outlive these labels.
        if self.config.problem_type is not None:
            return self.config.problem_type
        if self.config.num_labels == 1:
            return "regression"
        return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


class InfiniteFormerForTokenClassification(_InfiniteFormerClassifier):
    """The model with a class per token."""

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> InfiniteFormerClassifierOutput:
        """Score every token.

        Args:
            labels: classes ``[B, T]``, -100 for tokens that do not count.
            input_ids, attention_mask, position_ids, inputs_embeds, kwargs: see `InfiniteFormerModel`.
        """
        outputs = self._encode(kwargs, input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds)
        hidden_states = self.dropout(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            num_items = kwargs.get("num_items_in_batch")
            loss = head_cross_entropy(self.score, hidden_states, labels, chunk_size=0, num_items=num_items)
        return self._output(loss, self.score(hidden_states), outputs, labels, kwargs)


__all__ = [
    "InfiniteFormerClassifierOutput",
    "InfiniteFormerForSequenceClassification",
    "InfiniteFormerForTokenClassification",
]
