"""Metrics of language models in the shape of the `evaluate` library; nothing is downloaded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import datasets
import evaluate
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hf_longmem._errors import complaint
from hf_longmem.training.token_bytes import bytes_per_token

_IGNORED = -100
_CHUNK = 1024
_INPUTS = """
Args:
    predictions: rows of each token's negative log-likelihood in nats, as `token_nll` gives them.
    references: rows of the tokens themselves; those that are -100 do not count, nor do predictions that are -100.
"""
_MARTINS = """@inproceedings{martins2022infinity,
  title = {$\\infty$-former: Infinite Memory Transformer},
  author = {Martins, Pedro Henrique and Marinho, Zita and Martins, Andr{\\'e} F. T.},
  booktitle = {Proceedings of ACL}, year = {2022}}"""


def token_nll(logits: Tensor | tuple[Tensor, ...], labels: Tensor, *, shifted: bool = True) -> Tensor:
    """Each label's negative log-likelihood ``-log softmax(logits)[label]``, in place of logits V times as large.

    To be used as Trainer's ``preprocess_logits_for_metrics``, so that evaluation holds a number per token.

    Args:
        logits: ``[B, T, V]``, or a tuple that begins with them.
        labels: ``[B, T]``, -100 where there is none.
        shifted: whether ``labels[:, t]`` is what ``logits[:, t]`` predicts: so with document streams and
            ``TrainingArguments(label_names=["shift_labels"])``. Otherwise ``logits[:, t]`` predicts
            ``labels[:, t + 1]``, as Trainer's ``labels`` usually are; the first one is predicted by none.

    Returns:
        Nats, float32 ``[B, T]``; -100 where nothing was predicted.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    if not shifted:
        first = torch.full_like(labels[:, :1], _IGNORED, dtype=torch.float32)
        return torch.cat((first, token_nll(logits[:, :-1], labels[:, 1:])), dim=1)
    flat = labels.flatten()
    parts = zip(logits.flatten(0, 1).split(_CHUNK), flat.split(_CHUNK), strict=True)
    # A part at a time: a copy of all logits in float32 may be gigabytes.
    nll = torch.cat([cross_entropy(part.float(), of, reduction="none", ignore_index=_IGNORED) for part, of in parts])
    return nll.masked_fill(flat == _IGNORED, _IGNORED).view_as(labels)


class _NllMetric(evaluate.Metric):
    """What the metrics share: sums over the tokens that count."""

    def __init__(self, **kwargs: Any) -> None:
        # In memory: evaluating leaves no files.
        super().__init__(**({"keep_in_memory": True} | kwargs))

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=type(self).__doc__ or "",
            citation=_MARTINS,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {
                    "predictions": datasets.Sequence(datasets.Value("float32")),
                    "references": datasets.Sequence(datasets.Value("int64")),
                }
            ),
        )

    def _counted(self, predictions: Iterable[Any], references: Iterable[Any]) -> tuple[float, np.ndarray]:
        """The sum of the nats, and the tokens that they are of."""
        total, tokens = 0.0, [np.empty(0, np.int64)]
        for nll, labels in zip(predictions, references, strict=True):
            nll_T, labels_T = np.asarray(nll, np.float64), np.asarray(labels, np.int64)
            if nll_T.shape != labels_T.shape:
                rule = "each reference must have its prediction"
                received = f"{len(nll_T)} predictions for {len(labels_T)} references"
                raise ValueError(complaint(rule, received, "use preprocess_logits_for_metrics=token_nll"))
            counts = (nll_T != _IGNORED) & (labels_T != _IGNORED)
            total += nll_T[counts].sum()
            tokens.append(labels_T[counts])
        joined = np.concatenate(tokens)
        if not len(joined):
            raise ValueError(complaint("some token must have been predicted", "none", "evaluate on longer documents"))
        return float(total), joined


class StreamPerplexity(_NllMetric):
    """Perplexity over document streams: ``exp`` of the mean negative log-likelihood of all tokens that count.

    Each token counts alike, whichever batch it is in, which Trainer's ``eval_loss``, a mean over batches, does not do.

    Example:
        >>> import math
        >>> metric = StreamPerplexity()
        >>> metric.add_batch(predictions=[[math.log(2), -100.0]], references=[[5, -100]])
        >>> round(metric.compute(predictions=[[math.log(8)]], references=[[5]])["perplexity"], 5)
        4.0
    """

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        total, tokens = self._counted(predictions, references)
        mean_nll = total / len(tokens)
        perplexity = math.exp(mean_nll) if mean_nll < 700 else math.inf
        return {"perplexity": perplexity, "mean_nll": mean_nll, "num_tokens": len(tokens)}


class BitsPerByte(_NllMetric):
    """Bits per byte: the negative log-likelihood in bits over the bytes of UTF-8 text that the tokens stand for.

    Unlike perplexity it compares models with different tokenizers.

    Args:
        tokenizer: says how many bytes each token stands for (`bytes_per_token`); without one a token is a byte.

    Example:
        >>> import math
        >>> metric = BitsPerByte()
        >>> result = metric.compute(predictions=[[math.log(2), math.log(8)]], references=[[5, 6]])
        >>> round(result["bits_per_byte"], 5), result["num_bytes"]
        (2.0, 2)
    """

    def __init__(self, tokenizer: Any = None, **kwargs: Any) -> None:
        self._bytes_V = None if tokenizer is None else bytes_per_token(tokenizer).numpy()
        super().__init__(**kwargs)

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        total, tokens = self._counted(predictions, references)
        if self._bytes_V is not None and tokens.max() >= len(self._bytes_V):
            rule = f"token ids must be below {len(self._bytes_V)}, the tokenizer's size"
            raise ValueError(complaint(rule, tokens.max(), "use the model's tokenizer"))
        num_bytes = len(tokens) if self._bytes_V is None else int(self._bytes_V[tokens].sum())
        if not num_bytes:
            raise ValueError(complaint("the tokens must stand for some text", "special tokens only", "check the data"))
        return {"bits_per_byte": total / math.log(2) / num_bytes, "num_bytes": num_bytes}


__all__ = ["BitsPerByte", "StreamPerplexity", "token_nll"]
