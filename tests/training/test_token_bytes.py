"""The bytes that tokens stand for, against the bytes of real text."""

from __future__ import annotations

import importlib

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_longmem import ReformerLSHByteTokenizer, bytes_per_token

TEXT = "\n".join(list(importlib.import_module("pydoc_data.topics").topics.values())[:5])
STRANGE = " Grüße, 漢字, 🙂\t\n"


def byte_level() -> PreTrainedTokenizerBase:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def sentencepiece() -> PreTrainedTokenizerBase:
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=600, special_tokens=special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


@pytest.mark.parametrize("make", [ByT5Tokenizer, ReformerLSHByteTokenizer, byte_level, sentencepiece])
def test_the_tokens_of_a_text_stand_for_its_bytes(make: type[PreTrainedTokenizerBase]) -> None:
    tokenizer = make()
    tokenizer.add_tokens(["naïve"])
    counts = bytes_per_token(tokenizer)
    assert counts.shape == (len(tokenizer),)
    assert counts[tokenizer.eos_token_id] == 0
    for text in (TEXT, STRANGE, "naïve"):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        assert counts[ids].sum() == len(text.encode("utf-8"))
