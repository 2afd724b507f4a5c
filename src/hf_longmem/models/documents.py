"""Several documents packed in one row: what each gives is what it would give alone."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_longmem._errors import complaint
from hf_longmem.models.padding import check_documents, check_positions, pop_documents, real_tokens
from hf_longmem.ops.documents import document_numbers

# Documents of at most so many tokens share a batch; above, those whose lengths differ by less than a factor of two.
_SHORT = 16


def next_token_labels(
    labels: Tensor, document_ids: Tensor | None = None, attention_mask: Tensor | None = None
) -> Tensor:
    """What each token is to predict, ``[B, T]``: the label of the next real token, -100 at the end of a document and of
    a row, and where padding stands.

    Args:
        labels: ``[B, T]``, as the input ids, -100 where nothing is to be predicted.
        document_ids: ``[B, T]``, equal for the tokens of one document; None where a row is one document.
        attention_mask: ``[B, T]``, 0 for padding, which may stand anywhere.
    """
    real = None if attention_mask is None else real_tokens(attention_mask, labels)
    if real is not None:
        order = torch.argsort(~real, dim=1, stable=True)
        documents = None if document_ids is None else document_ids.to(labels.device).gather(1, order)
        after = next_token_labels(labels.masked_fill(~real, -100).gather(1, order), documents)
        return after.gather(1, torch.argsort(order, dim=1)).masked_fill(~real, -100)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    if document_ids is None:
        return shifted
    ends = torch.nn.functional.pad(document_ids[:, 1:] != document_ids[:, :-1], (0, 1), value=True)
    return shifted.masked_fill(ends.to(labels.device), -100)


def refuse_documents(document_ids: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raise a ValueError if a model that reads one answer from each row is given packed rows."""
    if pop_documents(kwargs, document_ids) is not None:
        fix = "leave document_ids out and give each document a row of its own"
        raise ValueError(complaint("a sequence classifier scores one document a row", "document_ids", fix))


def unpack_documents(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a base model's ``forward`` so that each document of a packed row is computed in a row of its own.

    With ``document_ids`` (``[B, T]``, integer, rising within a row, equal for the tokens of one document) ``forward``
    is called on right-padded batches of whole documents of similar length, and ``last_hidden_state``,
    ``hidden_states`` and ``memory_loss`` (``[B, T]``) are put back; padding gets zeros. No cache and no memory is
    returned: a packed row has no one end to go on from. Without ``document_ids`` nothing changes. Goes outside
    ``@compact_padding`` and ``@carried_memory``.

    How often layers are called depends on the lengths of the documents. Where processes share out the parameters
    themselves (FSDP, ZeRO-3) and meet at every call of a layer, all of them need documents of the same lengths.

    ``forward`` has the arguments ``input_ids``, ``attention_mask`` and ``inputs_embeds`` and takes ``return_dict``;
    where it has ``position_ids``, ``cache``, ``use_cache``, ``memory`` or ``reset_memory``, they have their usual
    meaning.

    Raises:
        ValueError: ``document_ids`` that do not fit, or together with ``cache``, ``memory`` or ``reset_memory``.
    """
    signature = inspect.signature(forward)

    @wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        document_ids = pop_documents(kwargs)
        if document_ids is None:
            return forward(self, *args, **kwargs)
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        given = {name: value for name, value in (given | given.pop("kwargs", {})).items() if name != "self"}
        _refuse_past(given)
        return_dict = given.pop("return_dict", None)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        outputs = _run_documents(lambda **part: forward(self, **part), given, document_ids)
        return outputs if return_dict else outputs.to_tuple()

    return wrapper


def _refuse_past(given: dict[str, Any]) -> None:
    for name in ("cache", "memory", "reset_memory"):
        if given.get(name) is not None:
            fix = "read on with one document a row, as DocumentStreams gives them, or leave it out"
            raise ValueError(complaint(f"document_ids and {name} exclude each other", "both", fix))
    if given.get("output_attentions"):
        fix = "give each document a row of its own"
        raise ValueError(complaint("rows of several documents have no attentions", "output_attentions=True", fix))


class _Batch(NamedTuple):
    """Whole documents, one a row, padded on the right: where their tokens are among those of all rows end to end."""

    place_DT: Tensor
    real_DT: Tensor


def _run_documents(forward: Callable[..., Any], given: dict[str, Any], document_ids: Tensor) -> Any:
    given = given | {"return_dict": True}
    if "use_cache" in given:
        given["use_cache"] = False
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        return forward(**given)
    if given.get("position_ids") is not None:
        check_positions(given["position_ids"], tokens)
    batches = _batches(document_ids, given.get("attention_mask"), tokens)
    if not batches:
        return _without_past(forward(**given))
    found = [forward(**_select(given, batch, tokens.shape[0])) for batch in batches]

    def put_back(parts: Iterable[Tensor]) -> Tensor:
        values_NE = torch.cat([part[batch.real_DT] for part, batch in zip(parts, batches, strict=True)])
        place_N = torch.cat([batch.place_DT[batch.real_DT] for batch in batches])
        empty_YE = values_NE.new_zeros(tokens.shape[:2].numel(), *values_NE.shape[1:])
        return empty_YE.index_copy(0, place_N, values_NE).unflatten(0, tokens.shape[:2])

    outputs = _without_past(found[0])
    outputs["last_hidden_state"] = put_back(part["last_hidden_state"] for part in found)
    if outputs.get("hidden_states") is not None:
        *layers, last = zip(*(part["hidden_states"] for part in found), strict=True)
        same = found[0]["hidden_states"][-1] is found[0]["last_hidden_state"]
        states = (*map(put_back, layers), outputs["last_hidden_state"] if same else put_back(last))
        outputs["hidden_states"] = states
    if outputs.get("memory_loss") is not None:
        outputs["memory_loss"] = put_back(part["memory_loss"] for part in found)
    return outputs


def _batches(document_ids: Tensor, attention_mask: Tensor | None, tokens: Tensor) -> list[_Batch]:
    """Documents of similar lengths together, so that padding at most doubles what there is to compute."""
    document_ids = check_documents(document_ids, tokens)
    real = None if attention_mask is None else real_tokens(attention_mask, tokens)
    if real is None:
        real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    # All rows end to end, without the padding: every document is a stretch of these places.
    place_N = real.flatten().nonzero().squeeze(1)
    row_B1 = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    number_N = (document_numbers(document_ids, real) + row_B1 * tokens.shape[1]).flatten()[place_N]
    lengths: list[int] = torch.unique_consecutive(number_N, return_counts=True)[1].tolist()
    starts = [0, *accumulate(lengths)]
    groups: dict[int, list[int]] = defaultdict(list)
    for document, length in enumerate(lengths):
        groups[(max(length, _SHORT) - 1).bit_length()].append(document)
    batches = []
    for documents in groups.values():
        counts = [lengths[document] for document in documents]
        token_T = torch.arange(max(counts), device=tokens.device)
        first_D1 = torch.tensor([starts[document] for document in documents], device=tokens.device)[:, None]
        place_DT = place_N[(first_D1 + token_T).clamp(max=len(place_N) - 1)]
        batches.append(_Batch(place_DT, token_T < torch.tensor(counts, device=tokens.device)[:, None]))
    return batches


def _select(given: dict[str, Any], batch: _Batch, rows: int) -> dict[str, Any]:
    part = given | {"attention_mask": batch.real_DT}
    for name in ("input_ids", "inputs_embeds", "position_ids"):
        values = given.get(name)
        if values is not None:
            part[name] = values.expand(rows, *values.shape[1:]).flatten(0, 1)[batch.place_DT]
    return part


def _without_past(outputs: Any) -> Any:
    return type(outputs)(**{name: value for name, value in outputs.items() if name not in ("cache", "memory")})


__all__ = ["next_token_labels", "refuse_documents", "unpack_documents"]
