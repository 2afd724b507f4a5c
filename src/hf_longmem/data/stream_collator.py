"""Batches of pieces of documents, and the memory that goes from one batch to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hf_longmem._errors import complaint
from hf_longmem.data.streams import StreamPosition
from hf_longmem.models.stream_memory import CarriedMemory, StreamMemory

_IN_ORDER = (
    'set train_sampling_strategy="sequential" and dataloader_num_workers=0 (of an iterable on several processes also '
    'accelerator_config={"dispatch_batches": False}), and make the streams for this batch size and number of processes'
)


class _BatchMemory(StreamMemory):
    """The carried memory as one batch sees it."""

    def __init__(self, carried: CarriedMemory, time: int) -> None:
        self._carried, self._time = carried, time

    @property
    def value(self) -> Any:
        return self._carried.read(self._time)

    @value.setter
    def value(self, value: Any) -> None:
        self._carried.write(self._time, value)

    def __repr__(self) -> str:
        return f"<memory of the batches before batch {self._time}>"


class DataCollatorForStreams:
    """Make batches of the pieces of `DocumentStreams`, and carry the model's memory from each to the next.

    A batch holds ``input_ids`` and ``attention_mask`` (padded to the longest piece), ``labels``, ``shift_labels``
    (the next token at every position: the last token of a piece predicts the first one of the next piece, so that
    every token but a document's first is predicted once), ``reset_memory`` (the rows in which a document starts) and
    ``memory``, a `StreamMemory`. One collator serves training and evaluation: each data set has its own memory.

    Metrics get labels that need no shifting with ``TrainingArguments(label_names=["shift_labels"])``. Trainer's label
    smoothing shifts ``labels`` inside a piece, and so leaves out the first token of each.

    Args:
        pad_token_id: what to fill ``input_ids`` with; it is masked.
        pad_to_multiple_of: pad to a multiple of this.

    Raises:
        ValueError: the pieces are not those that come next, or not of document streams, or the model takes no memory.
    """

    def __init__(self, pad_token_id: int = 0, pad_to_multiple_of: int | None = None) -> None:
        if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
            raise ValueError(complaint("pad_to_multiple_of must be at least 1", pad_to_multiple_of, "leave it out"))
        self.pad_token_id, self.pad_to_multiple_of = pad_token_id, pad_to_multiple_of
        self._carried: WeakKeyDictionary[Any, CarriedMemory] = WeakKeyDictionary()

    def carried(self, streams: Any) -> CarriedMemory:
        """What is remembered of a data set's streams, to be saved and restored."""
        return self._carried.setdefault(streams, CarriedMemory())

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch."""
        positions = [_position(feature) for feature in features]
        streams, time = positions[0].streams, positions[0].time
        self._check_order(positions)
        lengths = [len(feature["input_ids"]) for feature in features]
        multiple = self.pad_to_multiple_of or 1
        # A batch of nothing but padding still has a column.
        longest = -(-max(1, *lengths) // multiple) * multiple
        input_ids = torch.full((len(features), longest), self.pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        shift_labels = torch.full_like(input_ids, -100)
        for row, (feature, position, length) in enumerate(zip(features, positions, lengths, strict=True)):
            if not length:
                continue
            tokens = torch.as_tensor(feature["input_ids"])
            input_ids[row, :length] = tokens
            attention_mask[row, :length] = 1
            shift_labels[row, : length - 1] = tokens[1:]
            if position.next_token is not None:
                shift_labels[row, length - 1] = position.next_token
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "labels": input_ids.masked_fill(attention_mask == 0, -100),
            "shift_labels": shift_labels,
            "reset_memory": torch.tensor([bool(feature["reset_memory"]) for feature in features]),
            "memory": _BatchMemory(self.carried(streams), time),
        }

    def _check_order(self, positions: list[StreamPosition]) -> None:
        streams, time = positions[0].streams, positions[0].time
        rows = [position.row for position in positions]
        if any(position.streams is not streams or position.time != time for position in positions):
            rule = "a batch must hold the next piece of each of its rows"
            received = f"pieces {[position.time for position in positions]} of rows {rows}"
            raise ValueError(complaint(rule, received, _IN_ORDER))
        carried = self.carried(streams)
        last_time, last_rows = (time - 1, rows) if carried.made is None else carried.made
        # Every epoch, and every evaluation, begins anew with the same rows.
        if rows != last_rows or time not in (0, last_time + 1):
            rule = f"piece {last_time + 1} of rows {last_rows} comes next"
            fix = f"{_IN_ORDER}; for another loader, as for evaluation, make other streams"
            raise ValueError(complaint(rule, f"piece {time} of rows {rows}", fix))
        carried.made = (time, rows)


def _position(feature: dict[str, Any]) -> StreamPosition:
    position = feature.get("memory")
    if not isinstance(position, StreamPosition):
        rule = "batches of streams are made of the pieces of DocumentStreams, for a model whose forward has memory"
        fix = "use both, or DataCollatorForLongSequences for models without memory"
        raise ValueError(complaint(rule, f"items with {', '.join(feature)}", fix))
    return position


__all__ = ["DataCollatorForStreams"]
