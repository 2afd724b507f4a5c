"""Heads for tasks other than causal language modelling on the Reformer with LSH attention."""

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from hf_longmem._errors import complaint
from hf_longmem.layers.token_loss import head_cross_entropy
from hf_longmem.models.classification import classification_loss, pool_tokens
from hf_longmem.models.documents import refuse_documents
from hf_longmem.models.reformer_lsh.configuration_reformer_lsh import ReformerLSHConfig
from hf_longmem.models.reformer_lsh.modeling_reformer_lsh import (
    ReformerLSHModel,
    ReformerLSHPreTrainedModel,
    token_loss,
)


class ReformerLSHForMaskedLM(ReformerLSHPreTrainedModel):
    """The bidirectional model with a language-model head: predicts masked tokens."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: ReformerLSHConfig) -> None:
        super().__init__(config)
        if config.is_decoder:
            rule = "ReformerLSHForMaskedLM needs a bidirectional model, is_decoder=False"
            fix = "pass is_decoder=False (from_pretrained takes it too), or use ReformerLSHForCausalLM"
            raise ValueError(complaint(rule, config.is_decoder, fix))
        self.model = ReformerLSHModel(config)
        self.lm_head = nn.Linear(config.last_hidden_size, config.vocab_size)
        self.post_init()

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
    ) -> MaskedLMOutput:
        """Predict the token at every position.

        Args:
            labels: ``[B, T]``, the true tokens, -100 where nothing is to be predicted. While training, the loss is
                computed a few tokens' logits at a time and ``logits`` is None.
            input_ids, attention_mask, position_ids, inputs_embeds, document_ids, kwargs: see `ReformerLSHModel`.
        """
        kwargs = {"inputs_embeds": inputs_embeds, "document_ids": document_ids} | kwargs
        outputs = self.model(input_ids, attention_mask, position_ids, **kwargs)
        loss = logits = None
        if labels is not None:
            loss = token_loss(self, outputs.last_hidden_state, labels, kwargs)
        if labels is None or not self.training:
            logits = self.lm_head(outputs.last_hidden_state)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class ReformerLSHForSequenceClassification(ReformerLSHPreTrainedModel):
    """The model with a class (or a number) per sequence, read from its real tokens as ``classifier_pooling`` says: by
    default from the last one of a causal model, and from the mean of a bidirectional one."""

    def __init__(self, config: ReformerLSHConfig) -> None:
        super().__init__(config)
        self.model = ReformerLSHModel(config)
        self.dropout = _classifier_dropout(config)
        width = config.last_hidden_size
        if config.classifier_activation is not None:
            self.dense = nn.Linear(width, config.hidden_size)
            self.act_fn = ACT2FN[config.classifier_activation]
            width = config.hidden_size
        self.score = nn.Linear(width, config.num_labels)  # type: ignore[arg-type]
        self.post_init()

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
    ) -> SequenceClassifierOutput:
        """Score every sequence.

        Args:
            labels: classes ``[B]``, or floats ``[B]`` (regression) or ``[B, num_labels]`` (several classes at once).
            attention_mask: ``[B, T]``; what it hides is no part of the sequence, whatever its token id.
            document_ids: refused, as a row has one score; give each document a row of its own.
            input_ids, position_ids, inputs_embeds, kwargs: see `ReformerLSHModel`.
        """
        refuse_documents(document_ids, kwargs)
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        pooled = pool_tokens(outputs.last_hidden_state, attention_mask, self.config.classifier_pooling)
        if self.config.classifier_activation is not None:
            pooled = self.act_fn(self.dense(self.dropout(pooled)))
        logits = self.score(self.dropout(pooled))
        loss = None
        if labels is not None:
            loss = classification_loss(self, logits, labels, kwargs)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class ReformerLSHForTokenClassification(ReformerLSHPreTrainedModel):
    """The model with a class per token."""

    def __init__(self, config: ReformerLSHConfig) -> None:
        super().__init__(config)
        self.model = ReformerLSHModel(config)
        self.dropout = _classifier_dropout(config)
        self.score = nn.Linear(config.last_hidden_size, config.num_labels)  # type: ignore[arg-type]
        self.post_init()

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
    ) -> TokenClassifierOutput:
        """Score every token.

        Args:
            labels: classes ``[B, T]``, -100 for tokens that do not count.
            input_ids, attention_mask, position_ids, inputs_embeds, document_ids, kwargs: see `ReformerLSHModel`.
        """
        kwargs = {"inputs_embeds": inputs_embeds, "document_ids": document_ids} | kwargs
        outputs = self.model(input_ids, attention_mask, position_ids, **kwargs)
        hidden_states = self.dropout(outputs.last_hidden_state)
        logits = self.score(hidden_states)
        loss = None
        if labels is not None:
            num_items = kwargs.get("num_items_in_batch")
            loss = head_cross_entropy(self.score, hidden_states, labels, chunk_size=0, num_items=num_items)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class ReformerLSHForQuestionAnswering(ReformerLSHPreTrainedModel):
    """The model with two scores per token: where an answer starts, and where it ends."""

    def __init__(self, config: ReformerLSHConfig) -> None:
        super().__init__(config)
        self.model = ReformerLSHModel(config)
        self.qa_outputs = nn.Linear(config.last_hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        document_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Score every token as start and as end.

        Args:
            start_positions, end_positions: ``[B]``; positions outside the input do not count.
            input_ids, attention_mask, position_ids, inputs_embeds, document_ids, kwargs: see `ReformerLSHModel`.
        """
        kwargs = {"inputs_embeds": inputs_embeds, "document_ids": document_ids} | kwargs
        outputs = self.model(input_ids, attention_mask, position_ids, **kwargs)
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits.contiguous(),
            end_logits=end_logits.contiguous(),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def _classifier_dropout(config: ReformerLSHConfig) -> nn.Dropout:
    rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
    return nn.Dropout(rate)


__all__ = [
    "ReformerLSHForMaskedLM",
    "ReformerLSHForQuestionAnswering",
    "ReformerLSHForSequenceClassification",
    "ReformerLSHForTokenClassification",
]
