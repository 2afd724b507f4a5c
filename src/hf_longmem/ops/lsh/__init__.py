"""LSH attention with shared queries and keys."""

from hf_longmem.ops.lsh.attend import lsh_attention
from hf_longmem.ops.lsh.hashing import bucket_factors, draw_rotations, hash_vectors, seeded_rotations
from hf_longmem.ops.lsh.sorting import Candidates, Merge, sort_by_bucket

__all__ = [
    "Candidates",
    "Merge",
    "bucket_factors",
    "draw_rotations",
    "hash_vectors",
    "lsh_attention",
    "seeded_rotations",
    "sort_by_bucket",
]
