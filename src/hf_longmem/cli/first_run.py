"""What a first run on a small machine should be, by model type: flags win, and a checkpoint brings its own."""

from __future__ import annotations

from typing import Any

# The built-in text is larger than a first run needs: by default so many tokens of it are used.
BUILT_IN_TRAIN_TOKENS = 400 * 4096
BUILT_IN_EVAL_TOKENS = 32 * 4096

CONFIG: dict[str, dict[str, Any]] = {
    "reformer_lsh": {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "attn_layers": ["local", "lsh"],
        "num_hashes": 2,
        "local_attn_chunk_length": 16,
        "position_embedding_type": "rotary",
        # About 1 / sqrt(hidden_size): a few hundred steps do not make up for a smaller start.
        "initializer_range": 0.08,
        # Every text is seen once: there is nothing to overfit, and drawing masks costs a quarter of the time on a CPU.
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
    },
    "infinite_former": {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "segment_length": 64,
        "num_basis": 64,
        "initializer_range": 0.08,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}

# Defaults of the flags of `longmem train` itself.
FLAGS: dict[str, dict[str, Any]] = {
    "infinite_former": {"sequence_length": 256, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8},
}
