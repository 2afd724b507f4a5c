"""What a card says of each architecture: one entry of `TEXTS` a model type."""

from __future__ import annotations

from dataclasses import dataclass

_SOFTWARE = r"""@software{hf_longmem,
  title = {hf-longmem: long-memory language models as a plugin of transformers},
  year = {2026}
}"""
_MARTINS = r"""@inproceedings{martins2022infinite,
  title = {$\infty$-former: Infinite Memory Transformer},
  author = {Martins, Pedro Henrique and Marinho, Zita and Martins, Andr{\'e} F. T.},
  booktitle = {Proceedings of the 60th Annual Meeting of the Association for Computational Linguistics},
  year = {2022},
  url = {https://arxiv.org/abs/2109.00301}
}
"""
_ANY_LANGUAGE_MODEL = (
    "As a language model it repeats what its training text holds, mistakes and prejudices included, and states "
    "untruths; it has not been examined for either."
)
_REMEMBERS_SMOOTHED = (
    "What lies before the short-term window is remembered smoothed, and the older the coarser: single tokens of long "
    "ago are not recalled exactly."
)


@dataclass(frozen=True)
class ModelText:
    """A paragraph, the fields of the config worth showing, limits as sentences, tags, and BibTeX.

    A field of a config within is ``part.field``.
    """

    about: str
    config_fields: tuple[str, ...]
    limits: tuple[str, ...]
    tags: tuple[str, ...]
    citation: str


TEXTS = {
    "reformer_lsh": ModelText(
        about="A Reformer (Kitaev et al. 2020): attention among tokens that angular locality-sensitive hashing puts in "
        "one bucket, local attention, and reversible layers, whose training memory does not grow with their number.",
        config_fields=(
            "attn_layers",
            "hidden_size",
            "num_attention_heads",
            "max_position_embeddings",
            "position_embedding_type",
            "lsh_candidates",
            "round_merge",
            "num_hashes",
            "num_buckets",
            "lsh_attn_chunk_length",
            "local_attn_chunk_length",
            "vocab_size",
        ),
        limits=(
            "It reads at most as many tokens as it has positions.",
            "Beyond the local window attention is approximate: a query sees the keys that hashing brings near it.",
            "A cache cannot be shortened, so there is no assisted decoding.",
            _ANY_LANGUAGE_MODEL,
        ),
        tags=("reformer", "lsh-attention", "long-context"),
        citation=r"""@inproceedings{kitaev2020reformer,
  title = {Reformer: The Efficient Transformer},
  author = {Kitaev, Nikita and Kaiser, {\L}ukasz and Levskaya, Anselm},
  booktitle = {International Conference on Learning Representations},
  year = {2020},
  url = {https://arxiv.org/abs/2001.04451}
}
"""
        + _SOFTWARE,
    ),
    "infinite_former": ModelText(
        about="An infinity-former (Martins et al. 2021): attention to the last tokens, and to a continuous memory of "
        "all tokens before them, whose size and cost do not depend on how much was read.",
        config_fields=(
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "position_embedding_type",
            "segment_length",
            "short_term_window",
            "memory_layers",
            "num_basis",
            "memory_decay",
            "sticky_memories",
            "vocab_size",
        ),
        limits=(
            _REMEMBERS_SMOOTHED,
            "A memory cannot be unwritten: a cache is not shortened, so there is no assisted decoding.",
            "Gradients reach back through `bptt_segments` segments of one call.",
            _ANY_LANGUAGE_MODEL,
        ),
        tags=("infinity-former", "long-term-memory", "long-context"),
        citation=_MARTINS + _SOFTWARE,
    ),
    "memory_augmented": ModelText(
        about="A pretrained causal language model with a long-term memory attached to its layers (as in Martins et al. "
        "2021): beside its own attention it reads a continuous memory of everything before, constant in size.",
        config_fields=(
            "base_config.model_type",
            "num_hidden_layers",
            "hidden_size",
            "memory_config.memory_layers",
            "memory_config.segment_length",
            "memory_config.window_length",
            "memory_config.num_basis",
            "memory_config.memory_decay",
            "vocab_size",
        ),
        limits=(
            _REMEMBERS_SMOOTHED.replace("the short-term window", "the base model's own window"),
            "A memory cannot be unwritten: a cache is not shortened, so there is no assisted decoding.",
            _ANY_LANGUAGE_MODEL,
        ),
        tags=("infinity-former", "long-term-memory", "long-context"),
        citation=_MARTINS + _SOFTWARE,
    ),
}
