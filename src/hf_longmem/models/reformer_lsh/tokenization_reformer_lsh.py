"""Bytes as tokens, the way ``google/reformer-enwik8`` was trained: id = byte + 2."""

from typing import Any

from transformers.tokenization_python import PreTrainedTokenizer
from transformers.tokenization_utils_base import AddedToken

from hf_longmem._errors import complaint

_FIRST_BYTE = 2


class ReformerLSHByteTokenizer(PreTrainedTokenizer):
    r"""The bytes of a text in UTF-8 as ids ``byte + 2``, after ``<pad>`` (0) and ``</s>`` (1); nothing is added.

    ``decode(encode(x)) == x`` for every text, one that spells ``</s>`` included. Bytes that are not UTF-8 travel as
    Python's surrogate escapes: ``data.decode("utf-8", "surrogateescape")`` on the way in, ``encode`` likewise out.

    Args:
        pad_token, eos_token: names of the ids 0 and 1.

    Example:
        >>> tokenizer = ReformerLSHByteTokenizer()
        >>> tokenizer("né")["input_ids"]
        [112, 197, 171]
        >>> tokenizer.decode([112, 197, 171])
        'né'
    """

    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, pad_token: str = "<pad>", eos_token: str = "</s>", **kwargs: Any) -> None:
        # What a text spells is text, never a special token; and what is decoded is not tidied up.
        kwargs = {"split_special_tokens": True, "clean_up_tokenization_spaces": False} | kwargs
        specials = enumerate((pad_token, eos_token))
        self._added_tokens_decoder = {index: AddedToken(str(name), special=True) for index, name in specials}
        super().__init__(pad_token=pad_token, eos_token=eos_token, **kwargs)

    @property
    def vocab_size(self) -> int:
        """258: the bytes and the two special tokens."""
        return 256 + _FIRST_BYTE

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id; the token of a byte is the character of that code point."""
        return {chr(byte): byte + _FIRST_BYTE for byte in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [chr(byte) for byte in text.encode("utf-8", "surrogateescape")]

    def _convert_token_to_id(self, token: str) -> int | None:
        return ord(token) + _FIRST_BYTE if len(token) == 1 and ord(token) < 256 else None

    def _convert_id_to_token(self, index: int) -> str:
        if not _FIRST_BYTE <= index < self.vocab_size:
            rule = f"the id of a byte must lie in {_FIRST_BYTE} .. {255 + _FIRST_BYTE}"
            raise ValueError(complaint(rule, index, "decode the ids of a model with this tokenizer's vocabulary"))
        return chr(index - _FIRST_BYTE)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Join tokens to text; special tokens are written as they are spelled."""
        specials = set(self.added_tokens_encoder)
        pieces = (token.encode() if token in specials else token.encode("latin-1") for token in tokens)
        return b"".join(pieces).decode("utf-8", "surrogateescape")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """There is no vocabulary file: the bytes are the vocabulary."""
        return ()
