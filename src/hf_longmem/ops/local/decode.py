"""Windowed attention one token after another, with the same result as over the whole sequence at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_longmem.ops._no_backward import no_backward
from hf_longmem.ops.local.window import Rule, local_attention

# New tokens attended at once against the window and each other.
PIECE = 64


@dataclasses.dataclass(frozen=True)
class LocalState:
    """The last W real tokens of each row, right-aligned, and how many there were before.

    Attributes:
        k_BHWD, v_BHWD: keys and values.
        position_BW: which real token of its row each one is, int64; negative where the row has not got so many.
        seen_B: real tokens of each row, int64.
        length: tokens so far, padding included.
    """

    k_BHWD: Tensor
    v_BHWD: Tensor
    position_BW: Tensor
    seen_B: Tensor
    length: int

    def map_rows(self, select: Callable[[Tensor], Tensor]) -> LocalState:
        """The state with ``select`` applied to the batch axis of every tensor, as beam search reorders rows."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        changed: dict[str, Any] = {name: select(tensor) for name, tensor in tensors.items()}
        return dataclasses.replace(self, **changed)


def empty_state(k_BHTD: Tensor, *, rule: Rule, chunk_length: int, chunks_before: int) -> LocalState:
    """The state before the first token, for rows, heads, width and dtype as in ``k_BHTD``."""
    batch, heads, _, head_dim = k_BHTD.shape
    window = chunk_length * chunks_before if rule == "sliding" else chunk_length * (chunks_before + 1)
    nothing_BHWD = k_BHTD.new_zeros(batch, heads, window, head_dim)
    return LocalState(
        k_BHWD=nothing_BHWD,
        v_BHWD=nothing_BHWD.clone(),
        position_BW=torch.full((batch, window), -1, dtype=torch.int64, device=k_BHTD.device),
        seen_B=torch.zeros(batch, dtype=torch.int64, device=k_BHTD.device),
        length=0,
    )


def extend(
    state: LocalState,
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    *,
    rule: Rule,
    chunk_length: int,
    chunks_before: int = 1,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, LocalState]:
    """Attend to the window and to each other with T more tokens: causal :func:`local_attention`, continued.

    Args:
        state: from :func:`empty_state` or the last call, for the same rule and lengths.
        q_BHTD, k_BHTD, v_BHTD, rule, chunk_length, chunks_before: as in :func:`local_attention`.
        attention_mask: bool ``[B, T]`` over the new tokens, each row's real tokens first; padding is not remembered.

    Returns:
        ``out_BHTD`` and the state after the T tokens. The outputs of real tokens are those of one call over everything.
        Gradients reach the first call's tensors; a backward pass through a later call raises.
    """
    if state.length == 0:
        out_BHTD = local_attention(
            q_BHTD,
            k_BHTD,
            v_BHTD,
            rule=rule,
            chunk_length=chunk_length,
            chunks_before=chunks_before,
            attention_mask=attention_mask,
        )
        return out_BHTD, _shift(state, k_BHTD.detach(), v_BHTD.detach(), attention_mask)
    outs = []
    with torch.no_grad():
        for start in range(0, q_BHTD.shape[2], PIECE):
            part = slice(start, start + PIECE)
            real_BT = None if attention_mask is None else attention_mask[:, part]
            q, k, v = (x.detach()[:, :, part] for x in (q_BHTD, k_BHTD, v_BHTD))
            out, state = _piece(state, q, k, v, real_BT, rule, chunk_length, chunks_before)
            outs.append(out)
    return no_backward(torch.cat(outs, dim=2), q_BHTD), state


def _piece(
    state: LocalState,
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    real_BT: Tensor | None,
    rule: Rule,
    chunk_length: int,
    chunks_before: int,
) -> tuple[Tensor, LocalState]:
    tokens = q_BHTD.shape[2]
    # Padding comes after a row's real tokens, so that counting on from the real ones gives each token its own number.
    position_BT = state.seen_B[:, None] + torch.arange(tokens, device=q_BHTD.device)
    key_position_BX = torch.cat([state.position_BW, position_BT], dim=1)
    if rule == "sliding":
        first_BT1 = (position_BT - chunk_length * chunks_before).unsqueeze(-1)
    else:
        first_BT1 = ((position_BT // chunk_length - chunks_before) * chunk_length).unsqueeze(-1)
    key_BTX = key_position_BX[:, None, :]
    seen_BTX = (key_BTX >= 0) & (key_BTX >= first_BT1) & (key_BTX <= position_BT.unsqueeze(-1))
    exact = torch.promote_types(q_BHTD.dtype, torch.float32)
    out_BHTD = torch.nn.functional.scaled_dot_product_attention(
        q_BHTD.to(exact),
        torch.cat([state.k_BHWD, k_BHTD], dim=2).to(exact),
        torch.cat([state.v_BHWD, v_BHTD], dim=2).to(exact),
        attn_mask=seen_BTX.unsqueeze(1),
    )
    return out_BHTD.to(q_BHTD.dtype), _shift(state, k_BHTD, v_BHTD, real_BT)


def _shift(state: LocalState, k_BHTD: Tensor, v_BHTD: Tensor, real_BT: Tensor | None) -> LocalState:
    """Append the real tokens of each row and keep the last W."""
    window, tokens = state.position_BW.shape[1], k_BHTD.shape[2]
    new_B = state.seen_B.new_full(state.seen_B.shape, tokens) if real_BT is None else real_BT.sum(1)
    position_BT = state.seen_B[:, None] + torch.arange(tokens, device=k_BHTD.device)
    index_BW = new_B[:, None] + torch.arange(window, device=k_BHTD.device)
    index_BHWD = index_BW[:, None, :, None].expand(-1, k_BHTD.shape[1], -1, k_BHTD.shape[3])
    return LocalState(
        k_BHWD=torch.cat([state.k_BHWD, k_BHTD], dim=2).gather(2, index_BHWD),
        v_BHWD=torch.cat([state.v_BHWD, v_BHTD.to(state.v_BHWD.dtype)], dim=2).gather(2, index_BHWD),
        position_BW=torch.cat([state.position_BW, position_BT], dim=1).gather(1, index_BW),
        seen_B=state.seen_B + new_B,
        length=state.length + tokens,
    )
