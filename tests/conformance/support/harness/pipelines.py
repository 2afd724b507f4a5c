"""What each pipeline must return, for transformers' pipeline mixin, whose own such checks are not published."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, pipeline


class _PipelineTests:
    task: str
    options: dict[str, Any] = {}
    examples: tuple[str, ...] = ("A short text.", "Another one, longer than the first.")

    def get_test_pipeline(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: str = "float32", **_: Any
    ) -> tuple[Any, list[Any]]:
        pipe = pipeline(self.task, model=model, tokenizer=tokenizer, dtype=dtype, **self.options)
        return pipe, list(self.examples)

    def run_pipeline_test(self, pipe: Any, examples: list[Any]) -> None:
        together = pipe(examples, batch_size=len(examples))
        assert len(together) == len(examples)
        for example, result in zip(examples, together, strict=True):
            self.check(pipe, example, result)
            self.check(pipe, example, pipe(example))

    def check(self, pipe: Any, example: Any, result: Any) -> None:
        raise NotImplementedError


class FeatureExtractionPipelineTests(_PipelineTests):
    task = "feature-extraction"

    def check(self, pipe: Any, example: str, result: list[list[list[float]]]) -> None:
        features = torch.tensor(result)
        config = pipe.model.config
        width = getattr(config, "last_hidden_size", config.hidden_size)  # reversible layers end in two streams
        assert features.shape[::2] == (1, width)
        assert features.shape[1] >= len(pipe.tokenizer(example).input_ids)
        assert features.isfinite().all()


class FillMaskPipelineTests(_PipelineTests):
    task = "fill-mask"

    def get_test_pipeline(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: str = "float32", **options: Any
    ) -> tuple[Any, list[Any]]:
        pipe, _ = super().get_test_pipeline(model, tokenizer, dtype, **options)
        mask = tokenizer.mask_token
        return pipe, [f"A {mask} text.", f"{mask} is longer than the first one."]

    def check(self, pipe: Any, example: str, result: list[dict[str, Any]]) -> None:
        scores = [candidate["score"] for candidate in result]
        assert len(scores) == 5
        assert scores == sorted(scores, reverse=True)
        assert all(0 <= candidate["token"] < pipe.model.config.vocab_size for candidate in result)


class TextClassificationPipelineTests(_PipelineTests):
    task = "text-classification"

    def check(self, pipe: Any, example: str, result: Any) -> None:
        (label,) = result if isinstance(result, list) else [result]
        assert label["label"] in pipe.model.config.label2id
        assert 0 < label["score"] <= 1


class TokenClassificationPipelineTests(_PipelineTests):
    task = "token-classification"

    def check(self, pipe: Any, example: str, result: list[dict[str, Any]]) -> None:
        assert len(result) <= len(pipe.tokenizer(example).input_ids)
        assert all(entity["entity"] in pipe.model.config.label2id for entity in result)
        assert all(0 < entity["score"] <= 1 for entity in result)


class TextGenerationPipelineTests(_PipelineTests):
    task = "text-generation"
    options = {"max_new_tokens": 5}

    def check(self, pipe: Any, example: str, result: list[dict[str, str]]) -> None:
        (generated,) = result
        assert generated["generated_text"].startswith(example)


class ZeroShotClassificationPipelineTests(_PipelineTests):
    task = "zero-shot-classification"
    options = {"candidate_labels": ["politics", "health"]}

    def check(self, pipe: Any, example: str, result: dict[str, Any]) -> None:
        assert result["sequence"] == example
        assert set(result["labels"]) == set(self.options["candidate_labels"])
        assert abs(sum(result["scores"]) - 1) < 1e-3
