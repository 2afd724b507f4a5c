"""LSH attention in tiles: linear memory, own backward by recomputation.

Tokens of all rows and heads form one sequence of S = B*H*T "slots". In each round the slots are put in the order
(row, head, bucket, position), cut into blocks, and a tile of blocks is gathered, attended and merged into the output
before the next tile is touched. Nothing of the size R x T x 2C ever exists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_longmem._errors import complaint
from hf_longmem.ops._blocks import LONELY, attend_blocks, attend_blocks_backward, seeded_generator, wide_dtype
from hf_longmem.ops._no_backward import first_derivatives_only
from hf_longmem.ops.documents import document_numbers
from hf_longmem.ops.lsh.layout import Tile, candidate_layout
from hf_longmem.ops.lsh.naive import KEY_NORM_EPSILON
from hf_longmem.ops.lsh.sorting import Candidates, Merge, document_buckets, pad_tokens, sort_by_bucket


def lsh_attention(
    qk_BHTD: Tensor,
    v_BHTD: Tensor,
    buckets_BHRT: Tensor,
    *,
    chunk_length: int,
    chunks_before: int = 1,
    chunks_after: int = 0,
    causal: bool = True,
    candidates: Candidates = "bucket",
    merge: Merge = "union",
    pad_beyond: int = 0,
    pad_to_multiple_of: int = 1,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Shared-QK attention over hashed candidates: ``o_i = sum_j softmax_j(q_i . k_j) v_j``, j in the union of rounds.

    ``k_j`` is ``qk_j`` at unit length. With ``candidates="bucket"`` query i may see the tokens of its own bucket that
    are at most ``chunk_length * chunks_before`` places before it in the order (bucket, position); when bidirectional
    also ``chunk_length * chunks_after`` places after it. With ``"chunk"`` it may see everything in its own and the
    neighbouring chunks of that order, whatever the bucket: Trax's and transformers' rule, in which a later token can
    change what an earlier one sees. A token sees itself only if it sees nothing else, and then keeps its own value,
    whatever the dropout. Padding is never seen. (A NaN of a real token, though, may reach any token of any row.)

    Args:
        qk_BHTD: shared queries and keys ``[B, H, T, D]``, floating.
        v_BHTD: values, same shape and dtype.
        buckets_BHRT: bucket of each token in each round, integer, not negative; see ``hash_vectors``.
        chunk_length: C, tokens per chunk.
        chunks_before, chunks_after: how many chunks a query looks back and ahead.
        causal: whether only earlier tokens are seen; needs ``chunks_after=0`` under ``"bucket"``.
        candidates: ``"bucket"`` or ``"chunk"``.
        merge: ``"union"`` counts a key once however many rounds offer it; ``"sum"`` once per offer. Under ``"chunk"``
            with ``"sum"`` chunks wrap round from one hash round to the next, as in transformers.
        pad_beyond, pad_to_multiple_of: attend as if an input of more than ``pad_beyond`` tokens were padded to a
            multiple of ``pad_to_multiple_of``. Padding is never seen, but lengthens the ring of chunks of ``"chunk"``
            with ``"sum"``: transformers pads to a common multiple of the chunk lengths of all its layers.
        attention_mask: ``[B, T]``, true (or 1) where a token is real; None when all are.
        document_ids: ``[B, T]``, integer, rising within a row, equal for the tokens of one document; None when a row
            is one. No token sees another document. Under ``"bucket"`` each gives what it gives alone; under
            ``"chunk"`` chunks are counted from the row's start, so that a document's chunks depend on the lengths of
            those before it (on nothing else of them).
        dropout: probability of dropping an attention weight. The seed is drawn from torch's default CPU generator.

    Returns:
        ``[B, H, T, D]`` in the dtype of ``qk_BHTD``; differentiable once in ``qk_BHTD`` and ``v_BHTD``.

    Raises:
        ValueError: shapes or arguments that do not fit together.

    Source: Kitaev et al. 2020 (arXiv 2001.04451), equations 2 to 6.

    >>> qk = torch.randn(1, 2, 10, 8)
    >>> buckets = torch.zeros(1, 2, 1, 10, dtype=torch.int32)
    >>> lsh_attention(qk, qk, buckets, chunk_length=4).shape
    torch.Size([1, 2, 10, 8])
    """
    _check(qk_BHTD, v_BHTD, buckets_BHRT, attention_mask, document_ids, chunk_length, chunks_before, chunks_after)
    if candidates not in ("bucket", "chunk"):
        raise ValueError(complaint("candidates must be 'bucket' or 'chunk'", repr(candidates), "choose one of them"))
    if merge not in ("union", "sum"):
        raise ValueError(complaint("merge must be 'union' or 'sum'", repr(merge), "choose one of them"))
    if candidates == "bucket" and causal and chunks_after:
        raise ValueError(complaint("causal attention looks at no chunk after", chunks_after, "use chunks_after=0"))
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(complaint("dropout must lie in [0, 1]", dropout, "give a probability"))
    if pad_beyond < 0 or pad_to_multiple_of < 1:
        rule = "pad_beyond must be at least 0, pad_to_multiple_of at least 1"
        raise ValueError(complaint(rule, f"{pad_beyond} and {pad_to_multiple_of}", "leave both out"))
    numbers_BT = None
    if document_ids is not None:
        numbers_BT = document_numbers(document_ids, attention_mask)
        buckets_BHRT = document_buckets(buckets_BHRT, numbers_BT)
    length = qk_BHTD.shape[2]
    padding = -length % pad_to_multiple_of if length > pad_beyond else 0
    if padding:
        v_BHTD = torch.nn.functional.pad(v_BHTD, (0, 0, 0, padding))
        qk_BHTD, buckets_BHRT, attention_mask = pad_tokens(qk_BHTD, buckets_BHRT, attention_mask, padding)
        numbers_BT = None if numbers_BT is None else torch.nn.functional.pad(numbers_BT, (0, padding))
    # A CPU tensor, so that neither the device waits nor a traced graph breaks; advancing the default generator makes
    # torch.manual_seed reproduce a run.
    seed = torch.randint(2**62, (), device="cpu") if dropout > 0.0 else None
    v_BHTD = v_BHTD.to(qk_BHTD.dtype)
    # Autocast would lower the precision of sums that the operator keeps in float32.
    with torch.autocast(qk_BHTD.device.type, enabled=False):
        out, *_ = _attend(
            qk_BHTD,
            v_BHTD,
            buckets_BHRT,
            attention_mask,
            numbers_BT if candidates == "chunk" else None,  # no two documents share a bucket
            seed,
            chunk_length,
            chunks_before,
            chunks_after,
            causal,
            candidates,
            merge,
            dropout,
        )
    return out[:, :, :length] if padding else out


def _check(
    qk: Tensor,
    v: Tensor,
    buckets: Tensor,
    mask: Tensor | None,
    documents: Tensor | None,
    chunk_length: int,
    before: int,
    after: int,
) -> None:
    if qk.dim() != 4 or v.shape != qk.shape:
        raise ValueError(
            complaint(
                "qk and v must be [batch, heads, tokens, head_dim], alike",
                f"{tuple(qk.shape)} and {tuple(v.shape)}",
                "project and split heads first",
            )
        )
    batch, heads, length, _ = qk.shape
    if buckets.dim() != 4 or buckets.shape[:2] != (batch, heads) or buckets.shape[3] != length or not buckets.shape[2]:
        raise ValueError(
            complaint(
                f"buckets must be [{batch}, {heads}, num_hashes, {length}]",
                tuple(buckets.shape),
                "take them from hash_vectors(qk, ...)",
            )
        )
    for name, values in (("attention_mask", mask), ("document_ids", documents)):
        if values is not None and values.shape != (batch, length):
            rule = f"{name} must be [{batch}, {length}]"
            raise ValueError(complaint(rule, tuple(values.shape), "give one value per token"))
    if chunk_length < 1 or before < 0 or after < 0:
        raise ValueError(
            complaint(
                "chunk_length must be at least 1, chunks_before and chunks_after at least 0",
                f"{chunk_length}, {before} and {after}",
                "use for instance 64, 1 and 0",
            )
        )


def _tables(qk_BHTD: Tensor, v_BHTD: Tensor, mask_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """Per slot ``[key | value | 1]``, and the length that makes a key its query again; two empty slots at the end."""
    head_dim = qk_BHTD.shape[-1]
    slots = qk_BHTD.numel() // head_dim
    qk_SD = qk_BHTD.reshape(slots, head_dim)
    exact = wide_dtype(qk_BHTD.dtype)
    norm_S = qk_BHTD.new_zeros(slots + 2, dtype=exact)
    torch.linalg.vector_norm(qk_SD, dim=-1, dtype=exact, out=norm_S[:slots])
    norm_S.square_().add_(head_dim * KEY_NORM_EPSILON).sqrt_()
    table_SX = qk_BHTD.new_empty(slots + 2, 2 * head_dim + 1)
    table_SX[slots:] = 0.0
    keys_SD = table_SX[:slots, :head_dim]
    if exact == qk_BHTD.dtype:
        torch.div(qk_SD, norm_S[:slots, None], out=keys_SD)
    else:
        keys_SD.copy_(qk_SD / norm_S[:slots, None])
    table_SX[:slots, head_dim:-1] = v_BHTD.reshape(slots, head_dim)
    table_SX[:, -1] = 1.0
    if mask_BT is not None:
        # What stands for padding may be anything, and 0 times NaN is NaN.
        hidden_S = ~mask_BT.bool()[:, None, :].expand(qk_BHTD.shape[:3]).reshape(slots)
        table_SX[:slots, :-1].masked_fill_(hidden_S[:, None], 0.0)
        norm_S[:slots].masked_fill_(hidden_S, 1.0)
    return table_SX, norm_S


def _per_query(values_S: Tensor, tile: Tile) -> Tensor:
    return values_S.index_select(0, tile.query_slots).view(tile.blocks, tile.queries)


def _through_unit_length(grad_SD: Tensor, keys_SD: Tensor, norm_S: Tensor) -> Tensor:
    """The gradient of keys ``k = qk / n`` turned, in place, into that of ``qk``: ``(g - k (k . g)) / n``."""
    along_S1 = torch.linalg.vecdot(grad_SD, keys_SD.to(grad_SD.dtype)).unsqueeze(-1)
    return grad_SD.addcmul_(keys_SD, along_S1, value=-1.0).div_(norm_S.unsqueeze(-1))


def attend_tiles(
    qk_BHTD: Tensor,
    v_BHTD: Tensor,
    buckets_BHRT: Tensor,
    attention_mask: Tensor | None,
    documents_BT: Tensor | None,
    seed: Tensor | None,
    chunk_length: int,
    chunks_before: int,
    chunks_after: int,
    causal: bool,
    candidates: str,
    merge: str,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[B, H, T, D]``, log-sum-exp ``[B, H, T]`` (+inf for a lonely token) and int32 order ``[B, H, R, T]``."""
    batch, heads, length, head_dim = qk_BHTD.shape
    slots = batch * heads * length
    exact = wide_dtype(qk_BHTD.dtype)
    order_BHRT = sort_by_bucket(buckets_BHRT, attention_mask)
    out_SD = qk_BHTD.new_zeros(slots + 2, head_dim, dtype=exact)
    lse_S = out_SD.new_zeros(slots + 2)
    if slots:
        layout = candidate_layout(
            order_BHRT,
            buckets_BHRT,
            attention_mask,
            documents_BT,
            chunk_length,
            chunks_before,
            chunks_after,
            causal,
            candidates,
            merge,
            exact,
        )
        table_SX, norm_S = _tables(qk_BHTD, v_BHTD, attention_mask)
        generator = seeded_generator(seed, qk_BHTD.device)
        for tile in layout.tiles():
            keys = table_SX.index_select(0, tile.key_slots).to(exact)
            q_XQD = tile.query_view(keys[:, :head_dim]) * _per_query(norm_S, tile).unsqueeze(-1)
            out_XQD, lse_XQ = attend_blocks(
                q_XQD,
                tile.key_view(keys[:, :head_dim]),
                tile.key_view(keys[:, head_dim:]),
                layout.bias(tile, exact),
                dropout=dropout,
                generator=generator,
                bias_unit=layout.bias_unit,
                overwrite_bias=True,
            )
            found_YD, lse_Y = out_XQD.flatten(0, 1), lse_XQ.flatten()
            if tile.round:
                # A mean of what earlier rounds found and of this round, weighted by their log-sum-exp.
                old_lse_Y = lse_S.index_select(0, tile.query_slots)
                share_Y1 = torch.sigmoid(lse_Y - old_lse_Y).unsqueeze(-1)
                found_YD = out_SD.index_select(0, tile.query_slots).lerp_(found_YD, share_Y1)
                lse_Y = torch.logaddexp(old_lse_Y, lse_Y)
            out_SD.index_copy_(0, tile.query_slots, found_YD)
            lse_S.index_copy_(0, tile.query_slots, lse_Y)
    out_BHTD = out_SD[:slots].view(batch, heads, length, head_dim)
    lse_BHT = lse_S[:slots].view(batch, heads, length)
    lonely_BHT = lse_BHT < LONELY / 10
    if attention_mask is not None:
        lonely_BHT = lonely_BHT | ~attention_mask.bool()[:, None, :]
    if dropout > 0.0 or attention_mask is not None:
        # Without either, a lonely token's one key was itself and its output is its own value already.
        out_BHTD = torch.where(lonely_BHT.unsqueeze(-1), v_BHTD.to(exact), out_BHTD)
    out_BHTD = out_BHTD.to(qk_BHTD.dtype)
    return out_BHTD, lse_BHT.masked_fill(lonely_BHT, torch.inf), order_BHRT.int()


# Opaque to tracing: the loop over tiles is one node of a compiled or exported graph.
_attend = torch.library.custom_op("hf_longmem::lsh_attend", attend_tiles, mutates_args=())


@_attend.register_fake
def _(
    qk_BHTD: Tensor,
    v_BHTD: Tensor,
    buckets_BHRT: Tensor,
    attention_mask: Tensor | None,
    documents_BT: Tensor | None,
    seed: Tensor | None,
    *settings: object,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(qk_BHTD, memory_format=torch.contiguous_format),
        torch.empty(qk_BHTD.shape[:3], dtype=wide_dtype(qk_BHTD.dtype), device=qk_BHTD.device),
        torch.empty(buckets_BHRT.shape, dtype=torch.int32, device=qk_BHTD.device),
    )


def attend_tiles_backward(
    grad_out_BHTD: Tensor,
    qk_BHTD: Tensor,
    v_BHTD: Tensor,
    buckets_BHRT: Tensor,
    attention_mask: Tensor | None,
    documents_BT: Tensor | None,
    seed: Tensor | None,
    out_BHTD: Tensor,
    lse_BHT: Tensor,
    order_BHRT: Tensor,
    chunk_length: int,
    chunks_before: int,
    chunks_after: int,
    causal: bool,
    candidates: str,
    merge: str,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of ``qk`` and ``v`` from what :func:`attend_tiles` was given and returned."""
    batch, heads, length, head_dim = qk_BHTD.shape
    slots = batch * heads * length
    exact = wide_dtype(qk_BHTD.dtype)
    grads_SX = qk_BHTD.new_zeros(slots + 2, 2 * head_dim, dtype=exact)
    grad_q_SD = qk_BHTD.new_zeros(slots + 2, head_dim, dtype=exact)
    lonely_BHT = lse_BHT.isinf()
    if slots:
        layout = candidate_layout(
            order_BHRT.long(),
            buckets_BHRT,
            attention_mask,
            documents_BT,
            chunk_length,
            chunks_before,
            chunks_after,
            causal,
            candidates,
            merge,
            exact,
        )
        table_SX, norm_S = _tables(qk_BHTD, v_BHTD, attention_mask)
        grad_out_SD = qk_BHTD.new_zeros(slots + 2, head_dim)
        grad_out_SD[:slots] = grad_out_BHTD.reshape(slots, head_dim)
        delta_BHT = torch.linalg.vecdot(grad_out_BHTD.to(exact), out_BHTD.to(exact)).masked_fill_(lonely_BHT, 0.0)
        # One gather fetches what a query needs: its length, log-sum-exp and delta.
        facts_3S = norm_S.new_full((3, slots + 2), torch.inf)
        facts_3S[0] = norm_S
        facts_3S[1, :slots] = lse_BHT.flatten()
        facts_3S[2, :slots] = delta_BHT.flatten()
        facts_3S[2, slots:] = 0.0
        generator = seeded_generator(seed, qk_BHTD.device)
        for tile in layout.tiles():
            keys = table_SX.index_select(0, tile.key_slots).to(exact)
            norm_XQ, lse_XQ, delta_XQ = facts_3S.index_select(1, tile.query_slots).view(3, tile.blocks, tile.queries)
            grad_q_XQD, grad_k_XMD, grad_v_XMD = attend_blocks_backward(
                grad_out_SD.index_select(0, tile.query_slots).to(exact).unflatten(0, (tile.blocks, tile.queries)),
                delta_XQ,
                tile.query_view(keys[:, :head_dim]) * norm_XQ.unsqueeze(-1),
                tile.key_view(keys[:, :head_dim]),
                tile.key_view(keys[:, head_dim:-1]),
                layout.bias(tile, exact),
                lse_XQ,
                dropout=dropout,
                generator=generator,
                bias_unit=layout.bias_unit,
                overwrite_bias=True,
            )
            grads_YX = keys.new_empty(keys.shape[0], 2 * head_dim)
            tile.sum_keys(grads_YX[:, :head_dim], grad_k_XMD)
            tile.sum_keys(grads_YX[:, head_dim:], grad_v_XMD)
            grads_SX.index_add_(0, tile.key_slots, grads_YX)
            grad_q_SD.index_add_(0, tile.query_slots, grad_q_XQD.flatten(0, 1))
        grad_q_SD.add_(_through_unit_length(grads_SX[:, :head_dim], table_SX[:, :head_dim], norm_S))
    grad_qk_BHTD = grad_q_SD[:slots].view(qk_BHTD.shape)
    grad_v_BHTD = grads_SX[:slots, head_dim:].view(qk_BHTD.shape)
    grad_v_BHTD.addcmul_(grad_out_BHTD.to(exact), lonely_BHT.unsqueeze(-1).to(exact))
    return grad_qk_BHTD.to(qk_BHTD.dtype).contiguous(), grad_v_BHTD.to(qk_BHTD.dtype).contiguous()


_attend_backward = torch.library.custom_op("hf_longmem::lsh_attend_backward", attend_tiles_backward, mutates_args=())


@_attend_backward.register_fake
def _(grad_out_BHTD: Tensor, qk_BHTD: Tensor, v_BHTD: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(qk_BHTD, memory_format=torch.contiguous_format),
        torch.empty_like(qk_BHTD, memory_format=torch.contiguous_format),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors, ctx.settings = inputs[:6], inputs[6:]
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * (6 + len(ctx.settings))
    with torch.autocast(grad_out.device.type, enabled=False):
        grads = _attend_backward(grad_out, *ctx.saved_tensors, *ctx.settings)
    return (*grads, *(None,) * (4 + len(ctx.settings)))


_attend.register_autograd(_backward, setup_context=_save)
_attend_backward.register_autograd(first_derivatives_only("lsh_attention", "hf_longmem.ops.lsh.naive"))
