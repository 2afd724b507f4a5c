"""Windowed attention in O(T) memory: tiles of query blocks against the stretch of keys that each block may see."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_longmem._errors import complaint
from hf_longmem.ops._blocks import LONELY, attend_blocks, attend_blocks_backward, seeded_generator, wide_dtype
from hf_longmem.ops._no_backward import first_derivatives_only
from hf_longmem.ops.documents import document_numbers
from hf_longmem.ops.local.tiles import (
    add_overlapping,
    block_bias,
    keys_of,
    overlapping,
    plan_blocks,
    queries_of,
    stretch,
    tiles,
)

__all__ = ["local_attention"]

Rule = Literal["sliding", "chunk"]


def local_attention(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    *,
    rule: Rule = "sliding",
    chunk_length: int,
    chunks_before: int = 1,
    chunks_after: int = 0,
    causal: bool = True,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Windowed attention, ``out_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j`` over the keys j that query i may see.

    ``"sliding"``: ``i - j <= chunk_length * chunks_before`` and ``j - i <= chunk_length * chunks_after``, per token.
    ``"chunk"`` (transformers' Reformer): all of the query's own chunk, of ``chunks_before`` chunks before it and of
    ``chunks_after`` after it; chunks never wrap round the end of the sequence. Both: only ``j <= i`` when ``causal``.
    A query that sees no key (all of them padding) gives 0 and gets zero gradient.

    Memory beyond inputs and output is O(T) with a constant set by a tile's size, in forward and in backward, which
    recomputes the weights. Half precision is computed in float32. First derivatives only.

    Args:
        q_BHTD, k_BHTD, v_BHTD: queries, keys and values, one floating dtype, any strides.
        rule: which keys a query may see.
        chunk_length: tokens per chunk, the unit of the window.
        chunks_before: chunks a query may look back.
        chunks_after: chunks it may look ahead; no effect when ``causal``.
        causal: forbid keys after the query.
        attention_mask: bool ``[B, T]``, True for real tokens; any pattern. Padding is never a key.
        document_ids: ``[B, T]``, integer, rising within a row, equal for the tokens of one document; None when a row
            is one. No token sees another document. Under ``"sliding"`` each gives what it gives alone; the chunks of
            ``"chunk"`` are counted from the row's start.
        dropout: probability of dropping a weight. Its seed comes from torch's default CPU generator, which is consumed,
            never reseeded.

    Returns:
        ``out_BHTD`` in the inputs' dtype, laid out in memory as ``[B, T, H, D]``.

    Raises:
        ValueError: for shapes, dtypes or values that do not fit together.

    Source: Kitaev, Kaiser, Levskaya 2020 (arXiv 2001.04451); the layer is that of the authors' Trax.
    """
    check_arguments(q_BHTD, k_BHTD, v_BHTD, rule, chunk_length, chunks_before, chunks_after, attention_mask, dropout)
    documents_BT = numbered_documents(document_ids, attention_mask, q_BHTD)
    seed = torch.randint(2**62, (), device="cpu") if dropout > 0.0 else None
    settings = rule, chunk_length, chunks_before, chunks_after, causal, dropout
    out_BHTD, _ = _attend(q_BHTD, k_BHTD, v_BHTD, attention_mask, documents_BT, seed, *settings)
    return out_BHTD


def numbered_documents(document_ids: Tensor | None, attention_mask: Tensor | None, q_BHTD: Tensor) -> Tensor | None:
    """Number the documents of each row; raise a ValueError if their ids do not fit."""
    if document_ids is None:
        return None
    if document_ids.shape != (q_BHTD.size(0), q_BHTD.size(2)):
        received = f"{tuple(document_ids.shape)} for q {tuple(q_BHTD.shape)}"
        raise ValueError(complaint("document_ids must have shape [B, T]", received, "pass one id per token"))
    return document_numbers(document_ids, attention_mask)


def check_arguments(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    rule: str,
    chunk_length: int,
    chunks_before: int,
    chunks_after: int,
    attention_mask: Tensor | None,
    dropout: float,
) -> None:
    """Raise a ValueError that says what does not fit."""
    if q_BHTD.dim() != 4 or not (q_BHTD.shape == k_BHTD.shape == v_BHTD.shape):
        received = f"{tuple(q_BHTD.shape)}, {tuple(k_BHTD.shape)}, {tuple(v_BHTD.shape)}"
        raise ValueError(complaint("q, k and v must share one shape [B, H, T, D]", received, "expand grouped heads"))
    if not (q_BHTD.dtype == k_BHTD.dtype == v_BHTD.dtype and q_BHTD.is_floating_point()):
        received = f"{q_BHTD.dtype}, {k_BHTD.dtype}, {v_BHTD.dtype}"
        raise ValueError(complaint("q, k and v must share one floating dtype", received, "cast them alike"))
    if rule not in ("sliding", "chunk"):
        raise ValueError(complaint('rule must be "sliding" or "chunk"', repr(rule), "use one of the two"))
    if chunk_length < 1:
        raise ValueError(complaint("chunk_length must be at least 1", chunk_length, "use for example 64"))
    if chunks_before < 0 or chunks_after < 0:
        received = f"{chunks_before} and {chunks_after}"
        raise ValueError(complaint("chunks_before and chunks_after must not be negative", received, "use 0 or more"))
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(complaint("dropout must lie in [0, 1]", dropout, "use a probability"))
    if attention_mask is None:
        return
    if attention_mask.dtype != torch.bool:
        raise ValueError(
            complaint("attention_mask must be bool", attention_mask.dtype, "pass mask.bool(), True = real")
        )
    if attention_mask.shape != (q_BHTD.size(0), q_BHTD.size(2)):
        received = f"{tuple(attention_mask.shape)} for q {tuple(q_BHTD.shape)}"
        raise ValueError(complaint("attention_mask must have shape [B, T]", received, "pass the mask of the tokens"))


def _new_output(q_BHTD: Tensor) -> Tensor:
    """Laid out as ``[B, T, H, D]``: merging heads is then a view, and what the next layer saves is this very memory."""
    batch, heads, length, width = q_BHTD.shape
    return q_BHTD.new_empty(batch, length, heads, width).transpose(1, 2)


def _without_padding(mask_BT: Tensor | None, *tensors_BHTD: Tensor) -> tuple[Tensor, ...]:
    """Keys and values with zeros for padding, which may be anything: 0 times NaN is NaN."""
    if mask_BT is None:
        return tensors_BHTD
    return tuple(x_BHTD.masked_fill(~mask_BT[:, None, :, None], 0.0) for x_BHTD in tensors_BHTD)


@torch.library.custom_op("hf_longmem::local_attention", mutates_args=())
def _attend(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    attention_mask: Tensor | None,
    documents_BT: Tensor | None,
    seed: Tensor | None,
    rule: str,
    chunk_length: int,
    chunks_before: int,
    chunks_after: int,
    causal: bool,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Return the output and each query's log-sum-exp, +inf where it sees no key."""
    k_BHTD, v_BHTD = _without_padding(attention_mask, k_BHTD, v_BHTD)
    dtype, shape, length = wide_dtype(q_BHTD.dtype), q_BHTD.shape, q_BHTD.size(2)
    out_BHTD = _new_output(q_BHTD)
    lse_BHT = q_BHTD.new_empty(shape[:3], dtype=dtype)
    plan = plan_blocks(shape, rule, chunk_length, chunks_before, chunks_after, causal, q_BHTD.device)
    bias_1QM = block_bias(plan, rule, chunks_before, chunks_after, causal).to(q_BHTD.device, dtype)
    generator = seeded_generator(seed, q_BHTD.device)
    scale = 1.0 / math.sqrt(shape[-1])
    with torch.autocast(q_BHTD.device.type, enabled=False):
        for tile in tiles(plan, shape, bias_1QM, attention_mask, documents_BT):
            low, high = tile.start - plan.before, tile.start + tile.blocks * plan.queries + plan.after
            v_rows = F.pad(stretch(v_BHTD, tile, low, high, dtype), (0, 1), value=1.0)
            out_XQD, lse_XQ = attend_blocks(
                queries_of(q_BHTD, plan, tile, dtype) * scale,
                keys_of(k_BHTD, plan, tile, dtype),
                overlapping(v_rows, plan),
                tile.bias_XQM,
                dropout=dropout,
                generator=generator,
            )
            unseeing = lse_XQ < LONELY / 2  # nothing but FORBIDDEN keys
            out_XQD = out_XQD.masked_fill_(unseeing.unsqueeze(-1), 0.0)
            lse_XQ = lse_XQ.masked_fill_(unseeing, math.inf)
            stop = min(tile.start + tile.blocks * plan.queries, length)
            heads, place = (
                tile.head_stop - tile.head,
                (tile.row, slice(tile.head, tile.head_stop), slice(tile.start, stop)),
            )
            out_BHTD[place] = out_XQD.reshape(heads, -1, shape[-1])[:, : stop - tile.start]
            lse_BHT[place] = lse_XQ.reshape(heads, -1)[:, : stop - tile.start]
    return out_BHTD, lse_BHT


@torch.library.custom_op("hf_longmem::local_attention_backward", mutates_args=())
def _attend_backward(
    grad_BHTD: Tensor,
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    out_BHTD: Tensor,
    lse_BHT: Tensor,
    attention_mask: Tensor | None,
    documents_BT: Tensor | None,
    seed: Tensor | None,
    rule: str,
    chunk_length: int,
    chunks_before: int,
    chunks_after: int,
    causal: bool,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, shape, length = wide_dtype(q_BHTD.dtype), q_BHTD.shape, q_BHTD.size(2)
    grad_q_BHTD = torch.empty_like(q_BHTD)
    grad_k_BHTD, grad_v_BHTD = torch.zeros_like(k_BHTD, dtype=dtype), torch.zeros_like(v_BHTD, dtype=dtype)
    k_BHTD, v_BHTD = _without_padding(attention_mask, k_BHTD, v_BHTD)
    plan = plan_blocks(shape, rule, chunk_length, chunks_before, chunks_after, causal, q_BHTD.device)
    bias_1QM = block_bias(plan, rule, chunks_before, chunks_after, causal).to(q_BHTD.device, dtype)
    generator = seeded_generator(seed, q_BHTD.device)
    scale = 1.0 / math.sqrt(shape[-1])
    with torch.autocast(q_BHTD.device.type, enabled=False):
        for tile in tiles(plan, shape, bias_1QM, attention_mask, documents_BT):
            grad_XQD = queries_of(grad_BHTD, plan, tile, dtype)
            out_XQD = queries_of(out_BHTD, plan, tile, dtype)
            lse_XQ = queries_of(lse_BHT.unsqueeze(-1), plan, tile, dtype).squeeze(-1)
            grad_q_XQD, grad_k_XMD, grad_v_XMD = attend_blocks_backward(
                grad_XQD,
                (grad_XQD * out_XQD).sum(-1),
                queries_of(q_BHTD, plan, tile, dtype) * scale,
                keys_of(k_BHTD, plan, tile, dtype),
                keys_of(v_BHTD, plan, tile, dtype),
                tile.bias_XQM,
                lse_XQ,
                dropout=dropout,
                generator=generator,
            )
            stop = min(tile.start + tile.blocks * plan.queries, length)
            heads, place = (
                tile.head_stop - tile.head,
                (tile.row, slice(tile.head, tile.head_stop), slice(tile.start, stop)),
            )
            grad_q_BHTD[place] = (grad_q_XQD * scale).reshape(heads, -1, shape[-1])[:, : stop - tile.start]
            add_overlapping(grad_k_BHTD, grad_k_XMD, plan, tile)
            add_overlapping(grad_v_BHTD, grad_v_XMD, plan, tile)
    return grad_q_BHTD, grad_k_BHTD.to(k_BHTD.dtype), grad_v_BHTD.to(v_BHTD.dtype)


@_attend.register_fake
def _(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    attention_mask: Tensor | None,
    documents_BT: Tensor | None,
    seed: Tensor | None,
    rule: str,
    chunk_length: int,
    chunks_before: int,
    chunks_after: int,
    causal: bool,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    return _new_output(q_BHTD), q_BHTD.new_empty(q_BHTD.shape[:3], dtype=wide_dtype(q_BHTD.dtype))


@_attend_backward.register_fake
def _(grad_BHTD: Tensor, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_BHTD), torch.empty_like(k_BHTD), torch.empty_like(v_BHTD)


def _keep_inputs(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q_BHTD, k_BHTD, v_BHTD, attention_mask, documents_BT, seed, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q_BHTD, k_BHTD, v_BHTD, *output, attention_mask, documents_BT, seed)


def _differentiate(ctx: Any, grad_out_BHTD: Tensor | None, grad_lse_BHT: Tensor | None) -> tuple:
    if grad_out_BHTD is None:
        return (None,) * 12
    return *_attend_backward(grad_out_BHTD, *ctx.saved_tensors, *ctx.settings), *(None,) * 9


_attend.register_autograd(_differentiate, setup_context=_keep_inputs)
_attend_backward.register_autograd(first_derivatives_only("local_attention", "hf_longmem.ops.local.naive"))
