"""How an error is worded: the rule, what was received, what to do."""

from __future__ import annotations


def complaint(rule: str, received: object, fix: str) -> str:
    """Word an error as ``<rule>, got <received>; <fix>``.

    Args:
        rule: what must hold, as a clause without a full stop.
        received: what the caller gave; formatted with ``str``.
        fix: what the caller can do about it.

    >>> complaint("num_buckets must be even", 63, "use 62 or 64")
    'num_buckets must be even, got 63; use 62 or 64'
    """
    return f"{rule}, got {received}; {fix}"
