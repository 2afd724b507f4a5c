"""How many bytes of text a token stands for."""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from torch import Tensor

_BYTE_NAME = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def bytes_per_token(tokenizer: Any) -> Tensor:
    """Count the bytes of UTF-8 text that each token of a vocabulary stands for; special tokens stand for none.

    Exact for byte tokenizers (ByT5, `ReformerLSHByteTokenizer`), byte-level BPE (GPT-2, Llama 3, Qwen) and
    SentencePiece, but for a space that SentencePiece may put before a text. What a tokenizer does not keep, as
    WordPiece the spaces, is not counted.

    Args:
        tokenizer: a transformers tokenizer.

    Returns:
        int64 ``[len(tokenizer)]``.

    Example:
        >>> from transformers import ByT5Tokenizer
        >>> tokenizer = ByT5Tokenizer()
        >>> ids = tokenizer("é")["input_ids"]
        >>> bytes_per_token(tokenizer)[ids].tolist()
        [1, 1, 0]
    """
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = set(tokenizer.all_special_ids)
    added = set(tokenizer.get_added_vocab().values())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # Byte tokenizers have no backend: each of their tokens is a character that stands for a byte.
    byte_alphabet = backend is None or "ByteLevel" in _types(json.loads(backend.to_str()).get("decoder"))
    counts = []
    for index, name in enumerate(names):
        if name is None or index in special:
            counts.append(0)
        elif byte_alphabet and index not in added:
            counts.append(len(name))
        elif _BYTE_NAME.fullmatch(name):
            counts.append(1)
        else:
            counts.append(len(name.replace("▁", " ").removeprefix("##").encode("utf-8")))
    return torch.tensor(counts)


def _types(part: Any) -> set[str]:
    if isinstance(part, list):
        return set().union(*map(_types, part))
    if isinstance(part, dict):
        return {str(part.get("type"))}.union(*map(_types, part.values()))
    return set()


__all__ = ["bytes_per_token"]
