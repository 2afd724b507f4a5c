"""What may be given as documents: the checks that streams and packing share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow.compute
from datasets import Dataset, IterableDataset

from hf_longmem._errors import complaint

# Columns that say something of each token, and that neither streams nor packed rows take over.
BESIDE_IDS = ("attention_mask", "labels")


def check_documents(documents: Any) -> None:
    """Refuse what would be taken for documents letter by letter, split by split or column by column.

    Args:
        documents: what was given as a collection of documents.

    Raises:
        ValueError: it is a string or a mapping.
    """
    rule = "documents must be a data set, a list or another iterable of documents"
    if isinstance(documents, str):
        raise ValueError(complaint(rule, "str", "pass a list of one document"))
    if isinstance(documents, Mapping):
        names = list(map(str, documents))
        if any(isinstance(part, Dataset | IterableDataset) for part in documents.values()):
            fix = f"name a split, for instance documents[{names[0]!r}]"
        else:
            fix = "pass columns as Dataset.from_dict(columns), and one document in a list"
        raise ValueError(complaint(rule, f"a {type(documents).__name__} of {', '.join(names) or 'nothing'}", fix))


def token_ids(ids: Any) -> np.ndarray:
    """Give token ids as int64 ``[T]``.

    Args:
        ids: a list, array or tensor.

    Raises:
        ValueError: they are no whole numbers one after another.
    """
    try:
        found = np.asarray(ids)
    except ValueError:  # lists of different lengths
        found = np.empty((0, 0), object)
    if found.shape == (0,):
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        fix = "look at the tokenized data"
        raise ValueError(complaint("token ids must be whole numbers, one list a document", _kind(ids, found), fix))
    return found.astype(np.int64)


def ids_of_row(row: Mapping[str, Any]) -> Any:
    """Give the ``input_ids`` of a row, whose ``attention_mask`` and ``labels`` must say nothing more.

    Raises:
        ValueError: padding is marked, or labels differ from the ids.
    """
    ids = row["input_ids"]
    given = {name: np.asarray(row[name]) for name in BESIDE_IDS if row.get(name) is not None}
    mask, labels = given.get("attention_mask"), given.get("labels")
    if mask is not None and not mask.all():
        raise _is_padded()
    # One label a row is that of a class, and nothing that a language model is trained on.
    if labels is not None and labels.ndim and not np.array_equal(labels, np.asarray(ids)):
        raise _has_labels()
    return ids


def check_table(table: Any) -> None:
    """Refuse rows of an Arrow table with ``input_ids`` for what `token_ids` and `ids_of_row` refuse.

    Raises:
        ValueError: the ids are no lists of whole numbers, or another column says something more of the tokens.
    """
    column = table["input_ids"]
    value_type = getattr(column.type, "value_type", None)
    if value_type is None or not pyarrow.types.is_integer(value_type):
        rule = "input_ids must hold a list of whole numbers in each row"
        raise ValueError(complaint(rule, column.type, "look at the tokenized data"))
    ids = pyarrow.compute.list_flatten(column)
    if column.null_count or ids.null_count:
        fix = "leave such rows out, for instance with Dataset.filter"
        raise ValueError(complaint("every row must have its input_ids", "null", fix))
    lists = {name: table[name] for name in BESIDE_IDS if name in table.column_names}
    flat = {
        name: pyarrow.compute.list_flatten(column).to_numpy()
        for name, column in lists.items()
        if hasattr(column.type, "value_type")
    }
    if "attention_mask" in flat and not flat["attention_mask"].all():
        raise _is_padded()
    if "labels" in flat and len(flat["labels"]) and not np.array_equal(flat["labels"], ids.to_numpy()):
        raise _has_labels()


def _kind(ids: Any, found: np.ndarray) -> str:
    if found.ndim == 0:
        return repr(ids)
    if found.ndim > 1:
        return "lists in a list"
    if any(token is None for token in found.flat):
        return "null among them"
    return {"f": "numbers with fractions", "b": "truth values", "U": "text"}.get(found.dtype.kind, "something else")


def _is_padded() -> ValueError:
    rule = "documents must hold no padding (attention_mask must be 1 throughout)"
    return ValueError(complaint(rule, "a row with zeros", "tokenize without padding"))


def _has_labels() -> ValueError:
    rule = "every token of a document is predicted from those before it (labels must equal input_ids)"
    fix = "remove the column labels, or use DataCollatorForLongSequences, which keeps them"
    return ValueError(complaint(rule, "other labels", fix))


__all__ = ["BESIDE_IDS", "check_documents", "check_table", "ids_of_row", "token_ids"]
