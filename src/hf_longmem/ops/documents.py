"""Several documents packed in one row: which token belongs to which."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_longmem._errors import complaint


def document_numbers(document_ids_BT: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Number the documents of each row: token t is in document ``sum_(s <= t) [id_s != id_(s-1)]`` of its row.

    Args:
        document_ids_BT: integer, rising within a row from any start, equal for the tokens of one document.
        attention_mask: ``[B, T]``, true (or 1) where a token is real; None when all are. The ids of padding do not
            matter: it counts with the document before it.

    Returns:
        ``[B, T]``, int64, from 0. Numbers are ids again, and are left as they are.

    Raises:
        ValueError: not integers, not ``[B, T]``, or, on the CPU, ids that fall within a row.

    >>> document_numbers(torch.tensor([[7, 7, 9, 9, 12]]))
    tensor([[0, 0, 1, 1, 2]])
    """
    ids_BT = document_ids_BT
    if ids_BT.dim() != 2 or ids_BT.is_floating_point() or ids_BT.is_complex() or ids_BT.dtype == torch.bool:
        received = f"{ids_BT.dtype} of shape {list(ids_BT.shape)}"
        raise ValueError(complaint("document_ids must be integers [batch, tokens]", received, "give one id per token"))
    if attention_mask is not None:
        ids_BT = ids_BT.masked_fill(~attention_mask.bool(), torch.iinfo(ids_BT.dtype).min)
    if ids_BT.numel() == 0:
        return ids_BT.long()
    rising_BT = ids_BT.cummax(dim=1).values
    # Only on the CPU is a look at the values free; elsewhere it would wait for the device.
    if ids_BT.device.type == "cpu" and not torch.compiler.is_compiling():
        falls_BT = ids_BT < rising_BT
        if attention_mask is not None:
            falls_BT = falls_BT & attention_mask.bool()
        if falls_BT.any():
            row, token = falls_BT.nonzero()[0].tolist()
            received = f"{ids_BT[row, token]} after {rising_BT[row, token]} in row {row}"
            fix = "number the documents of a row in their order"
            raise ValueError(complaint("document_ids must not fall within a row", received, fix))
    changes_BT = rising_BT[:, 1:] != rising_BT[:, :-1]
    numbers_BT = torch.nn.functional.pad(changes_BT, (1, 0)).cumsum(dim=1)
    if attention_mask is None:
        return numbers_BT
    # Padding before the first document is no document.
    first_B1 = numbers_BT.take_along_dim(attention_mask.int().argmax(dim=1, keepdim=True), dim=1)
    return (numbers_BT - first_B1).clamp_(min=0)


def document_positions(numbers_BT: Tensor) -> Tensor:
    """How many tokens of its document stand before each token, ``[B, T]`` int64, for rows without padding inside.

    >>> document_positions(torch.tensor([[0, 0, 1, 1, 1, 2]]))
    tensor([[0, 1, 0, 1, 2, 0]])
    """
    token_T = torch.arange(numbers_BT.shape[1], device=numbers_BT.device)
    begins_BT = torch.nn.functional.pad(numbers_BT[:, 1:] != numbers_BT[:, :-1], (1, 0), value=True)
    return token_T - torch.where(begins_BT, token_T, 0).cummax(dim=1).values
