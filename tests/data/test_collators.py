"""The collator pads, labels, packs and masks what it is given, and nothing else."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import (
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import hf_longmem
from hf_longmem import (
    DataCollatorForLongSequences,
    InfiniteFormerConfig,
    InfiniteFormerForCausalLM,
    ReformerLSHByteTokenizer,
    ReformerLSHConfig,
    ReformerLSHForCausalLM,
    ReformerLSHForMaskedLM,
)

Tokens = list[int]
LENGTHS = (1, 2, 63, 64, 65, 257)


def byte_tokenizer(**overrides: Any) -> ByT5Tokenizer:
    return ByT5Tokenizer(mask_token="<extra_id_0>", **overrides)


def piece_tokenizer(scheme: str) -> PreTrainedTokenizerFast:
    """Hello worlds goes on in every scheme: how words are cut into pieces and marked."""
    specials = ["[PAD]", "[MASK]", "[SEP]", "[UNK]"]
    pieces = {
        "wordpiece": ["hello", "hel", "##lo", "wor", "##ld", "##s", "good", "bye"],
        "byte-level": ["hello", "hel", "lo", "Ġwor", "ld", "s", "Ġgood", "Ġbye", "Ċ"],
        "unmarked": ["hello", "hel", "lo", "wor", "ld", "s", "good", "bye"],
    }[scheme]
    vocabulary = {token: index for index, token in enumerate(specials + pieces)}
    if scheme == "wordpiece":
        backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    else:
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "mask_token": "[MASK]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


documents = st.lists(st.integers(3, 250), min_size=1, max_size=9)
packed_rows = st.lists(st.lists(documents, min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=50, deadline=None)
@given(rows=packed_rows, side=st.sampled_from(["left", "right"]), multiple=st.sampled_from([None, 8]))
def test_rows_are_packed_padded_and_labelled(rows: list[list[Tokens]], side: str, multiple: int | None) -> None:
    collate = DataCollatorForLongSequences(ByT5Tokenizer(padding_side=side), pad_to_multiple_of=multiple)
    batch = collate([{"input_ids": row} for row in rows])
    longest = max(sum(map(len, row)) for row in rows)
    width = longest if multiple is None else -(-longest // multiple) * multiple
    assert {value.shape for value in batch.values()} == {(len(rows), width)}
    assert {value.dtype for value in batch.values()} == {torch.int64}
    for row, ids, mask, labels, numbers in zip(
        rows, *(batch[name] for name in ("input_ids", "attention_mask", "labels", "document_ids")), strict=True
    ):
        joined = list(chain.from_iterable(row))
        padding = width - len(joined)
        real = slice(padding, width) if side == "left" else slice(0, len(joined))
        assert mask.sum() == mask[real].sum() == len(joined)
        assert ids[real].tolist() == joined
        assert not ids[~mask.bool()].any()
        assert numbers[real].tolist() == [n for n, document in enumerate(row) for _ in document]
        assert (numbers.diff() >= 0).all()
        expected = [
            -100 if place == 0 and (number or (side == "left" and padding)) else token
            for number, document in enumerate(row)
            for place, token in enumerate(document)
        ]
        assert labels[real].tolist() == expected
        assert (labels[~mask.bool()] == -100).all()


def test_an_end_of_sequence_that_is_also_padding_is_learned() -> None:
    tokenizer = ByT5Tokenizer(pad_token="</s>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    batch = DataCollatorForLongSequences(tokenizer)([tokenizer("long"), tokenizer("a")])
    assert batch["labels"][1].tolist() == [100, 1, -100, -100, -100]


def test_rows_in_one_document_are_as_those_of_transformers() -> None:
    tokenizer = ByT5Tokenizer()
    rows = [dict(tokenizer("a text")), dict(tokenizer("another, longer one"))]
    ours = DataCollatorForLongSequences(tokenizer)(rows)
    theirs = DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda ids: np.array(ids, dtype="uint16")])
def test_ids_may_come_as_lists_arrays_or_tensors_bare_or_in_a_mapping(make: Callable[[Tokens], Any]) -> None:
    rows = [make([5, 6, 7]), make([8])]
    collate = DataCollatorForLongSequences(pad_token_id=9)
    for batch in (collate(rows), collate([{"input_ids": row} for row in rows])):
        assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
        assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
        assert batch["labels"].tolist() == [[5, 6, 7], [8, -100, -100]]
        assert "document_ids" not in batch


def test_document_ids_of_rows_are_taken_as_they_are_and_asked_for_or_not() -> None:
    rows = [{"input_ids": [5, 6, 7, 8], "document_ids": [4, 4, 9, 9]}, {"input_ids": [5, 6]}]
    for wanted, packed, given_ids in ((None, rows, True), (True, rows[1:], True), (False, rows, False)):
        batch = DataCollatorForLongSequences(pad_token_id=0, return_document_ids=wanted)(packed)
        assert ("document_ids" in batch) == given_ids
        assert batch["labels"][-1, :2].tolist() == [5, 6]
    batch = DataCollatorForLongSequences(pad_token_id=0)(rows)
    assert batch["document_ids"].tolist() == [[4, 4, 9, 9], [0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[5, 6, -100, 8], [5, 6, -100, -100]]


def test_labels_masks_and_other_columns_of_rows_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    rows: list[dict[str, Any]] = [
        {"input_ids": [5, 6, 7], "labels": [1, -100, 2], "attention_mask": [1, 0, 1], "weight": 0.5, "name": "a"},
        {"input_ids": [8], "labels": [3], "attention_mask": [1], "weight": 2, "name": "b"},
    ]
    rows[0] |= {"parts": [1, 2], "age": [1, 2, 3], "embedding": [0.0, 1.0]}
    rows[1] |= {"parts": [1], "age": [4], "embedding": [2.0, 3.0]}
    transformers_log = logging.getLogger("transformers")
    transformers_log.addHandler(caplog.handler)
    hf_log = logging.getLogger("hf_longmem")
    hf_log.addHandler(caplog.handler)
    try:
        batch = DataCollatorForLongSequences(pad_token_id=0)(rows)
    finally:
        transformers_log.removeHandler(caplog.handler)
        hf_log.removeHandler(caplog.handler)
    assert batch["labels"].tolist() == [[1, -100, 2], [3, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 0, 1], [1, 0, 0]]
    assert batch["weight"].tolist() == [0.5, 2.0]
    assert batch["embedding"].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert batch["age"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch.keys() == {"input_ids", "labels", "attention_mask", "weight", "embedding", "age"}


def test_what_follows_padding_inside_a_row_is_not_predicted_from_it() -> None:
    row = {"input_ids": [5, 6, 7, 8], "attention_mask": [1, 0, 1, 1]}
    assert DataCollatorForLongSequences()([row])["labels"].tolist() == [[5, -100, -100, 8]]


def test_a_tokenizer_without_padding_pads_with_its_end() -> None:
    tokenizer = ReformerLSHByteTokenizer()
    tokenizer.pad_token = None
    batch = DataCollatorForLongSequences(tokenizer)([[5, 6], [7]])
    assert batch["input_ids"].tolist() == [[5, 6], [7, tokenizer.eos_token_id]]


@pytest.mark.parametrize(
    ("make", "rows", "words"),
    [
        ({"mlm": True}, [], "needs a tokenizer with a mask token, got no tokenizer"),
        ({"tokenizer": ByT5Tokenizer(), "mlm": True}, [], "mask token, got ByT5Tokenizer; add one"),
        ({"whole_word_mask": True}, [], "needs mlm=True"),
        ({"mlm_probability": 15}, [], r"must lie in \[0, 1\], got 15"),
        ({"mask_replace_prob": 0.8, "random_replace_prob": 0.3}, [], "must sum to 1 at most"),
        ({"pad_to_multiple_of": 0}, [], "must be at least 1"),
        ({}, [], "must have rows"),
        ({}, [[5, 6], [7]], "need a token to pad with"),
        ({}, [{"text": "a"}], r"must have input_ids, got \['text'\]"),
        ({}, ["a text"], "must be token ids"),
        ({}, [{"input_ids": [5, 6], "attention_mask": [1]}], "a value for each of a row's 2 tokens"),
        ({}, [{"input_ids": [5, 6], "labels": 1}], r"labels must have a value .* got shape \[\]"),
        ({}, [{"input_ids": [5], "labels": [5]}, [6]], "every row of a batch must have labels, got 1 without"),
        ({}, [{"input_ids": [[5], [6]], "document_ids": [0, 1]}], "needs no document_ids"),
        ({"tokenizer": byte_tokenizer(), "mlm": True}, [{"input_ids": [5], "labels": [5]}], "makes the labels"),
    ],
)
def test_wrong_use_is_answered_in_words(make: dict[str, Any], rows: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataCollatorForLongSequences(**make)(rows)


# Masked language modelling


def test_masks_are_fifteen_per_cent_and_eight_to_one_to_one() -> None:
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    ids = torch.randint(3, 259, (40, 1000))
    batch = DataCollatorForLongSequences(tokenizer, mlm=True, seed=0)(list(ids))
    chosen = batch["labels"] != -100
    assert torch.equal(batch["labels"][chosen], ids[chosen])
    assert torch.equal(batch["input_ids"][~chosen], ids[~chosen])
    masked = batch["input_ids"] == tokenizer.mask_token_id
    kept = chosen & (batch["input_ids"] == ids)
    # Six standard deviations of these binomials.
    assert abs(chosen.float().mean() - 0.15) < 0.011
    assert abs((masked & chosen).sum() / chosen.sum() - 0.8) < 0.031
    assert abs((kept & chosen).sum() / chosen.sum() - 0.1) < 0.024
    random = batch["input_ids"][chosen & ~masked & ~kept]
    assert len(random.unique()) > 200
    assert not torch.isin(random, torch.tensor(tokenizer.all_special_ids)).any()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_special_tokens_and_padding_are_never_chosen(whole: bool, side: str) -> None:
    tokenizer = byte_tokenizer(padding_side=side)
    collate = DataCollatorForLongSequences(tokenizer, mlm=True, whole_word_mask=whole, mlm_probability=1.0)
    rows = [{"input_ids": [tokenizer("one two")["input_ids"], tokenizer("three")["input_ids"]]}, tokenizer("four")]
    rows[1] = dict(rows[1]) | {"special_tokens_mask": [0, 1, 0, 0, 1]}
    rows[0]["special_tokens_mask"] = [[0] * 8, [0] * 6]
    batch = collate(rows)
    chosen = batch["labels"] != -100
    real = batch["attention_mask"].bool()
    plain = DataCollatorForLongSequences(tokenizer)(rows)["input_ids"]
    expected = real & (plain != 1)
    second = torch.zeros_like(real)
    second[1, (14 - 5 if side == "left" else 0) + 1] = True
    assert torch.equal(chosen, expected & ~second)


def words_of(batch: dict[str, torch.Tensor], words: list[list[int]]) -> list[list[bool]]:
    """Of each word (places in the first row), which of its tokens are chosen."""
    chosen = batch["labels"][0] != -100
    return [[bool(chosen[place]) for place in word] for word in words]


def assert_whole(collate: DataCollatorForLongSequences, row: dict[str, Any], words: list[list[int]]) -> None:
    seen = set()
    for _ in range(40):
        batch = collate([row])
        found = words_of(batch, words)
        assert all(len(set(word)) == 1 for word in found)
        seen.add(tuple(word[0] for word in found))
        masked = batch["input_ids"][0] == collate.tokenizer.mask_token_id
        assert all(len({bool(masked[place]) for place in word}) == 1 for word in words)
    # Every word has been chosen and not chosen, together with others and without.
    assert all(len({outcome[index] for outcome in seen}) == 2 for index in range(len(words)))
    assert len(seen) > len(words)


def whole_words(tokenizer: Any) -> DataCollatorForLongSequences:
    return DataCollatorForLongSequences(tokenizer, mlm=True, whole_word_mask=True, mlm_probability=0.5, seed=0)


@pytest.mark.parametrize("make", [ByT5Tokenizer, ReformerLSHByteTokenizer])
def test_bytes_between_spaces_are_masked_whole(make: Callable[[], Any]) -> None:
    tokenizer = make()
    # What the error of a tokenizer without a mask token says to do.
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    row = tokenizer("né, ab\nc")
    assert_whole(whole_words(tokenizer), row, [[0, 1, 2, 3], [4], [5, 6], [7], [8]])


@pytest.mark.parametrize("scheme", ["wordpiece", "byte-level"])
def test_marks_of_the_vocabulary_say_what_a_word_is(scheme: str) -> None:
    tokenizer = piece_tokenizer(scheme)
    pieces = {
        "wordpiece": ["hel", "##lo", "wor", "##ld", "##s", "[SEP]", "good", "bye"],
        "byte-level": ["hel", "lo", "Ġwor", "ld", "s", "[SEP]", "lo", "Ġbye", "Ċ", "lo"],
    }[scheme]
    row = {"input_ids": tokenizer.convert_tokens_to_ids(pieces)}
    words = [[0, 1], [2, 3, 4], [6], [7]] + ([[8], [9]] if scheme == "byte-level" else [])
    assert_whole(whole_words(tokenizer), row, words)


def test_word_ids_and_offsets_say_it_where_they_are_given() -> None:
    tokenizer = piece_tokenizer("unmarked")
    ids = tokenizer.convert_tokens_to_ids(["hel", "lo", "wor", "ld", "s", "[SEP]", "good", "bye"])
    words = [[0, 1], [2, 3, 4], [6], [7]]
    numbers = [0, 0, 1, 1, 1, None, 2, 3]
    offsets = [(0, 3), (3, 5), (6, 9), (9, 11), (11, 12), (0, 0), (13, 17), (18, 21)]
    assert_whole(whole_words(tokenizer), {"input_ids": ids, "word_ids": numbers}, words)
    assert_whole(whole_words(tokenizer), {"input_ids": ids, "offset_mapping": offsets}, words)
    with pytest.raises(ValueError, match="remove_unused_columns=False"):
        whole_words(tokenizer)([{"input_ids": ids}])


def test_a_fast_tokenizer_s_own_columns_serve() -> None:
    tokenizer = piece_tokenizer("wordpiece")
    encoding = tokenizer("hello worlds good", return_offsets_mapping=True)
    assert tokenizer.convert_ids_to_tokens(encoding["input_ids"]) == ["hello", "wor", "##ld", "##s", "good"]
    words = [[0], [1, 2, 3], [4]]
    assert_whole(whole_words(tokenizer), dict(encoding), words)
    row = {"input_ids": encoding["input_ids"], "word_ids": encoding.word_ids()}
    assert_whole(whole_words(tokenizer), row, words)


def test_a_word_ends_with_its_document() -> None:
    tokenizer = byte_tokenizer()
    row = {"input_ids": [tokenizer("ab", add_special_tokens=False)["input_ids"]] * 3}
    assert_whole(whole_words(tokenizer), row, [[0, 1], [2, 3], [4, 5]])


def test_columns_that_no_model_takes_are_not_handed_on() -> None:
    tokenizer = piece_tokenizer("wordpiece")
    encoding = tokenizer("hello worlds", return_offsets_mapping=True, return_special_tokens_mask=True)
    for collate in (DataCollatorForLongSequences(tokenizer), whole_words(tokenizer)):
        batch = collate([dict(encoding) | {"word_ids": encoding.word_ids()}])
        assert batch.keys() == {"input_ids", "attention_mask", "labels"}


def test_masks_come_from_the_seed_or_from_torch() -> None:
    rows = [list(range(3, 200))] * 2

    def draw(**options: Any) -> list[torch.Tensor]:
        collate = DataCollatorForLongSequences(byte_tokenizer(), mlm=True, **options)
        return [collate(rows)["labels"] for _ in range(2)]

    torch.manual_seed(0)
    state = torch.get_rng_state()
    first, second = draw(seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, second)
    assert all(map(torch.equal, draw(seed=1), (first, second)))
    assert not torch.equal(draw(seed=2)[0], first)
    free = draw()
    torch.manual_seed(0)
    assert all(map(torch.equal, draw(), free))


def test_a_copy_begins_its_masks_anew() -> None:
    rows = [list(range(3, 200))]
    collate = DataCollatorForLongSequences(byte_tokenizer(), mlm=True, seed=1)
    first = collate(rows)["labels"]
    copy = pickle.loads(pickle.dumps(collate))
    assert copy.seed == collate.seed
    assert torch.equal(copy(rows)["labels"], first)
    assert not torch.equal(collate(rows)["labels"], first)


@pytest.mark.parametrize("seed", [None, 5])
def test_worker_processes_mask_reproducibly_and_each_in_its_own_way(seed: int | None) -> None:
    rows = [list(range(3, 100))] * 4
    collate = DataCollatorForLongSequences(byte_tokenizer(), mlm=True, seed=seed)

    def epoch() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        loader = DataLoader(
            rows,
            batch_size=2,
            collate_fn=collate,
            num_workers=2,
            generator=generator,
            timeout=60,  # type: ignore[arg-type]
        )
        return [batch["labels"] for batch in loader]

    first, second = epoch()
    assert not torch.equal(first, second)
    assert all(map(torch.equal, epoch(), (first, second)))


# Training


REFORMER = {"attn_layers": ("local", "lsh"), "lsh_attn_chunk_length": 16, "local_attn_chunk_length": 16}
REFORMER |= {"num_hashes": 1, "num_buckets": 4, "max_position_embeddings": 512}
INFINITE = {"num_hidden_layers": 1, "segment_length": 16, "num_basis": 16, "basis_widths": (0.05, 0.1)}
SIZES: dict[str, Any] = {"vocab_size": 384, "hidden_size": 16, "num_attention_heads": 2}


def build(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "infinite_former":
        return InfiniteFormerForCausalLM(InfiniteFormerConfig(**SIZES, **INFINITE))
    if kind == "reformer_lsh":
        return ReformerLSHForCausalLM(ReformerLSHConfig(**SIZES, **REFORMER))
    config = ReformerLSHConfig(**SIZES, **REFORMER, is_decoder=False, lsh_num_chunks_after=1)
    return ReformerLSHForMaskedLM(config)


@pytest.mark.parametrize("kind", ["reformer_lsh", "infinite_former", "reformer_lsh, masked"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_stock_trainer_trains_on_it(kind: str, packed: bool, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 259, (length,), generator=generator).tolist() for length in (1, 2, 63, 65)]
    columns: dict[str, list[Any]] = {"input_ids": rows, "text": ["a"] * 4}
    if packed:
        columns["document_ids"] = [[place // 20 for place in range(len(row))] for row in rows]
    seen: list[set[str]] = []
    collate = DataCollatorForLongSequences(byte_tokenizer(), mlm="masked" in kind)

    def watch(features: list[Any]) -> dict[str, torch.Tensor]:
        batch = collate(features)
        seen.append(set(batch))
        return batch

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
    )
    data = Dataset.from_dict(columns)
    trainer = Trainer(build(kind), arguments, data_collator=watch, train_dataset=data, eval_dataset=data)
    result = trainer.train()
    assert np.isfinite(result.training_loss)
    assert np.isfinite(trainer.evaluate()["eval_loss"])
    assert {frozenset(names) for names in seen} == {
        frozenset({"input_ids", "attention_mask", "labels"} | ({"document_ids"} if packed else set()))
    }


@pytest.mark.parametrize("kind", ["reformer_lsh", "infinite_former"])
def test_a_packed_batch_has_the_loss_of_its_documents(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (2, 63, 64, 65, 257)
    singles = [torch.randint(3, 259, (length,), generator=generator).tolist() for length in lengths]
    model = build(kind).double().eval()
    collate = DataCollatorForLongSequences(ByT5Tokenizer())
    losses = [
        model(**collate(rows)).loss for rows in (singles, [{"input_ids": singles[:3]}, {"input_ids": singles[3:]}])
    ]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-8, rtol=1e-8)


def test_the_name_is_public() -> None:
    assert "DataCollatorForLongSequences" in hf_longmem.__all__
