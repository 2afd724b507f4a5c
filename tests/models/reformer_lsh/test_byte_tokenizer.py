"""Bytes as ids ``byte + 2``: nothing is lost, nothing is added, and AutoTokenizer finds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, pipeline
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from hf_longmem import ReformerLSHByteTokenizer, ReformerLSHConfig, ReformerLSHForCausalLM

TOKENIZER = ReformerLSHByteTokenizer()


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_every_text_survives_and_is_its_bytes(text: str) -> None:
    if not text:
        return
    ids = TOKENIZER(text)["input_ids"]
    assert ids == [byte + 2 for byte in text.encode("utf-8")]
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1))
def test_every_sequence_of_bytes_survives_as_surrogate_escapes(data: bytes) -> None:
    ids = TOKENIZER(data.decode("utf-8", "surrogateescape"))["input_ids"]
    assert ids == [byte + 2 for byte in data]
    assert TOKENIZER.decode(ids).encode("utf-8", "surrogateescape") == data


def test_each_of_the_256_bytes_has_its_own_id_and_token() -> None:
    vocab = TOKENIZER.get_vocab()
    assert len(TOKENIZER) == TOKENIZER.vocab_size == len(vocab) == 258
    assert sorted(vocab.values()) == list(range(258))
    for index in range(258):
        token = TOKENIZER.convert_ids_to_tokens(index)
        assert TOKENIZER.convert_tokens_to_ids(token) == index
    data = bytes(range(256))
    assert TOKENIZER(data.decode("utf-8", "surrogateescape"))["input_ids"] == list(range(2, 258))


@pytest.mark.parametrize("text", ["</s>", "<pad> a </s>", " ' s  do n't , ok . ", "\n\t\x00\r\n", "  lead and trail  "])
def test_text_that_looks_special_or_untidy_is_plain_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    assert not set(TOKENIZER.encode(text)) & {0, 1}


def test_special_tokens_pad_are_skipped_on_request_and_nothing_else_is_added() -> None:
    batch = TOKENIZER(["ab", "abcd"], padding=True, return_tensors="pt")
    assert torch.equal(batch["input_ids"][0], torch.tensor([99, 100, 0, 0]))
    assert torch.equal(batch["attention_mask"][0], torch.tensor([1, 1, 0, 0]))
    assert TOKENIZER.batch_decode(batch["input_ids"], skip_special_tokens=True) == ["ab", "abcd"]
    assert TOKENIZER.decode([99, 1, 0]) == "a</s><pad>"
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.bos_token_id) == (0, 1, None)


def test_auto_tokenizer_loads_it_and_pipelines_use_it(tmp_path: Path) -> None:
    config = ReformerLSHConfig(vocab_size=258, hidden_size=16, num_attention_heads=2, attn_layers=["lsh"])
    ReformerLSHForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises((OSError, ValueError, KeyError)):
        AutoTokenizer.from_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == type(TOKENIZER).__name__
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is ReformerLSHByteTokenizer
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert loaded.decode(loaded.encode("</s> né .")) == "</s> né ."
    (result,) = pipeline("text-generation", model=str(tmp_path))("né", max_new_tokens=4, do_sample=False)
    assert result["generated_text"].startswith("né")
    assert ReformerLSHConfig not in TOKENIZER_MAPPING


@pytest.mark.parametrize("index", [-1, 258, 300])
def test_an_id_that_is_no_byte_is_refused_in_plain_words(index: int) -> None:
    with pytest.raises(ValueError, match=r"the id of a byte must lie in 2 \.\. 257, got"):
        ReformerLSHByteTokenizer().decode([index])
