"""Documents are read exactly, split by document, and packed without losing or altering a byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from hf_longmem.data.text import (
    load_documents,
    pack_documents,
    python_documents,
    read_documents,
    split_documents,
    token_pieces,
)

TOKENIZER = ByT5Tokenizer()
# No lone surrogates: they are not text, and UTF-8 cannot hold them.
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=90)


def table(texts: list[str]) -> Dataset:
    return Dataset.from_dict({"name": [f"{i}" for i in range(len(texts))], "text": texts})


def naive_tokens(texts: list[str]) -> list[int]:
    return [token for text in texts for token in [*(byte + 3 for byte in text.encode()), TOKENIZER.eos_token_id]]


@settings(deadline=None, max_examples=60)
@given(st.lists(TEXTS, min_size=1, max_size=6), st.integers(1, 70))
def test_packing_keeps_every_byte_of_every_document_in_order(texts: list[str], sequence_length: int) -> None:
    packed = pack_documents(table(texts), TOKENIZER, sequence_length)["input_ids"]
    assert [token for sequence in packed for token in sequence] == naive_tokens(texts)
    assert all(len(sequence) == sequence_length for sequence in packed[:-1])
    assert 1 <= len(packed[-1]) <= sequence_length


def test_text_that_looks_like_a_special_token_is_packed_as_text() -> None:
    text = "a </s> b <pad> c <extra_id_0>"
    [sequence] = pack_documents(table([text]), TOKENIZER, 100)["input_ids"]
    assert sequence == naive_tokens([text])


def test_a_document_longer_than_one_tokenizer_call_is_packed_whole() -> None:
    text = "".join(chr(0x20 + i % 0x2000) for i in range(70_000))
    packed = pack_documents(table([text]), TOKENIZER, 4096)["input_ids"]
    assert [token for sequence in packed for token in sequence] == naive_tokens([text])


def test_a_seed_orders_documents_and_a_limit_stops_after_full_sequences() -> None:
    texts = [f"document {i} " * 9 for i in range(40)]
    first = pack_documents(table(texts), TOKENIZER, 64, max_sequences=7, seed=1)["input_ids"]
    assert [len(sequence) for sequence in first] == [64] * 7
    assert first == pack_documents(table(texts), TOKENIZER, 64, max_sequences=7, seed=1)["input_ids"]
    assert first != pack_documents(table(texts), TOKENIZER, 64, max_sequences=7, seed=2)["input_ids"]
    everything = pack_documents(table(texts), TOKENIZER, 64, seed=1)["input_ids"]
    assert everything[:7] == first
    assert sorted(t for s in everything for t in s) == sorted(naive_tokens(texts))


def test_a_limit_beyond_the_text_gives_all_of_it() -> None:
    packed = pack_documents(table(["abc", "de"]), TOKENIZER, 4, max_sequences=9)["input_ids"]
    assert [token for sequence in packed for token in sequence] == naive_tokens(["abc", "de"])


@pytest.mark.parametrize(("length", "limit", "name"), [(0, None, "sequence_length"), (8, 0, "max_sequences")])
def test_packing_refuses_sizes_below_one(length: int, limit: int | None, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        pack_documents(table(["text"]), TOKENIZER, length, max_sequences=limit)


def test_packing_refuses_no_documents() -> None:
    with pytest.raises(ValueError, match="there must be some text"):
        pack_documents(table([]), TOKENIZER, 8)


@settings(deadline=None, max_examples=60)
@given(st.lists(TEXTS, min_size=1, max_size=30), st.floats(0.01, 0.99))
def test_a_split_holds_out_whole_documents_and_loses_none(texts: list[str], fraction: float) -> None:
    if len(set(texts)) == 1:
        return
    split = split_documents(table(texts), fraction)
    train, held_out = split["train"]["text"], split["held_out"]["text"]
    assert train
    assert held_out
    assert sorted([*train, *held_out]) == sorted(texts)
    assert set(train).isdisjoint(held_out)
    if len(set(texts)) == len(texts):
        assert len(held_out) == min(-(-len(texts) * fraction // 1), len(texts) - 1)


def test_a_split_does_not_depend_on_the_order_of_the_documents() -> None:
    texts = [f"document {i}" for i in range(100)]
    forward, backward = split_documents(table(texts)), split_documents(table(texts[::-1]))
    assert len(forward["held_out"]) == 5
    assert forward["held_out"]["text"] == backward["held_out"]["text"][::-1]


def test_of_a_single_document_the_end_is_held_out() -> None:
    split = split_documents(table(["x" * 90 + "y" * 10]), 0.1)
    assert split["train"]["text"] == ["x" * 90]
    assert split["held_out"]["text"] == ["y" * 10]


def test_a_split_far_from_what_was_asked_for_is_said() -> None:
    logger = logging.get_logger("hf_longmem.data.text")
    with CaptureLogger(logger) as heard:
        split_documents(table(["a" * 50, "b" * 50]))
    assert "50% of the text is held out" in heard.out
    with CaptureLogger(logger) as heard:
        split_documents(table([f"document {i}" for i in range(100)]))
    assert heard.out == ""


def test_a_split_refuses_a_single_character_and_impossible_fractions() -> None:
    with pytest.raises(ValueError, match="long enough to hold some text out, got 1"):
        split_documents(table(["x"]))
    for fraction in (0.0, 1.0, -0.5):
        with pytest.raises(ValueError, match=r"held_out_fraction must be in \(0, 1\)"):
            split_documents(table(["a", "b"]), fraction)


def test_files_are_read_exactly(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\n")
    (tmp_path / "b.txt").write_bytes("Füße".encode())
    documents = read_documents([tmp_path / "b.txt", tmp_path / "a.txt"])
    assert documents["text"] == ["Füße", "\ufeffone\r\ntwo\n\n"]
    assert documents["name"] == [str(tmp_path / "b.txt"), str(tmp_path / "a.txt")]


def test_unreadable_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone.txt must be a text file, got no such file"):
        read_documents([tmp_path / "gone.txt"])
    with pytest.raises(FileNotFoundError, match="must be a text file, got a directory"):
        read_documents([tmp_path])
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="must contain text, got an empty file"):
        read_documents([tmp_path / "empty.txt"])
    (tmp_path / "latin.txt").write_bytes("abc Füße".encode("latin-1"))
    with pytest.raises(ValueError, match="must be UTF-8, got byte 0xfc at offset 5"):
        read_documents([tmp_path / "latin.txt"])
    with pytest.raises(ValueError, match="at least one text file"):
        read_documents([])


def test_every_machine_has_the_text_of_its_python() -> None:
    documents = python_documents()
    names = documents["name"]
    assert names == sorted(set(names))
    assert sum(name.startswith("topics/") for name in names) > 50
    assert "argparse.py" in names
    assert not any("/test/" in f"/{name}" or "site-packages" in name for name in names)
    assert sum(map(len, documents["text"])) > 3_000_000


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("hub_cache")
def test_a_folder_of_text_files_is_a_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"body": "first"}\n{"body": ""}\n{"body": "second"}\n', encoding="utf-8")
    (folder / "validation.jsonl").write_text('{"body": "third"}\n', encoding="utf-8")
    split = load_documents(str(folder), text_column="body")
    assert split["train"]["text"] == ["first", "second"]
    assert split["held_out"]["text"] == ["third"]
    with pytest.raises(ValueError, match="must have the column 'text', got body"):
        load_documents(str(folder))


def test_a_saved_data_set_without_held_out_split_is_split_by_document(tmp_path: Path) -> None:
    DatasetDict(train=Dataset.from_dict({"text": [f"{i}" for i in range(40)]})).save_to_disk(tmp_path / "saved")
    split = load_documents(str(tmp_path / "saved"), held_out_fraction=0.1)
    assert (len(split["train"]), len(split["held_out"])) == (36, 4)


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"text": ["", ""]}, "must contain text, got 2 empty rows"),
        ({"text": [1, 2]}, "'text' must hold strings, got int"),
    ],
)
def test_data_sets_without_text_are_refused(tmp_path: Path, columns: dict, complaint: str) -> None:
    Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=complaint):
        load_documents(str(tmp_path / "saved"))


def test_a_data_set_without_train_split_is_refused(tmp_path: Path) -> None:
    DatasetDict(test=Dataset.from_dict({"text": ["a"]})).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"must have a train split, got \['test'\]"):
        load_documents(str(tmp_path / "saved"))


WORDS = ["the", "there", "other", "another", "rather", "gather", "a", "an", "\n", "  ", "é"]
SPLITTERS: dict[str, Any] = {
    "byte-level": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "SentencePiece": lambda: pre_tokenizers.Metaspace(prepend_scheme="always"),
}


def word_tokenizer(kind: str) -> PreTrainedTokenizerBase:
    """A byte pair encoding that has whole words, each with the space before it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = SPLITTERS[kind]()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS * 9)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def pieces(text: Any, tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    return list(token_pieces(text, tokenizer, np.dtype("int64")))


@pytest.mark.parametrize("kind", SPLITTERS)
def test_text_has_the_same_tokens_whole_and_in_parts(kind: str) -> None:
    tokenizer = word_tokenizer(kind)
    text = " ".join(np.random.default_rng(0).choice(WORDS, 40_000))
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(pieces(text, tokenizer)) > 2
    for size in (len(text), 70_000, 1000, 3):
        parts = (text[start : start + size] for start in range(0, len(text), size))
        assert np.concatenate(pieces(parts, tokenizer)).tolist() == whole
    assert pieces("", tokenizer) == pieces(iter(()), tokenizer) == []


def test_text_without_spaces_is_cut_where_it_must() -> None:
    text = "x" * 70_000 + " " * 70_000
    found = pieces(text, TOKENIZER)
    assert [len(piece) for piece in found] == [65_536, 65_536, 140_000 - 2 * 65_536]
    assert TOKENIZER.decode(np.concatenate(found)) == text
