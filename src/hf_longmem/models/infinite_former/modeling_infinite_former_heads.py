"""Heads for tasks other than causal language modelling on the infinity-former."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from hf_longmem.layers.token_loss import head_cross_entropy
from hf_longmem.models.classification import classification_loss, pool_tokens
from hf_longmem.models.documents import refuse_documents
from hf_longmem.models.infinite_former.configuration_infinite_former import InfiniteFormerConfig
from hf_longmem.models.infinite_former.modeling_infinite_former import (
    InfiniteFormerModel,
    InfiniteFormerPreTrainedModel,
    add_memory_loss,
    mean_memory_loss,
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

    def _encode(self, kwargs: dict[str, Any], labels: Tensor | None, **inputs: Any) -> Any:
        if labels is not None:
            kwargs = {"output_memory_loss": True} | kwargs
        # A document is read whole, so that there is nothing to go on with.
        return self.model(**inputs, **(kwargs | {"use_cache": False, "return_dict": True}))

    def _output(
        self,
        loss: Tensor | None,
        logits: Tensor,
        outputs: Any,
        memory_loss: Tensor | None,
        labels: Tensor | None,
        kwargs: dict[str, Any],
    ) -> InfiniteFormerClassifierOutput:
        if loss is not None and labels is not None and self.training:
            num_items = kwargs.get("num_items_in_batch")
            loss = add_memory_loss(loss, memory_loss, self.config, labels, num_items)
        return InfiniteFormerClassifierOutput(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,  # type: ignore[arg-type]
            memory_loss=memory_loss,  # type: ignore[arg-type]
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
        document_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> InfiniteFormerClassifierOutput:
        """Score every document.

        Args:
            labels: classes ``[B]``, or floats ``[B]`` (regression) or ``[B, num_labels]`` (several classes at once).
            attention_mask: ``[B, T]``; what it hides is no part of the document, whatever its token id.
            document_ids: refused, as a row has one score; give each document a row of its own.
            input_ids, position_ids, inputs_embeds, kwargs: see `InfiniteFormerModel`.
        """
        refuse_documents(document_ids, kwargs)
        outputs = self._encode(
            kwargs, labels, input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds
        )
        pooled = pool_tokens(outputs.last_hidden_state, attention_mask, self.config.classifier_pooling)
        logits = self.score(self.dropout(pooled))
        loss = None
        if labels is not None:
            loss = classification_loss(self, logits, labels, kwargs)
        memory_loss = outputs.memory_loss
        if memory_loss is not None:
            # A document counts once, however long it is.
            real = torch.ones_like(memory_loss)
            if attention_mask is not None:
                real = attention_mask[:, -memory_loss.shape[1] :].to(memory_loss)
            counted = real.new_ones(len(real), 1) if labels is None else (labels.view(len(real), -1)[:, :1] != -100)
            memory_loss = (memory_loss * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
            memory_loss = mean_memory_loss(memory_loss, counted)
        return self._output(loss, logits, outputs, memory_loss, labels, kwargs)


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
        document_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> InfiniteFormerClassifierOutput:
        """Score every token.

        Args:
            labels: classes ``[B, T]``, -100 for tokens that do not count.
            input_ids, attention_mask, position_ids, inputs_embeds, document_ids, kwargs: see `InfiniteFormerModel`.
        """
        inputs: dict[str, Any] = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        outputs = self._encode(kwargs, labels, **inputs, attention_mask=attention_mask, document_ids=document_ids)
        hidden_states = self.dropout(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            num_items = kwargs.get("num_items_in_batch")
            loss = head_cross_entropy(self.score, hidden_states, labels, chunk_size=0, num_items=num_items)
        memory_loss = mean_memory_loss(outputs.memory_loss, attention_mask if labels is None else labels != -100)
        return self._output(loss, self.score(hidden_states), outputs, memory_loss, labels, kwargs)


__all__ = [
    "InfiniteFormerClassifierOutput",
    "InfiniteFormerForSequenceClassification",
    "InfiniteFormerForTokenClassification",
]
