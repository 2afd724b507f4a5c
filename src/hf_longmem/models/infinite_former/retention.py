"""How long the memory of a config keeps what it is told."""

from __future__ import annotations

from hf_longmem.models.infinite_former.configuration_infinite_former import InfiniteFormerConfig
from hf_longmem.ops.continuous import retention
from hf_longmem.ops.continuous.retention import Retention


def memory_retention(
    config: InfiniteFormerConfig, num_segments: int = 24, *, read_variance: float | None = None
) -> Retention:
    """Tell how well a segment can still be read when it is so many segments old, to choose tau, N and M by.

    Segments of constant vectors are written and each is read where it now lies; no model is needed. Positions are
    even, as without sticky memories.

    Args:
        config: says segment length, basis, ridge, samples and decay.
        num_segments: how many segments are written.
        read_variance: sigma^2 of the reading density; default the config's floor, the sharpest that the model can do.

    Returns:
        gain, fidelity and cosine for each age, newest first; ``.kept()`` counts the segments that can be read.

    Raises:
        ValueError: no segment.

    Example:
        >>> from hf_longmem import InfiniteFormerConfig, memory_retention
        >>> config = InfiniteFormerConfig(segment_length=64, num_basis=64, memory_decay=0.5)
        >>> memory_retention(config, read_variance=0.0).kept()
        5
    """
    variance = config.memory_variance_floor if read_variance is None else read_variance
    return retention.memory_retention(config.regression, config.decay, num_segments, read_variance=float(variance))


__all__ = ["memory_retention"]
