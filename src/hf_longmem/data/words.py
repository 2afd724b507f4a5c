"""Which tokens make a word together, for masking words whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_longmem._errors import complaint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPACES = set(" \t\n\r\v\f")
# How byte-level BPE writes a space, a line feed, a tab and a carriage return, and SentencePiece a space.
_MARKS = "ĠĊĉč▁"


class WordStarts:
    """Says from a tokenizer's vocabulary where words start.

    The bytes or characters of a word are those between spaces; WordPiece marks what continues a word (``##``);
    byte-level BPE and SentencePiece mark what begins one.

    Args:
        tokenizer: any.

    Attributes:
        known: whether the vocabulary is of one of these kinds.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        special = set(tokenizer.all_special_ids)
        tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
        ordinary = [token for index, token in enumerate(tokens) if index not in special and token]
        single = all(len(token) == 1 for token in ordinary)
        pieces = any(token.startswith("##") and len(token) > 2 for token in ordinary)
        marked = any(token[0] in _MARKS for token in ordinary)
        self.known = bool(ordinary) and (single or pieces or marked)
        blank = _SPACES if single else set(_MARKS)
        self.blank_V = torch.tensor([bool(token) and set(token) <= blank for token in tokens])
        if single:
            self.starts_V = self.blank_V
        elif pieces:
            self.starts_V = torch.tensor([not token.startswith("##") for token in tokens])
        else:
            self.starts_V = torch.tensor([token[:1] in _MARKS and bool(token) for token in tokens])

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Which tokens begin a word, bool ``[B, T]``."""
        ids_BT = ids_BT.clamp(0, len(self.starts_V) - 1)
        return self.starts_V[ids_BT] | torch.nn.functional.pad(self.blank_V[ids_BT[:, :-1]], (1, 0), value=True)


def first_tokens(
    ids_BT: Tensor,
    apart_BT: Tensor,
    *,
    word_ids_BT: Tensor | None,
    offsets_BT2: Tensor | None,
    vocabulary: WordStarts,
) -> Tensor:
    """Where in its row the first token of each token's word is, int64 ``[B, T]``.

    Args:
        ids_BT: token ids.
        apart_BT: bool, tokens that do not go on with what stands before them, whatever the rest says.
        word_ids_BT: the tokenizer's word of each token, if there is such a column.
        offsets_BT2: where each token begins and ends in the text: without a gap, and without a mark in the vocabulary,
            a token continues the word before it.
        vocabulary: decides where there is neither column.

    Raises:
        ValueError: there is neither column, and the vocabulary does not tell.
    """
    if word_ids_BT is not None:
        starts_BT = word_ids_BT[:, 1:] != word_ids_BT[:, :-1]
    elif offsets_BT2 is not None:
        starts_BT = offsets_BT2[:, 1:, 0] != offsets_BT2[:, :-1, 1]
        if vocabulary.known:
            starts_BT = starts_BT | vocabulary(ids_BT)[:, 1:]
    elif vocabulary.known:
        starts_BT = vocabulary(ids_BT)[:, 1:]
    else:
        rule = "whole_word_mask needs a vocabulary that marks words, or the column word_ids or offset_mapping"
        fix = "tokenize with return_offsets_mapping=True, and train with remove_unused_columns=False"
        raise ValueError(complaint(rule, "neither", fix))
    starts_BT = torch.nn.functional.pad(starts_BT, (1, 0), value=True) | apart_BT
    return torch.where(starts_BT, torch.arange(ids_BT.shape[1]), 0).cummax(dim=1).values
