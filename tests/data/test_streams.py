"""Documents in the rows of batches: who reads what, and when."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, LargeList, List, Value, load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import BatchEncoding, ByT5Tokenizer, PreTrainedTokenizerFast

from hf_longmem import DocumentStreams
from hf_longmem.data.streams import IterableDocumentStreams

Streams = DocumentStreams | IterableDocumentStreams


def numbered(lengths: list[int]) -> list[list[int]]:
    """Documents no two tokens of which are equal."""
    starts = itertools.accumulate([0, *lengths])
    return [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=False)]


def pieces_of_rows(streams: Streams) -> list[list[dict[str, Any]]]:
    """What every row reads, as one process after the other gets it in batches of ``batch_size``."""
    pieces = (
        list(streams) if isinstance(streams, IterableDocumentStreams) else [streams[i] for i in range(len(streams))]
    )
    rows: list[list[dict[str, Any]]] = [[] for _ in range(streams.num_rows)]
    size = streams.batch_size
    for number, start in enumerate(range(0, len(pieces), size)):
        rank = number % streams.world_size
        for place, piece in enumerate(pieces[start : start + size]):
            rows[rank * size + place].append(piece)
    return rows


def documents_read(pieces: list[dict[str, Any]]) -> list[list[int]]:
    found: list[list[int]] = []
    for piece in pieces:
        if piece["reset_memory"]:
            found.append([])
        if len(piece["input_ids"]):
            found[-1] += piece["input_ids"].tolist()
    return found


sizes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 7))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), sizes, st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_document_is_read_once_in_order_by_one_row(
    lengths: list[int], sizes: tuple[int, int, int], balanced: bool
) -> None:
    documents = [document for document in numbered(lengths) if document]
    if not documents:
        return
    batch_size, world_size, length = sizes
    arguments = {"batch_size": batch_size, "world_size": world_size, "sequence_length": length, "balanced": balanced}
    streams = DocumentStreams(numbered(lengths), **arguments)
    rows = pieces_of_rows(streams)
    assert sorted(itertools.chain.from_iterable(map(documents_read, rows))) == documents
    assert len({len(pieces) for pieces in rows}) == 1
    assert max(len(pieces[-1]["input_ids"]) for pieces in rows) > 0
    for row, pieces in enumerate(rows):
        ended = False
        for time, (piece, after) in enumerate(itertools.pairwise([*pieces, None])):
            position = piece["memory"]
            tokens = piece["input_ids"].tolist()
            assert (position.row, position.time) == (row, time)
            assert len(tokens) <= length
            goes_on = after is not None and len(after["input_ids"]) > 0 and not after["reset_memory"]
            assert position.next_token == (after["input_ids"][0] if goes_on else None)
            assert not goes_on or len(tokens) == length
            # Padding comes last, and begins nothing.
            assert not (ended and tokens)
            ended = ended or not tokens
            assert not (piece["reset_memory"] and not tokens)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), sizes)
@settings(max_examples=100, deadline=None)
def test_streams_of_an_iterable_are_the_same(lengths: list[int], sizes: tuple[int, int, int]) -> None:
    documents = numbered(lengths)
    if not any(documents):
        return
    batch_size, world_size, length = sizes
    arguments = {"batch_size": batch_size, "world_size": world_size, "sequence_length": length}
    stored = DocumentStreams(documents, **arguments)
    expected = [stored[index] for index in range(len(stored))]
    kinds: list[Callable[[list[int]], Any]] = [list, np.asarray, torch.tensor, iter, lambda ids: {"input_ids": ids}]
    for kind in kinds:
        streamed = list(DocumentStreams.from_iterable(map(kind, documents), **arguments))
        same_pieces(streamed, expected)


def test_balanced_rows_end_together_and_keep_the_order() -> None:
    documents = numbered([10, 20, 30, 10, 100, 70])
    plain, balanced = (
        DocumentStreams(documents, batch_size=2, world_size=1, sequence_length=10, balanced=choice)
        for choice in (False, True)
    )
    assert (len(plain), len(balanced)) == (2 * 13, 2 * 12)
    for pieces in pieces_of_rows(balanced):
        assert documents_read(pieces) == sorted(documents_read(pieces))


def test_rows_that_are_mostly_padding_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        DocumentStreams(numbered([20, 20, 20]), batch_size=6, world_size=1, sequence_length=10)
        assert not caplog.records
        DocumentStreams(numbered([20, 20]), batch_size=6, world_size=1, sequence_length=10)
    assert "67% of the pieces are padding: 2 documents in 6 rows" in caplog.text


def same_pieces(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    assert len(first) == len(second)
    for mine, theirs in zip(first, second, strict=True):
        assert mine["input_ids"].tolist() == theirs["input_ids"].tolist()
        assert mine["reset_memory"] == theirs["reset_memory"]
        assert mine["memory"][1:] == theirs["memory"][1:]


@pytest.mark.parametrize("largest", [5, 255, 256, 65535, 65536, 2**31 - 1])
def test_token_ids_of_every_size_are_kept(largest: int) -> None:
    streams = DocumentStreams([[0, largest], [3]], batch_size=1, world_size=1, sequence_length=4)
    assert [streams[index]["input_ids"].tolist() for index in range(2)] == [[0, largest], [3]]


@pytest.mark.parametrize("kind", [List, LargeList])
def test_a_data_set_of_token_ids_is_read_from_disk(tmp_path: Path, kind: Any) -> None:
    lengths = [100, 0, 7, 64, 65, 1, 250]
    documents = numbered(lengths)
    features = Features({"name": Value("string"), "input_ids": kind(Value("int32"))})
    rows = {"name": [str(length) for length in lengths], "input_ids": documents}
    Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    saved = load_from_disk(str(tmp_path / "saved"))
    order = [6, 2, 1, 0, 3]
    arguments = {"batch_size": 2, "world_size": 1, "sequence_length": 16}
    for data, chosen in ((saved, documents), (saved.select(order), [documents[index] for index in order])):
        streams, expected = DocumentStreams(data, **arguments), DocumentStreams(chosen, **arguments)
        same_pieces([streams[i] for i in range(len(streams))], [expected[i] for i in range(len(expected))])


def test_text_ends_with_the_end_of_sequence() -> None:
    tokenizer = ByT5Tokenizer()
    texts = ["Grüße</s>", "", "x" * 70_000]
    arguments = {"batch_size": 1, "world_size": 1, "sequence_length": 1000, "tokenizer": tokenizer}
    data = Dataset.from_dict({"story": texts})
    streams = DocumentStreams(data, text_column="story", **arguments)
    read = documents_read([streams[index] for index in range(len(streams))])
    for tokens, text in zip(read, texts, strict=True):
        assert tokens[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in tokens[:-1]
        assert tokenizer.decode(tokens[:-1]) == text
    lines = (iter(("Grü", "ße</s>")), iter(("",)), iter(("x" * 30_000, "x" * 40_000)))
    for source in (texts, data, lines):
        again = list(DocumentStreams.from_iterable(source, text_column="story", **arguments))
        assert documents_read(again) == read


class Watched:
    """Documents of endless length that say how far each was read."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.opened: list[int] = []
        self.tokens_read = [0] * len(lengths)

    def __iter__(self) -> Iterator[Iterator[int]]:
        for number, length in enumerate(self.lengths):
            self.opened.append(number)
            yield self.document(number, length)

    def document(self, number: int, length: int) -> Iterator[int]:
        for token in range(length):
            self.tokens_read[number] += 1
            yield token % 50


def test_an_iterable_is_read_no_further_than_the_piece() -> None:
    documents = Watched([10**9, 200, 10**9, 10**9])
    pieces = iter(DocumentStreams.from_iterable(documents, batch_size=2, world_size=1, sequence_length=100))
    for time in range(5):
        assert [next(pieces)["memory"].time for _ in range(2)] == [time, time]
        # The third document is opened when the second one is done, the fourth one never.
        assert documents.opened == ([0, 1] if time < 2 else [0, 1, 2])
        assert (time + 1) * 100 < documents.tokens_read[0] <= (time + 1) * 100 + 64
        assert documents.tokens_read[3] == 0


def test_an_iterable_goes_on_where_its_state_says() -> None:
    documents = numbered([30, 5, 17, 40])
    streams = DocumentStreams.from_iterable(documents, batch_size=2, world_size=1, sequence_length=4)
    everything = list(streams)
    iterator = iter(streams)
    for _ in range(6):
        next(iterator)
    state = streams.state_dict()
    assert state == {"time": 3}
    again = DocumentStreams.from_iterable(documents, batch_size=2, world_size=1, sequence_length=4)
    again.load_state_dict(state)
    same_pieces(list(again), everything[6:])
    same_pieces(list(again), everything)


def test_another_epoch_needs_documents_that_can_be_read_again() -> None:
    arguments = {"batch_size": 1, "world_size": 1, "sequence_length": 4}
    once = DocumentStreams.from_iterable(iter(numbered([5])), **arguments)
    assert len(list(once)) == 2
    with pytest.raises(ValueError, match="can be read again, got an iterator that was read before; pass a function"):
        list(once)
    for source in (numbered([5]), lambda: iter(numbered([5]))):
        streams = DocumentStreams.from_iterable(source, **arguments)
        assert len(list(streams)) == len(list(streams)) == 2


def test_the_number_of_processes_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DocumentStreams([[1]], batch_size=2, sequence_length=3).num_rows == 2
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert DocumentStreams([[1]], batch_size=2, sequence_length=3).num_rows == 8


@pytest.mark.parametrize("streams_of", [DocumentStreams, DocumentStreams.from_iterable])
def test_worker_processes_are_refused(streams_of: Callable[..., Streams]) -> None:
    streams = streams_of([[1, 2, 3]], batch_size=1, sequence_length=2)
    loader = DataLoader(streams, num_workers=1, collate_fn=lambda items: items)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got worker process 0; set dataloader_num_workers=0"):
        list(loader)


@pytest.mark.parametrize(
    ("documents", "arguments", "message"),
    [
        ([[1]], {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ([[1]], {"sequence_length": 0}, "sequence_length must be at least 1, got 0"),
        ([[1]], {"world_size": 0}, "world_size must be at least 1, got 0"),
        ([], {}, "documents must have tokens, got 0 without any"),
        ([[], []], {}, "documents must have tokens, got 2 without any"),
        ([5, 6, 7], {}, "each document must hold token ids or text, got 5; pass a list of one document"),
        (["text"], {}, "documents of text need a tokenizer, got none"),
        (Dataset.from_dict({"text": ["a"]}), {}, "documents of text need a tokenizer, got none"),
        (Dataset.from_dict({"body": ["a"]}), {}, "the column input_ids or 'text', got body; name the text_column"),
    ],
)
def test_what_cannot_be_streamed(documents: Any, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DocumentStreams(documents, **({"batch_size": 1, "sequence_length": 4, "world_size": 1} | arguments))


def test_what_cannot_be_streamed_from_an_iterable() -> None:
    arguments = {"batch_size": 1, "sequence_length": 4}
    with pytest.raises(ValueError, match="iterable, or a function that returns one, got None"):
        DocumentStreams.from_iterable(None, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="input_ids or 'text', got body; name the text_column"):
        list(DocumentStreams.from_iterable([{"body": "a"}], **arguments))
    with pytest.raises(IndexError, match=r"in 0 \.\. 0, got 1"):
        DocumentStreams([[1]], **arguments)[1]


SPLITS = DatasetDict(train=Dataset.from_dict({"text": ["a"]}), test=Dataset.from_dict({"text": ["b"]}))


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ("text", "got str; pass a list of one document"),
        (SPLITS, r"got a DatasetDict of train, test; name a split, for instance documents\['train'\]"),
        (BatchEncoding({"input_ids": [[1, 2]]}), "got a BatchEncoding of input_ids; pass columns as Dataset"),
        ({"input_ids": [1, 2]}, "got a dict of input_ids; .* and one document in a list"),
        ({}, "got a dict of nothing"),
    ],
)
def test_names_and_letters_are_no_documents(documents: Any, message: str) -> None:
    arguments = {"batch_size": 1, "sequence_length": 4, "tokenizer": ByT5Tokenizer()}
    for streams_of in (DocumentStreams, DocumentStreams.from_iterable):
        with pytest.raises(ValueError, match=message):
            streams_of(documents, **arguments)
    with pytest.raises(ValueError, match=message):
        list(DocumentStreams.from_iterable(lambda: documents, **arguments))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, None], "got null"),
        ([1.5, 2.0], "whole numbers"),
        ([[1, 2], [3, 4]], "whole numbers"),
        ([[1, 2], [3]], "whole numbers"),
        (["a", "b"], "whole numbers|need a tokenizer"),
        ([True, False], "whole numbers"),
    ],
)
def test_token_ids_are_whole_numbers(ids: list[Any], message: str) -> None:
    arguments = {"batch_size": 1, "sequence_length": 4}
    for documents in ([[5], ids], [{"input_ids": ids}], Dataset.from_dict({"input_ids": [ids]})):
        with pytest.raises(ValueError, match=message):
            DocumentStreams(documents, **arguments)
        with pytest.raises(ValueError, match=message):
            list(DocumentStreams.from_iterable(documents, **arguments))


def test_a_row_without_token_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="every row must have its input_ids, got null; leave such rows out"):
        DocumentStreams(Dataset.from_dict({"input_ids": [[1], None]}), batch_size=1, sequence_length=4)
    with pytest.raises(ValueError, match="must hold strings alone, got None"):
        DocumentStreams([["a", None]], batch_size=1, sequence_length=4, tokenizer=ByT5Tokenizer())


@pytest.mark.parametrize("kind", [Dataset.from_list, list, lambda rows: Dataset.from_list(rows).with_format("torch")])
def test_padding_and_labels_of_rows_are_not_dropped_unseen(kind: Callable[..., Any]) -> None:
    arguments = {"batch_size": 1, "sequence_length": 4}
    ids = {"input_ids": [5, 6, 7]}
    for beside, message in (
        ({"attention_mask": [1, 1, 0]}, "no padding .* got a row with zeros; tokenize without padding"),
        ({"labels": [-100, 6, 7]}, r"\(labels must equal input_ids\), got other labels; remove the column labels"),
    ):
        rows = kind([ids | {"attention_mask": [1, 1, 1], "labels": [5, 6, 7]}, ids | beside])
        with pytest.raises(ValueError, match=message):
            DocumentStreams(rows, **arguments)
        with pytest.raises(ValueError, match=message):
            list(DocumentStreams.from_iterable(rows, **arguments))
    rows = kind([ids | {"attention_mask": [1, 1, 1], "labels": [5, 6, 7]}])
    assert DocumentStreams(rows, **arguments)[0]["input_ids"].tolist() == [5, 6, 7]
    # The label of a class.
    rows = kind([ids | {"labels": 1}])
    assert DocumentStreams(rows, **arguments)[0]["input_ids"].tolist() == [5, 6, 7]


def test_a_document_in_strings_is_their_text() -> None:
    # One token for all of it, which only the whole text shows.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"ab": 0, "a": 1, "b": 2}, "b")))
    streams = DocumentStreams.from_iterable([["a", "b"]], batch_size=1, sequence_length=4, tokenizer=tokenizer)
    assert documents_read(list(streams)) == [[0]]


def test_the_state_at_the_end_begins_the_next_epoch() -> None:
    documents = numbered([9, 5])
    streams, again = (
        DocumentStreams.from_iterable(documents, batch_size=1, sequence_length=4, world_size=1) for _ in range(2)
    )
    everything = list(streams)
    again.load_state_dict(streams.state_dict())
    same_pieces(list(again), everything)
    again.load_state_dict({"time": len(everything)})
    with pytest.raises(ValueError, match=r"before the documents' end, 5, got 5; load \{'time': 0\}"):
        list(again)


def test_an_epoch_without_documents_is_refused() -> None:
    documents = iter(numbered([5]))
    streams = DocumentStreams.from_iterable(lambda: documents, batch_size=1, sequence_length=4)
    assert len(list(streams)) == 2
    with pytest.raises(ValueError, match=r"every epoch must have documents with tokens, got none; .* new iterator"):
        list(streams)
