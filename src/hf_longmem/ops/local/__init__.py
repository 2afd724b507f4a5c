"""Windowed attention: an exact sliding window, or transformers' chunks without wrapping round."""

from hf_longmem.ops.local.window import local_attention

__all__ = ["local_attention"]
