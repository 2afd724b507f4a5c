"""`longmem bundle`: a checkpoint together with the code of its model, for machines without this package."""

from __future__ import annotations

from collections.abc import Sequence

from huggingface_hub.errors import StrictDataclassError

import hf_longmem  # noqa: F401 (registers the architectures)
from hf_longmem.cli.errors import CommandParser, user_mistakes
from hf_longmem.hub.bundle import bundle
from hf_longmem.hub.sources import source_version

_MISTAKES = (ValueError, TypeError, AttributeError, OSError, StrictDataclassError)


def run(arguments: Sequence[str]) -> None:
    """Run the command.

    Args:
        arguments: the command line after ``longmem bundle``.

    Raises:
        CommandError: a mistake of the user's.
    """
    parser = CommandParser(
        prog="longmem bundle",
        description="Write a checkpoint together with the code of its model: with hf-longmem installed it loads as "
        "ever, without it by trust_remote_code=True. Weights are copied as safetensors; Trainer's states are left out.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SRC", help="the checkpoint: a folder or a name on the Hub")
    parser.add_argument("destination", metavar="DST", help="a folder that is empty or does not exist")
    parser.add_argument("--push_to", metavar="USER/NAME", help="then upload DST to this repository on the Hub")
    parser.add_argument("--private", action="store_true", help="if the repository is created, make it private")
    namespace = parser.parse_args(list(arguments))
    private = True if namespace.private else None
    with user_mistakes(*_MISTAKES):
        folder = bundle(namespace.source, namespace.destination, push_to=namespace.push_to, private=private)
    print(f"{folder}: {len(list(folder.glob('*.py')))} files of code from {source_version()}")
    if namespace.push_to:
        print(f"pushed to {namespace.push_to}")
    where = namespace.push_to or str(folder)
    print(f"without hf-longmem: AutoModelForCausalLM.from_pretrained({where!r}, trust_remote_code=True)")
