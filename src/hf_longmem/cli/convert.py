"""`longmem convert`: checkpoints of transformers' Reformer to `reformer_lsh`, and back."""

from __future__ import annotations

from collections.abc import Sequence

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

import hf_longmem  # noqa: F401 (registers the architectures)
from hf_longmem.cli.errors import CommandParser, user_mistakes
from hf_longmem.hub.convert_reformer import from_reformer, to_reformer

_DIRECTIONS = {"reformer_lsh": from_reformer, "reformer": to_reformer}
_MISTAKES = (ValueError, OSError, RuntimeError, SafetensorError, StrictDataclassError)


def run(arguments: Sequence[str]) -> None:
    """Run the command.

    Args:
        arguments: the command line after ``longmem convert``.

    Raises:
        CommandError: a mistake of the user's.
    """
    parser = CommandParser(
        prog="longmem convert",
        description="Convert a checkpoint of transformers' Reformer, such as google/reformer-enwik8, to reformer_lsh, "
        "or back. Weights are written as safetensors.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SRC", help="the checkpoint: a folder or a name on the Hub")
    parser.add_argument("destination", metavar="DST", help="a folder that is empty or does not exist")
    parser.add_argument("--to", choices=list(_DIRECTIONS), default="reformer_lsh", help="what DST is to be")
    namespace = parser.parse_args(list(arguments))
    with user_mistakes(*_MISTAKES):
        done = _DIRECTIONS[namespace.to](namespace.source, namespace.destination)
    print(f"{namespace.destination}: {done.architecture}, {done.num_parameters:,} parameters")
    print(f"tokenizer: {done.tokenizer or 'none, as in the source'}")
