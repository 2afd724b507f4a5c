"""`longmem card`: model cards of checkpoints and of recipes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError

import hf_longmem  # noqa: F401 (registers the architectures)
from hf_longmem._errors import complaint
from hf_longmem.cli.errors import CommandError, CommandParser, user_mistakes
from hf_longmem.hub.cards import CARD, render_recipe, write_card


def run(arguments: Sequence[str]) -> None:
    """Run the command.

    Args:
        arguments: the command line after ``longmem card``.

    Raises:
        CommandError: a mistake of the user's, or with ``--check`` a card that is not fresh.
    """
    parser = CommandParser(
        prog="longmem card",
        description="Write model cards. Of a checkpoint's folder: its README.md, with the results that `longmem train` "
        "or Trainer left there. Of a recipe NAME.json: NAME.md beside it.",
        allow_abbrev=False,
    )
    parser.add_argument("sources", metavar="FOLDER|RECIPE.json", nargs="+", help="checkpoints and recipes")
    parser.add_argument("--overwrite", action="store_true", help="replace the README.md of a checkpoint")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a recipe's card is not fresh")
    namespace = parser.parse_args(list(arguments))
    sources = [Path(source) for source in namespace.sources]
    stale = [
        str(file) for source in sources if (file := _card(source, namespace.check, namespace.overwrite)) is not None
    ]
    if stale:
        rule = f"the cards must be fresh, {', '.join(stale)} too"
        raise CommandError(complaint(rule, "other text", "run longmem card without --check"), status=1)


def _card(source: Path, check: bool, overwrite: bool) -> Path | None:
    """Write one card; or, to check, give its file if it holds anything else."""
    with user_mistakes(ValueError, TypeError, AttributeError, OSError, StrictDataclassError, prefix=f"{source}: "):
        if source.is_dir():
            if check:
                raise ValueError(complaint("--check is for recipes", "a folder", "name RECIPE.json files"))
            if (source / CARD).exists() and not overwrite:
                raise ValueError(complaint(f"{CARD} must not exist yet", "one", "pass --overwrite to replace it"))
            file = write_card(source)
        else:
            file, text = source.with_suffix(".md"), render_recipe(source)
            if check:
                return None if file.is_file() and file.read_text(encoding="utf-8") == text else file
            file.write_text(text, encoding="utf-8")
    print(file)
    return None
