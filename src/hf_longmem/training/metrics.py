"""How well a model predicts documents of any length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils.logging import tqdm

from hf_longmem._errors import complaint


class StreamingPerplexity(NamedTuple):
    """How well a document was predicted.

    perplexity: ``exp(mean_nll)``.
    mean_nll: mean negative log-likelihood of a token, in nats.
    num_tokens: how many tokens were scored: all but the first, which nothing comes before.
    """

    perplexity: float
    mean_nll: float
    num_tokens: int


def streaming_perplexity(
    model: Any,
    tokens: Tensor | Iterable[int],
    *,
    piece_length: int = 1024,
    progress: bool = True,
    cache: Cache | None = None,
) -> StreamingPerplexity:
    """Score every token of a document once, each in sight of all that the model remembers of what came before.

    The document goes through the model piece by piece, on one cache, so that memory does not grow with its length,
    and the first token of a piece is predicted by the last one of the piece before.

    Args:
        model: a causal language model that goes on from a ``cache``; it is used in evaluation mode and left as it was.
        tokens: token ids, a tensor, array or list ``[T]`` or ``[1, T]``, or any iterable of whole numbers, which may be
            endless but for your patience.
        piece_length: tokens per call; any gives the same result.
        progress: show a progress bar (unless transformers' are switched off).
        cache: what the model remembers of a text that these tokens go on with; it is filled further. What it was
            left by did not predict the first token, which therefore is not scored either. Default: an empty one.

    Returns:
        The perplexity, the mean negative log-likelihood and the number of tokens scored.

    Raises:
        ValueError: fewer than two tokens, more than one document, or a piece length below 1.

    Example:
        >>> import torch
        >>> from hf_longmem import InfiniteFormerConfig, InfiniteFormerForCausalLM, streaming_perplexity
        >>> config = InfiniteFormerConfig(hidden_size=16, num_hidden_layers=1, segment_length=16, num_basis=16)
        >>> model = InfiniteFormerForCausalLM(config)
        >>> streaming_perplexity(model, torch.arange(3, 103), progress=False).num_tokens
        99
    """
    if piece_length < 1:
        raise ValueError(complaint("piece_length must be at least 1", piece_length, "use 1024"))
    document = _without_batch_axis(tokens)
    total = len(document) if isinstance(document, Sized) else None
    cache = DynamicCache(config=model.config) if cache is None else cache
    last, nll, scored = None, 0.0, 0
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), tqdm(total=total, unit="token", disable=not progress) as bar:
            for piece in _pieces(document, piece_length):
                piece_1T = piece.to(model.device)[None]
                logits_TV = model(piece_1T, cache=cache, use_cache=True).logits[0].float()
                before_TV = logits_TV[:-1] if last is None else torch.cat((last, logits_TV[:-1]))
                targets_T = piece_1T[0, len(piece) - len(before_TV) :]
                nll += torch.nn.functional.cross_entropy(before_TV, targets_T, reduction="sum").double().item()
                scored += len(targets_T)
                last = logits_TV[-1:]
                bar.update(len(piece))
    finally:
        for module in in_training:
            module.training = True
    mean_nll = nll / scored
    return StreamingPerplexity(math.inf if mean_nll > 700 else math.exp(mean_nll), mean_nll, scored)


def _without_batch_axis(tokens: Any) -> Tensor | Iterable[Any]:
    """Take off the axis that a tokenizer puts before a single text, and make arrays tensors."""
    if hasattr(tokens, "__array__"):
        tokens = torch.as_tensor(tokens)
    batch = tokens.dim() == 2 if isinstance(tokens, Tensor) else isinstance(tokens, Sequence)
    if batch and len(tokens) == 1 and isinstance(tokens[0], Tensor | Sequence):
        return tokens[0]
    return tokens


def _pieces(document: Tensor | Iterable[Any], piece_length: int) -> Iterator[Tensor]:
    if isinstance(document, Tensor):
        pieces: Iterator[Tensor] = iter(_whole_numbers(document).split(piece_length))
        given = len(document)
    else:
        rest = iter(document)
        # Looked at before the model reads any, as what it has read stays in a cache.
        first = list(itertools.islice(rest, 2))
        given, rest = len(first), itertools.chain(first, rest)
        lists = iter(lambda: list(itertools.islice(rest, piece_length)), [])
        pieces = (_whole_numbers(torch.tensor(piece)) for piece in lists)
    if given < 2:
        rule = "a document must have at least two tokens to be scored"
        raise ValueError(complaint(rule, given, "pass a longer one"))
    yield from pieces


def _whole_numbers(tokens: Tensor) -> Tensor:
    if tokens.dim() != 1 or tokens.is_floating_point():
        rule = "streaming_perplexity scores the token ids of one document, [T] or [1, T]"
        received = f"shape {tuple(tokens.shape)}, {tokens.dtype}"
        raise ValueError(complaint(rule, received, "call it once for each document"))
    return tokens.long()


__all__ = ["StreamingPerplexity", "streaming_perplexity"]
