"""Every head: its outputs, its loss, what padding does to it, saving, and the pipeline that people run it with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)

import hf_longmem
from hf_longmem.models.classification import pool_tokens

Make = Callable[..., Any]
HEADS = {
    "ReformerLSHForMaskedLM": AutoModelForMaskedLM,
    "ReformerLSHForSequenceClassification": AutoModelForSequenceClassification,
    "ReformerLSHForTokenClassification": AutoModelForTokenClassification,
    "ReformerLSHForQuestionAnswering": AutoModelForQuestionAnswering,
}


@pytest.fixture
def head(tiny: Make) -> Make:
    """Make a tiny model with a named head, in evaluation mode."""

    def make(name: str, seed: int = 0, **overrides: Any) -> Any:
        torch.manual_seed(seed)
        overrides.setdefault("is_decoder", name == "ReformerLSHForCausalLM")
        return getattr(hf_longmem, name)(tiny(**overrides)).eval()

    return make


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def labels_for(name: str, ids: Tensor) -> dict[str, Tensor]:
    return {
        "ReformerLSHForMaskedLM": {"labels": ids},
        "ReformerLSHForSequenceClassification": {"labels": ids[:, 0] % 2},
        "ReformerLSHForTokenClassification": {"labels": ids % 2},
        "ReformerLSHForQuestionAnswering": {"start_positions": ids[:, 0] % 9, "end_positions": ids[:, 1] % 9 + 9},
    }[name]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("causal", [False, True])
def test_every_head_trains_every_parameter_and_saves(
    head: Make, tokens: Make, tmp_path: Path, name: str, causal: bool
) -> None:
    if causal and name == "ReformerLSHForMaskedLM":
        with pytest.raises(ValueError, match=r"is_decoder=False, got True; pass is_decoder=False"):
            head(name, is_decoder=True)
        return
    model = head(name, is_decoder=causal, stream_merge="concat").train()
    ids = tokens(4, 40)
    model(ids, **labels_for(name, ids)).loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name
        assert parameter.grad.abs().max() > 0, parameter_name
    model.eval().save_pretrained(tmp_path)
    loaded = HEADS[name].from_pretrained(tmp_path).eval()
    assert type(loaded).__name__ == name
    for ours, again in zip(model(ids).to_tuple(), loaded(ids).to_tuple(), strict=True):
        assert torch.equal(ours, again)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_changes_no_head(head: Make, tokens: Make, name: str, causal: bool) -> None:
    model = head(name, is_decoder=causal and name != "ReformerLSHForMaskedLM")
    ids = tokens(1, 30)
    alone = model(ids).to_tuple()
    for before in (0, 7, 20):
        padded = torch.ones(2, 50, dtype=torch.long)
        padded[1, before : before + 30] = ids
        mask = torch.zeros_like(padded)
        mask[0] = 1
        mask[1, before : before + 30] = 1
        for ours, expected in zip(model(padded, attention_mask=mask).to_tuple(), alone, strict=True):
            per_token = name != "ReformerLSHForSequenceClassification"
            close(ours[1, before : before + 30] if per_token else ours[1], expected[0])


def test_sequences_are_pooled_from_the_last_or_the_mean_of_the_real_tokens(head: Make, tokens: Make) -> None:
    ids = tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, 12:] = 0
    for causal in (True, False):
        model = head("ReformerLSHForSequenceClassification", is_decoder=causal, num_labels=3)
        states = model.model(ids, attention_mask=mask).last_hidden_state
        expected = torch.stack(
            [states[0, 11], states[1, 19]] if causal else [states[0, :12].mean(0), states[1].mean(0)]
        )
        close(model(ids, attention_mask=mask).logits, model.score(expected))
        nothing = model(ids, attention_mask=torch.zeros_like(ids)).logits
        assert torch.isfinite(nothing).all()


@pytest.mark.parametrize(
    ("num_labels", "labels", "loss"),
    [
        (3, torch.tensor([0, 2]), F.cross_entropy),
        (1, torch.tensor([0.5, -1.0]), lambda logits, labels: F.mse_loss(logits[:, 0], labels)),
        (3, torch.tensor([[1.0, 0, 1], [0, 0, 1]]), F.binary_cross_entropy_with_logits),
    ],
)
def test_the_kind_of_labels_decides_the_loss_and_leaves_the_config_alone(
    head: Make, tokens: Make, num_labels: int, labels: Tensor, loss: Callable[..., Tensor]
) -> None:
    model = head("ReformerLSHForSequenceClassification", num_labels=num_labels)
    ids = tokens(2, 20)
    outputs = model(ids, labels=labels)
    close(outputs.loss, loss(outputs.logits, labels))
    close(model(ids, labels=labels, num_items_in_batch=torch.tensor(3 * labels.numel())).loss, outputs.loss / 3)
    assert model.config.problem_type is None


def test_token_and_masked_losses_are_cross_entropy_of_what_counts(head: Make, tokens: Make) -> None:
    ids = tokens(2, 20)
    for name, classes in (("ReformerLSHForTokenClassification", 2), ("ReformerLSHForMaskedLM", 60)):
        model = head(name)
        labels = ids % classes
        labels[0, :15] = -100
        outputs = model(ids, labels=labels)
        summed = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        close(outputs.loss, summed / 25)
        close(model(ids, labels=labels, num_items_in_batch=10).loss, summed / 10)
        ignored = model.train()(ids, labels=torch.full_like(ids, -100)).loss
        ignored.backward()
        assert ignored == 0
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_answers_are_scored_by_two_outputs_whatever_the_labels(head: Make, tokens: Make) -> None:
    model = head("ReformerLSHForQuestionAnswering", num_labels=3)
    ids = tokens(2, 20)
    outputs = model(ids, start_positions=torch.tensor([3, 99]), end_positions=torch.tensor([5, 7]))
    assert outputs.start_logits.shape == outputs.end_logits.shape == (2, 20)
    start = F.cross_entropy(outputs.start_logits[:1], torch.tensor([3]))
    close(outputs.loss, (start + F.cross_entropy(outputs.end_logits, torch.tensor([5, 7]))) / 2)


def test_a_causal_checkpoint_loads_as_a_bidirectional_one_when_told_so(
    causal_lm: Make, tokens: Make, tmp_path: Path
) -> None:
    model = causal_lm()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pass is_decoder=False"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, is_decoder=False).eval()
    assert (loaded.config.lsh_num_chunks_after, loaded.config.local_num_chunks_after) == (1, 1)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    ids = tokens(1, 40)
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % 58 + 2
    assert not torch.equal(loaded(ids).logits[0, -5], loaded(changed).logits[0, -5])


@pytest.mark.parametrize("name", ["ReformerLSHForCausalLM", "ReformerLSHForMaskedLM"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [70, 50])
def test_embeddings_resize_save_and_load(
    head: Make, tokens: Make, tmp_path: Path, name: str, tied: bool, size: int
) -> None:
    model = head(name, tie_word_embeddings=tied)
    ids = tokens(2, 20) % 50
    with torch.no_grad():
        before = model(ids).logits
    model.resize_token_embeddings(size, mean_resizing=False)
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == size
    with torch.no_grad():
        after = model(ids).logits
    assert after.shape[-1] == model.lm_head.out_features == model.lm_head.bias.numel() == size
    close(after[..., :50], before[..., :50])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    assert torch.equal(loaded(ids).logits, after)
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    assert torch.isfinite(loss)


@pytest.fixture
def save_with_tokenizer(head: Make, tmp_path: Path) -> Make:
    """Save a tiny byte-level model with its tokenizer."""

    def save(name: str, **overrides: Any) -> str:
        head(name, vocab_size=384, **overrides).save_pretrained(tmp_path)
        ByT5Tokenizer().save_pretrained(tmp_path)
        return str(tmp_path)

    return save


def test_text_generation_pipeline(save_with_tokenizer: Make) -> None:
    generate = pipeline("text-generation", model=save_with_tokenizer("ReformerLSHForCausalLM"))
    assert isinstance(generate.model, hf_longmem.ReformerLSHForCausalLM)
    generate.tokenizer.padding_side = "left"
    prompts = ["Four score and seven", "We"]
    together = generate(prompts, max_new_tokens=6, do_sample=False, batch_size=2)
    for prompt, (result,) in zip(prompts, together, strict=True):
        (alone,) = generate(prompt, max_new_tokens=6, do_sample=False)
        assert result["generated_text"].startswith(prompt)
        assert alone == result


def test_text_classification_pipeline(save_with_tokenizer: Make) -> None:
    name = "ReformerLSHForSequenceClassification"
    classify = pipeline("text-classification", model=save_with_tokenizer(name, id2label={0: "ham", 1: "spam"}))
    together = classify(["short", "a good deal longer than that"], batch_size=2)
    alone = classify("short")
    assert {result["label"] for result in together} <= {"ham", "spam"}
    assert together[0]["score"] == pytest.approx(alone[0]["score"], abs=1e-5)


def test_feature_extraction_pipeline(save_with_tokenizer: Make) -> None:
    path = save_with_tokenizer("ReformerLSHForCausalLM")
    (features,) = pipeline("feature-extraction", model=path)("abc")
    model = AutoModel.from_pretrained(path).eval()
    expected = model(**ByT5Tokenizer()("abc", return_tensors="pt")).last_hidden_state[0]
    close(torch.tensor(features), expected)


def word_tokenizer(words: str) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, for the pipelines that need the offsets of a fast one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    specials = ["<pad>", "<unk>", "<mask>"]
    vocab = {word: i for i, word in enumerate([*specials, *sorted(set(words.split()))])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", mask_token="<mask>", model_max_length=128
    )


SENTENCE = "the quick brown fox jumps over the lazy dog"


@pytest.mark.parametrize("name", ["ReformerLSHForMaskedLM", "ReformerLSHForTokenClassification"])
def test_pipelines_that_need_word_offsets(head: Make, tmp_path: Path, name: str) -> None:
    head(name).save_pretrained(tmp_path)
    word_tokenizer(SENTENCE).save_pretrained(tmp_path)
    if name == "ReformerLSHForMaskedLM":
        results = pipeline("fill-mask", model=str(tmp_path))("the quick <mask> fox", top_k=60)
        assert sum(result["score"] for result in results) == pytest.approx(1, abs=1e-4)
    else:
        results = pipeline("token-classification", model=str(tmp_path))(SENTENCE)
        assert [result["word"] for result in results] == SENTENCE.split()


def test_causal_model_class_is_still_the_default_for_generation() -> None:
    assert AutoModelForCausalLM._model_mapping[hf_longmem.ReformerLSHConfig] is hf_longmem.ReformerLSHForCausalLM


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_the_last_columns_of_a_longer_mask_are_those_of_the_sequence(head: Make, tokens: Make, pooling: str) -> None:
    model, ids = head("ReformerLSHForSequenceClassification", classifier_pooling=pooling), tokens(2, 20)
    mask = torch.ones(2, 25)
    mask[0, 17:] = 0
    close(model(ids, attention_mask=mask).logits, model(ids, attention_mask=mask[:, 5:]).logits)


def test_sequences_that_do_not_count_have_no_share_in_the_loss_of_several_batches(head: Make, tokens: Make) -> None:
    model, ids = head("ReformerLSHForSequenceClassification", num_labels=3), tokens(4, 9)
    labels = torch.tensor([0, -100, 2, 1])
    summed = F.cross_entropy(model(ids).logits, labels, reduction="sum")
    close(model(ids, labels=labels, num_items_in_batch=7).loss, summed / 7)


def test_the_mean_of_many_tokens_stays_in_the_range_of_half_precision() -> None:
    assert pool_tokens(torch.ones(1, 70_000, 1, dtype=torch.float16), None, "mean").item() == 1
