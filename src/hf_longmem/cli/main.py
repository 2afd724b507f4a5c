"""Entry point of the `longmem` command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from hf_longmem._version import __version__
from hf_longmem.cli.errors import CommandError

# Each command is the module of the same name beside this file, with ``run(arguments)``.
COMMANDS = {
    "train": "train a causal language model on text, evaluate, generate, save, and check what was saved",
    "eval": "score documents of any length with a trained model: perplexity, bits per byte",
    "convert": "convert checkpoints of transformers' Reformer, google/reformer-* among them, to reformer_lsh and back",
    "bundle": "write a checkpoint together with its model's code, for machines without hf-longmem",
    "card": "write the model card of a checkpoint, or of a recipe",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: the command line after ``longmem``; None takes it from ``sys.argv``.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # Everything after the command's name is the command's own; here only help, the version and mistakes are dealt with.
    command = _top_level_parser().parse_args(arguments[:1] or ["--help"]).command
    try:
        importlib.import_module(f"hf_longmem.cli.{command}").run(arguments[1:])
    except CommandError as error:
        print(f"longmem {command}: error: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print(f"longmem {command}: interrupted", file=sys.stderr)
        return 130
    return 0


def _top_level_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="longmem",
        usage="longmem COMMAND [ARGUMENT ...]",
        description="Long-memory language models on Hugging Face transformers.",
        epilog=f"commands:\n{commands}\n\n'longmem COMMAND --help' lists a command's arguments.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"longmem {__version__}")
    parser.add_argument("command", choices=list(COMMANDS), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
