"""The operators serve those who have torch and nothing else."""

from __future__ import annotations

import subprocess
import sys

ALONE = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"transformers", "accelerate", "datasets", "huggingface_hub"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import torch
from hf_longmem.ops import chunking, continuous, local, lsh, reversible

qk = torch.randn(1, 2, 50, 8)
buckets = lsh.hash_vectors(qk, lsh.draw_rotations(2, 8, 2, 4), 4)
assert lsh.lsh_attention(qk, qk, buckets, chunk_length=8).shape == qk.shape
assert "transformers" not in sys.modules
"""


def test_the_operators_need_torch_alone():
    subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE], check=True)
