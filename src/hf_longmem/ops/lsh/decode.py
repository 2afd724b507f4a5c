"""LSH attention one token after another, with the same result as over the whole sequence at once.

Under the ``"bucket"`` rule a token sees, in each round, the last W tokens of its bucket. So each (row, head, round,
bucket) keeps a ring of W places: a step reads R rings and writes R places, however many tokens came before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_longmem.ops._no_backward import no_backward
from hf_longmem.ops.lsh.attend import lsh_attention
from hf_longmem.ops.lsh.hashing import bucket_factors
from hf_longmem.ops.lsh.naive import unit_keys
from hf_longmem.ops.lsh.sorting import Candidates, Merge, sort_by_bucket

# Up to so many new tokens are attended one by one; more are attended at once, together with the past.
STEPWISE = 16


@dataclasses.dataclass(frozen=True)
class LSHState:
    """What later tokens need of earlier ones. Rows are independent; row b holds ``seen_B[b]`` real tokens.

    Attributes:
        qk_BHPD, v_BHPD: the tokens' queries/keys and values in P + 1 places; the last place is for padding.
        buckets_BHRP: their buckets, int32.
        seen_B: real tokens of each row, int64.
        ring_BHRX: for each bucket the places of its last W tokens, int32, flat with X = K * W.
        filled_BHRK: how many tokens each bucket ever got, int32.
        length: tokens so far, padding included; no row has more real ones.
    """

    qk_BHPD: Tensor
    v_BHPD: Tensor
    buckets_BHRP: Tensor
    seen_B: Tensor
    ring_BHRX: Tensor
    filled_BHRK: Tensor
    length: int

    def map_rows(self, select: Callable[[Tensor], Tensor]) -> LSHState:
        """The state with ``select`` applied to the batch axis of every tensor, as beam search reorders rows."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        changed: dict[str, Any] = {name: select(tensor) for name, tensor in tensors.items()}
        return dataclasses.replace(self, **changed)


def empty_state(qk_BHTD: Tensor, num_hashes: int, num_buckets: int | Sequence[int], window: int) -> LSHState:
    """The state before the first token, for rows, heads, width and dtype as in ``qk_BHTD``."""
    batch, heads, _, head_dim = qk_BHTD.shape
    buckets = math.prod(bucket_factors(num_buckets))
    integers: dict[str, Any] = {"dtype": torch.int32, "device": qk_BHTD.device}
    return LSHState(
        qk_BHPD=qk_BHTD.new_zeros(batch, heads, 1, head_dim),
        v_BHPD=qk_BHTD.new_zeros(batch, heads, 1, head_dim),
        buckets_BHRP=torch.zeros(batch, heads, num_hashes, 1, **integers),
        seen_B=torch.zeros(batch, dtype=torch.int64, device=qk_BHTD.device),
        ring_BHRX=torch.zeros(batch, heads, num_hashes, buckets * window, **integers),
        filled_BHRK=torch.zeros(batch, heads, num_hashes, buckets, **integers),
        length=0,
    )


def extend(
    state: LSHState,
    qk_BHTD: Tensor,
    v_BHTD: Tensor,
    buckets_BHRT: Tensor,
    *,
    chunk_length: int,
    chunks_before: int = 1,
    candidates: Candidates = "bucket",
    merge: Merge = "union",
    pad_beyond: int = 0,
    pad_to_multiple_of: int = 1,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, LSHState]:
    """Attend to the past and to each other with T more tokens: causal :func:`lsh_attention`, continued.

    Under ``"bucket"`` the outputs are those of one call over everything. Under ``"chunk"``, where later tokens change
    what earlier ones see, they are those of the last T tokens of a call over everything, with the past tokens' queries,
    keys and values as they were computed; that costs one pass over the past.

    Args:
        state: from :func:`empty_state` or the last call. Its memory is reused: go on with the returned state only.
        qk_BHTD, v_BHTD, buckets_BHRT, chunk_length, chunks_before, candidates, merge, pad_beyond, pad_to_multiple_of:
            as in :func:`lsh_attention`.
        attention_mask: bool ``[B, T]`` over the new tokens; padding is not remembered, and gets its own value.

    Returns:
        ``out_BHTD`` and the state after the T tokens. Gradients reach the first call's tensors; a backward pass through
        a later call raises, because the past is kept without its graph.
    """
    real_BT = attention_mask
    tokens, window = qk_BHTD.shape[2], chunk_length * chunks_before
    reach: dict[str, Any] = {
        "chunk_length": chunk_length,
        "chunks_before": chunks_before,
        "candidates": candidates,
        "merge": merge,
        "pad_beyond": pad_beyond,
        "pad_to_multiple_of": pad_to_multiple_of,
    }
    if state.length == 0:
        out_BHTD = lsh_attention(qk_BHTD, v_BHTD, buckets_BHRT, attention_mask=real_BT, **reach)
    with torch.no_grad():
        if not torch.compiler.is_compiling() and state.qk_BHPD.is_inference() and not torch.is_inference_mode_enabled():
            state = state.map_rows(torch.clone)  # what inference mode made cannot be changed in place outside it
        fresh = state.length == 0
        qk, v = qk_BHTD.detach(), v_BHTD.detach()
        new_B = state.seen_B.new_full(state.seen_B.shape, tokens) if real_BT is None else real_BT.sum(1)
        place_BT = _places(state, tokens, real_BT)
        state = _remember(state, qk, v, buckets_BHRT, place_BT)
        if fresh or candidates == "chunk" or tokens > STEPWISE:
            state = dataclasses.replace(state, seen_B=state.seen_B + new_B)
            if not fresh:
                out_BHTD = _attend_with_past(state, v, place_BT, real_BT, reach)
            if candidates == "bucket":
                _fill_rings(state, window)
        else:
            out_BHTD = torch.cat(
                [
                    _step(
                        state,
                        qk[:, :, t : t + 1],
                        v[:, :, t : t + 1],
                        buckets_BHRT[..., t],
                        place_BT[:, t],
                        None if real_BT is None else real_BT[:, t],
                        window,
                        merge,
                    )
                    for t in range(tokens)
                ],
                dim=2,
            )
            state = dataclasses.replace(state, seen_B=state.seen_B + new_B)
    return out_BHTD if fresh else no_backward(out_BHTD, qk_BHTD), state


def _places(state: LSHState, tokens: int, real_BT: Tensor | None) -> Tensor:
    """Where each new token is kept: after its row's real tokens; -1 for padding."""
    if real_BT is None:
        return state.seen_B[:, None] + torch.arange(tokens, device=state.seen_B.device)
    return (state.seen_B[:, None] + real_BT.cumsum(1) - 1).masked_fill(~real_BT, -1)


def _remember(state: LSHState, qk_BHTD: Tensor, v_BHTD: Tensor, buckets_BHRT: Tensor, place_BT: Tensor) -> LSHState:
    length = state.length + qk_BHTD.shape[2]
    room = state.qk_BHPD.shape[2] - 1
    if length > room:
        # Doubling keeps the cost of moving the past constant per token.
        more = max(length, 2 * room) - room
        state = dataclasses.replace(
            state,
            qk_BHPD=torch.nn.functional.pad(state.qk_BHPD, (0, 0, 0, more)),
            v_BHPD=torch.nn.functional.pad(state.v_BHPD, (0, 0, 0, more)),
            buckets_BHRP=torch.nn.functional.pad(state.buckets_BHRP, (0, more)),
        )
        room += more
    place_BT = torch.where(place_BT < 0, room, place_BT)
    index_BHTD = place_BT[:, None, :, None].expand(qk_BHTD.shape)
    state.qk_BHPD.scatter_(2, index_BHTD, qk_BHTD.to(state.qk_BHPD.dtype))
    state.v_BHPD.scatter_(2, index_BHTD, v_BHTD.to(state.v_BHPD.dtype))
    state.buckets_BHRP.scatter_(3, place_BT[:, None, None, :].expand(buckets_BHRT.shape), buckets_BHRT)
    return dataclasses.replace(state, length=length)


def _step(
    state: LSHState,
    qk_BH1D: Tensor,
    v_BH1D: Tensor,
    bucket_BHR: Tensor,
    place_B: Tensor,
    real_B: Tensor | None,
    window: int,
    merge: Merge,
) -> Tensor:
    """One token of every row: read its rings, attend, and enter it into the rings, in place."""
    if window == 0:
        return v_BH1D
    bucket_BHR1 = bucket_BHR.long().unsqueeze(-1)
    filled_BHR1 = state.filled_BHRK.gather(3, bucket_BHR1)
    ring_BHRW = bucket_BHR1 * window + torch.arange(window, device=bucket_BHR1.device)
    offered_BHX = state.ring_BHRX.gather(3, ring_BHRW).flatten(2)
    nobody = torch.iinfo(torch.int32).max
    empty_BHX = (torch.arange(window, device=bucket_BHR1.device) >= filled_BHR1).flatten(2)
    offered_BHX = offered_BHX.masked_fill(empty_BHX, nobody)
    if merge == "union":
        offered_BHX = offered_BHX.sort(dim=-1).values
        again_BHX = offered_BHX[..., 1:] == offered_BHX[..., :-1]
        offered_BHX[..., 1:].masked_fill_(again_BHX, nobody)
    hidden_BH1X = (offered_BHX == nobody).unsqueeze(2)
    index_BHX1 = offered_BHX.masked_fill(offered_BHX == nobody, 0).long().unsqueeze(-1)
    head_dim = qk_BH1D.shape[-1]
    exact = torch.promote_types(qk_BH1D.dtype, torch.float32)
    # Lengths in half precision would lose digits, or overflow.
    keys_BHXD = unit_keys(state.qk_BHPD.gather(2, index_BHX1.expand(-1, -1, -1, head_dim)).to(exact))
    values_BHXD = state.v_BHPD.gather(2, index_BHX1.expand(-1, -1, -1, head_dim))
    scores_BH1X = (qk_BH1D.to(exact) @ keys_BHXD.transpose(-1, -2)).masked_fill(hidden_BH1X, -torch.inf)
    lonely_BH11 = hidden_BH1X.all(-1, keepdim=True)
    weights_BH1X = torch.softmax(scores_BH1X.masked_fill(lonely_BH11, 0.0), dim=-1)
    out_BH1D = (weights_BH1X @ values_BHXD.to(exact)).to(qk_BH1D.dtype)
    if real_B is not None:
        lonely_BH11 = lonely_BH11 | ~real_B[:, None, None, None]
    _enter(state, bucket_BHR1, filled_BHR1, place_B, real_B, window)
    return torch.where(lonely_BH11, v_BH1D, out_BH1D)


def _enter(
    state: LSHState, bucket_BHR1: Tensor, filled_BHR1: Tensor, place_B: Tensor, real_B: Tensor | None, window: int
) -> None:
    cell_BHR1 = bucket_BHR1 * window + filled_BHR1 % window
    place_BHR1 = place_B.int()[:, None, None, None].expand(cell_BHR1.shape)
    if real_B is None:
        more_BHR1 = torch.ones_like(filled_BHR1)
    else:
        more_BHR1 = real_B.int()[:, None, None, None].expand(filled_BHR1.shape)
        place_BHR1 = torch.where(more_BHR1 > 0, place_BHR1, state.ring_BHRX.gather(3, cell_BHR1))
    state.ring_BHRX.scatter_(3, cell_BHR1, place_BHR1)
    state.filled_BHRK.scatter_(3, bucket_BHR1, filled_BHR1 + more_BHR1)


def _attend_with_past(
    state: LSHState, v_BHTD: Tensor, place_BT: Tensor, real_BT: Tensor | None, reach: dict[str, Any]
) -> Tensor:
    real_BP = torch.arange(state.length, device=place_BT.device) < state.seen_B[:, None]
    out_BHPD = lsh_attention(
        state.qk_BHPD[:, :, : state.length],
        state.v_BHPD[:, :, : state.length],
        state.buckets_BHRP[..., : state.length],
        attention_mask=real_BP,
        **reach,
    )
    index_BHTD = place_BT.clamp(min=0)[:, None, :, None].expand(v_BHTD.shape)
    out_BHTD = out_BHPD.gather(2, index_BHTD).to(v_BHTD.dtype)
    return out_BHTD if real_BT is None else torch.where(real_BT[:, None, :, None], out_BHTD, v_BHTD)


def _fill_rings(state: LSHState, window: int) -> None:
    """Make the rings of all tokens in the places, in place."""
    length = state.length
    buckets_BHRT = state.buckets_BHRP[..., :length].long()
    real_BT = torch.arange(length, device=buckets_BHRT.device) < state.seen_B[:, None]
    real_BHRT = real_BT[:, None, None, :].expand(buckets_BHRT.shape)
    state.filled_BHRK.zero_().scatter_add_(3, buckets_BHRT, real_BHRT.int())
    if window == 0:
        return
    order_BHRT = sort_by_bucket(buckets_BHRT, real_BT)
    rank_BHRT = torch.empty_like(order_BHRT).scatter_(
        3, order_BHRT, torch.arange(length, device=order_BHRT.device).expand_as(order_BHRT)
    )
    first_BHRK = state.filled_BHRK.long().cumsum(3) - state.filled_BHRK
    earlier_BHRT = rank_BHRT - first_BHRK.gather(3, buckets_BHRT)
    later_BHRT = state.filled_BHRK.gather(3, buckets_BHRT) - 1 - earlier_BHRT
    kept_BHRT = real_BHRT & (later_BHRT < window)
    # Tokens that left their ring, and padding, are written to one place more, which is cut off again.
    cell_BHRT = torch.where(kept_BHRT, buckets_BHRT * window + earlier_BHRT % window, state.ring_BHRX.shape[3])
    places_BHRT = torch.arange(length, dtype=torch.int32, device=cell_BHRT.device).expand_as(cell_BHRT)
    wider_BHRX = torch.nn.functional.pad(state.ring_BHRX, (0, 1)).scatter_(3, cell_BHRT, places_BHRT)
    state.ring_BHRX.copy_(wider_BHRX[..., :-1])
