"""How a command ends early: one line for the user, no traceback."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class CommandError(Exception):
    """Ends a command with one line on standard error.

    Args:
        message: what went wrong and what to do about it.
        status: the exit status; 2 for a mistake of the user's, 1 for a run that failed.
    """

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def user_mistakes(*kinds: type[Exception], prefix: str = "") -> Iterator[None]:
    """Turn errors of these kinds into a `CommandError`: wrap only steps that read what the user gave."""
    try:
        yield
    except kinds as error:
        raise CommandError(prefix + " ".join(str(error).split())) from error


class CommandParser(argparse.ArgumentParser):
    """A parser whose complaints are those of its command."""

    def error(self, message: str) -> NoReturn:
        """End the command."""
        raise CommandError(message)
