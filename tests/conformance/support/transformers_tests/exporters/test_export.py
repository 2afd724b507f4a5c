"""Stands in for a module that transformers' source distribution refers to and does not contain."""


class ExportTesterMixin:
    """Empty: what transformers checks here for its own models is not published; ours is in ``tests/models``."""
