"""`longmem eval`: how well a model predicts documents of any length."""

from __future__ import annotations

import codecs
import importlib
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

import hf_longmem  # noqa: F401 (registers the architectures)
from hf_longmem._errors import complaint
from hf_longmem.cli.errors import CommandError, CommandParser, user_mistakes
from hf_longmem.data.text import python_documents, split_documents, token_pieces
from hf_longmem.training.metrics import streaming_perplexity
from hf_longmem.training.peak_memory import peak_memory
from hf_longmem.training.token_bytes import bytes_per_token

# Caches that can be written to a file.
_CACHES = {
    "infinite_former": ("hf_longmem.models.infinite_cache", "InfiniteFormerCache"),
    "memory_augmented": ("hf_longmem.models.memory_augmented.cache", "MemoryAugmentedCache"),
}
_MISTAKES = (ValueError, OSError, RuntimeError, SafetensorError, StrictDataclassError)
_CHUNK = 1 << 16


class _Score(NamedTuple):
    """The nats of so many tokens, which stand for so many bytes."""

    nats: float
    tokens: int
    num_bytes: int

    def __str__(self) -> str:
        mean = self.nats / self.tokens
        perplexity = math.exp(mean) if mean < 700 else math.inf
        bits = f"{self.nats / math.log(2) / self.num_bytes:.4f}" if self.num_bytes else "none"
        return (
            f"{self.tokens:,} tokens, {self.num_bytes:,} bytes: {mean:.4f} nats per token, "
            f"perplexity {perplexity:.4f}, bits per byte {bits}"
        )


def run(arguments: Sequence[str]) -> None:
    """Run the command.

    Args:
        arguments: the command line after ``longmem eval``.

    Raises:
        CommandError: a mistake of the user's, or a loss that is not finite.
    """
    namespace = _parser().parse_args(list(arguments))
    if namespace.piece_length < 1:
        raise CommandError(complaint("piece_length must be at least 1", namespace.piece_length, "use 1024"))
    remembers = namespace.save_memory is not None or namespace.load_memory is not None
    if remembers and (namespace.text is None or len(namespace.text) != 1):
        raise CommandError(complaint("a memory is that of one document", "several", "name one file with --text"))
    if namespace.save_memory is not None and not Path(namespace.save_memory).absolute().parent.is_dir():
        raise CommandError(complaint("save_memory must lie in a folder", namespace.save_memory, "make it first"))
    with user_mistakes(*_MISTAKES, prefix=f"{namespace.model}: "):
        tokenizer = AutoTokenizer.from_pretrained(namespace.tokenizer_name or namespace.model)
        model: Any = AutoModelForCausalLM.from_pretrained(namespace.model)
    device = namespace.device or ("cuda" if torch.cuda.is_available() else "cpu")
    # PyTorch built without CUDA asserts that it has it.
    with user_mistakes(RuntimeError, AssertionError, prefix=f"device {device}: "):
        model = model.to(device).eval()
    if len(tokenizer) > model.config.vocab_size:
        received = f"{len(tokenizer)} tokens for a model that knows {model.config.vocab_size}"
        raise CommandError(complaint("the tokenizer must be the model's", received, "name it with --tokenizer_name"))
    cache = _cache(model, namespace.load_memory) if remembers else None
    counts = bytes_per_token(tokenizer).numpy()
    scores = []
    for name, size, text in _documents(namespace.text):
        with tqdm(total=size, unit="B", unit_scale=True, desc=name) as bar, user_mistakes(ValueError, OSError):
            document = _Document(text, tokenizer, counts, bar)
            try:
                found = streaming_perplexity(
                    model, document, piece_length=namespace.piece_length, progress=False, cache=cache
                )
            except IndexError as error:
                # Of a table of positions: token ids have been checked.
                rule = "a document must not be longer than the model can read"
                fix = "give shorter ones, or a model without such a limit"
                raise ValueError(complaint(rule, f"{name}, {size:,} bytes", fix)) from error
        scores.append(_Score(found.mean_nll * found.num_tokens, found.num_tokens, document.num_bytes))
        print(f"{name}: {scores[-1]}")
    if len(scores) > 1:
        print(f"all: {_Score(*map(sum, zip(*scores, strict=True)))}")
    for name, title in (("peak_memory", "peak memory"), ("peak_memory_cuda", "peak memory on the accelerator")):
        if name in peak_memory():
            print(f"{title}: {peak_memory()[name] / 2**30:.2f} GiB")
    if not all(math.isfinite(score.nats) for score in scores):
        raise CommandError("the loss is not finite; the model's weights or its precision are at fault", status=1)
    if namespace.save_memory is not None and cache is not None:
        with user_mistakes(ValueError, OSError, SafetensorError):
            cache.save(namespace.save_memory)
        print(f"memory: {namespace.save_memory}")


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="longmem eval",
        description="Score every token of documents of any length but the first, each in sight of all that the model "
        "remembers of what came before, and in constant memory if the model's own is.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a causal language model: a folder or a name on the Hub")
    parser.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="text files in UTF-8, one document each; default: the held-out part of Python's own text",
    )
    parser.add_argument("--piece_length", type=int, default=1024, help="tokens a call; any gives the same (1024)")
    parser.add_argument("--tokenizer_name", metavar="NAME", help="a tokenizer's folder or name; default: the model's")
    parser.add_argument("--device", help="where to compute; default: cuda if there is a card, else cpu")
    parser.add_argument(
        "--load_memory", metavar="FILE", help="go on with what the model remembers of a text that was read before"
    )
    parser.add_argument("--save_memory", metavar="FILE", help="write what the model remembers in the end (safetensors)")
    return parser


def _cache(model: Any, path: str | None) -> Any:
    kind = model.config.model_type
    if kind not in _CACHES:
        rule = f"only models of the types {', '.join(_CACHES)} have a memory to be saved"
        raise CommandError(complaint(rule, kind, "leave --save_memory and --load_memory out"))
    module, name = _CACHES[kind]
    cache_class = getattr(importlib.import_module(module), name)
    if path is None:
        return cache_class(model.config)
    with user_mistakes(ValueError, OSError):
        return cache_class.load(path, model.config, model.device)


def _documents(paths: Sequence[str] | None) -> Iterator[tuple[str, int, Iterable[str]]]:
    """Names, sizes in bytes, and texts a part at a time."""
    if paths is None:
        for document in split_documents(python_documents())["held_out"]:
            yield document["name"], len(document["text"].encode("utf-8")), (document["text"],)
        return
    for path in map(Path, paths):
        if not path.is_file():
            found = "a directory" if path.is_dir() else "no such file"
            raise CommandError(complaint(f"{path} must be a text file", found, "check the path"))
    for path in map(Path, paths):
        yield str(path), path.stat().st_size, _parts(path)


def _parts(path: Path) -> Iterator[str]:
    decode = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        try:
            while chunk := file.read(_CHUNK):
                yield decode.decode(chunk)
            yield decode.decode(b"", final=True)
        except UnicodeDecodeError as error:
            fix = f"convert it, for instance with: iconv -f latin1 -t utf-8 {path}"
            raise ValueError(complaint(f"{path} must be UTF-8", error.reason, fix)) from None


class _Document:
    """The token ids of a text, one by one; counts the bytes of all but the first, and moves the progress bar."""

    def __init__(self, text: Iterable[str], tokenizer: PreTrainedTokenizerBase, counts: np.ndarray, bar: Any) -> None:
        self.text, self.tokenizer, self.counts, self.bar = text, tokenizer, counts, bar
        self.num_bytes = 0

    def __iter__(self) -> Iterator[int]:
        first = True
        for tokens in token_pieces(self.text, self.tokenizer, np.dtype(np.int64)):
            self.num_bytes += int(self.counts[tokens[1:] if first else tokens].sum())
            first = first and not len(tokens)
            self.bar.update(int(self.counts[tokens].sum()))
            yield from tokens.tolist()
