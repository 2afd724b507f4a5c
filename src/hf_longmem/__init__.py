"""hf-longmem: long-memory architectures as a Hugging Face transformers plugin."""

from hf_longmem._version import __version__

__all__ = ["__version__"]
