"""With the published rules, the same weights and the same rotations: the numbers of transformers' own Reformer.

Rotations are made equal on one side only: transformers draws those of each layer from ``torch.manual_seed(hash_seed)``,
and here our seeded ones are replaced by the same draw. Everything else runs as it is on both sides. Most comparisons
are in float64, where a wrong rule cannot hide behind rounding and rounding does not move a vector to another bucket.

Not compared, because transformers is wrong there: gradients with dropout; local attention whose window wraps round the
end of the input. Bidirectional, the first chunk sees the last (an input that ends in a chunk of padding has nothing to
wrap to); causal, with two chunks and ``local_num_chunks_before=2`` the second chunk meets its own keys twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hf_longmem
from hf_longmem.models.reformer_lsh.reformer_checkpoints import ARCHITECTURES, weights_from_reformer

REFORMER: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "attention_head_size": 12,
    "feed_forward_size": 48,
    "attn_layers": ["local", "lsh", "lsh"],
    "lsh_attn_chunk_length": 16,
    "local_attn_chunk_length": 16,
    "num_hashes": 2,
    "num_buckets": 6,
    "hash_seed": 7,
    "axial_pos_shape": [8, 16],
    "axial_pos_embds_dim": [8, 24],
    "max_position_embeddings": 128,
    "hidden_dropout_prob": 0.0,
    "lsh_attention_probs_dropout_prob": 0.0,
    "local_attention_probs_dropout_prob": 0.0,
    "is_decoder": True,
}
ENWIK8_LIKE = {
    "attn_layers": ["local", "local", "lsh", "local"],
    "local_attn_chunk_length": 8,
    "num_hashes": 4,
    "num_buckets": 8,
}
KINDS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "local": {"attn_layers": ["local", "local"], "local_num_chunks_before": 2},
    "lsh": {"attn_layers": ["lsh", "lsh"], "num_hashes": 1},
    "enwik8": ENWIK8_LIKE,
    "crime and punishment": {"attn_layers": ["local", "lsh"] * 2, "num_hashes": 1, "num_buckets": [4, 6]},
    "common multiple 32": {
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 32,
        "num_buckets": [2, 4],
        "num_hashes": 3,
    },
    "common multiple 64": {"local_attn_chunk_length": 64, "lsh_num_chunks_before": 2},
    "common multiple 24": {
        "lsh_attn_chunk_length": 12,
        "local_attn_chunk_length": 8,
        "axial_pos_shape": [9, 16],
        "max_position_embeddings": 144,
    },
    "no neighbours": {"lsh_num_chunks_before": 0, "local_num_chunks_before": 0},
    "learned": {"axial_pos_embds": False, "hidden_act": "gelu", "layer_norm_eps": 1e-3},
}
LENGTHS = (1, 7, 8, 9, 16, 17, 24, 25, 31, 32, 47, 48, 63, 65, 90, 128)
Pair = Callable[..., tuple[Any, Any]]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Make transformers' model of a class, and ours loaded from what it saved and given the same rotations."""

    def make(
        name: str, *, dtype: torch.dtype = torch.float64, our_dtype: torch.dtype | None = None, **overrides: Any
    ) -> tuple[Any, Any]:
        def rotations(seed: int, layer: int, *sizes: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
            num_heads, head_dim, num_hashes, num_buckets = sizes
            columns = (num_buckets if isinstance(num_buckets, int) else sum(num_buckets)) // 2
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randn(num_heads, head_dim, num_hashes, columns, generator=generator, dtype=their_dtype)
            return drawn.to(dtype)

        their_dtype = dtype
        monkeypatch.setattr("hf_longmem.layers.lsh_attention.seeded_rotations", rotations)
        theirs = getattr(transformers, name)(transformers.ReformerConfig(**(REFORMER | overrides)))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.normal_(std=0.3, generator=generator)
        theirs.save_pretrained(tmp_path)
        ours = getattr(hf_longmem, ARCHITECTURES[name]).from_pretrained(tmp_path)
        assert ours.config.hash_seed == theirs.config.hash_seed
        return theirs.to(dtype).eval(), ours.to(our_dtype or dtype).eval()

    return make


def draw(batch: int, length: int) -> Tensor:
    return torch.randint(2, REFORMER["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(length))


def right_padding(length: int, *real: int) -> Tensor:
    return (torch.arange(length) < torch.tensor(real)[:, None]).long()


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_causal_logits_are_equal_at_every_length(pair: Pair, kind: str) -> None:
    theirs, ours = pair("ReformerModelWithLMHead", **KINDS[kind])
    for length in LENGTHS if kind != "local" else (1, 16, 33, 48, 65, 128):
        ids = draw(2, length)
        close(ours(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("kind", ["local", "lsh", "crime and punishment"])
@torch.no_grad()
def test_logits_are_equal_in_single_precision(pair: Pair, kind: str) -> None:
    theirs, ours = pair("ReformerModelWithLMHead", dtype=torch.float32, **KINDS[kind])
    ids = draw(2, 100)
    close(ours(ids).logits, theirs(ids).logits, 1e-4)


@pytest.mark.parametrize("kind", ["mixed", "enwik8"])
@torch.no_grad()
def test_single_precision_gives_what_transformers_gives_in_double(pair: Pair, kind: str) -> None:
    # In single precision theirs is off by 1e-3 with several hashes where a token sees only itself: weights of rounds
    # are then differences of numbers near -1e5.
    theirs, ours = pair("ReformerModelWithLMHead", our_dtype=torch.float32, **KINDS[kind])
    ids = draw(2, 100)
    close(ours(ids).logits, theirs(ids).logits.float(), 1e-4)


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_hidden_states_are_equal(pair: Pair, causal: bool) -> None:
    theirs, ours = pair(
        "ReformerModel", attn_layers=["lsh", "lsh"], is_decoder=causal, lsh_num_chunks_after=int(not causal)
    )
    ids = draw(2, 64)
    expected, outputs = (model(ids, output_hidden_states=True) for model in (theirs, ours))
    close(outputs.last_hidden_state, expected.last_hidden_state)
    # Both begin with the embeddings and go on with the second stream. Theirs end with that stream, ours with
    # last_hidden_state, as everywhere else in transformers.
    assert len(outputs.hidden_states) == len(expected.hidden_states) == 3
    for ours_, theirs_ in zip(outputs.hidden_states[:-1], expected.hidden_states[:-1], strict=True):
        close(ours_, theirs_)


@pytest.mark.parametrize("kind", ["mixed", "enwik8", "common multiple 32"])
@torch.no_grad()
def test_right_padding_at_one_length_is_equal(pair: Pair, kind: str) -> None:
    theirs, ours = pair("ReformerModelWithLMHead", **KINDS[kind])
    for length in (96, 100):
        ids, mask = draw(3, length), right_padding(length, length, 70, 5)
        real = mask.bool()
        close(ours(ids, attention_mask=mask).logits[real], theirs(ids, attention_mask=mask).logits[real])


@pytest.mark.parametrize("kind", ["mixed", "enwik8", "crime and punishment", "common multiple 24"])
@torch.no_grad()
def test_masked_logits_are_equal_where_nothing_wraps_round(pair: Pair, kind: str) -> None:
    ahead = {"lsh_num_chunks_after": 1, "local_num_chunks_after": 1}
    theirs, ours = pair("ReformerForMaskedLM", **(KINDS[kind] | ahead | {"is_decoder": False}))
    ids, mask = draw(3, 96), right_padding(96, 80, 70, 5)
    real = mask.bool()
    close(ours(ids, attention_mask=mask).logits[real], theirs(ids, attention_mask=mask).logits[real])


@pytest.mark.parametrize("kind", ["lsh", "mixed"])
@torch.no_grad()
def test_bidirectional_windows_that_do_not_look_back_are_equal_everywhere(pair: Pair, kind: str) -> None:
    reach = {"local_num_chunks_before": 0, "lsh_num_chunks_after": 1, "is_decoder": False}
    theirs, ours = pair("ReformerForMaskedLM", **(KINDS[kind] | reach))
    for length in (5, 16, 40, 128):
        ids = draw(2, length)
        close(ours(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_class_scores_are_equal(pair: Pair, causal: bool) -> None:
    theirs, ours = pair("ReformerForSequenceClassification", num_labels=3, is_decoder=causal, classifier_dropout=0.5)
    assert (ours.config.num_labels, ours.config.classifier_dropout) == (3, 0.5)
    ids, mask = draw(3, 96), right_padding(96, 80, 70, 5)
    labels = torch.tensor([0, 2, 1])
    expected, outputs = (model(ids, attention_mask=mask, labels=labels) for model in (theirs, ours))
    close(outputs.logits, expected.logits)
    close(outputs.loss, expected.loss)


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_answer_scores_are_equal(pair: Pair, causal: bool) -> None:
    theirs, ours = pair("ReformerForQuestionAnswering", is_decoder=causal)
    ids, mask = draw(3, 96), right_padding(96, 80, 70, 5)
    real, labels = mask.bool(), {"start_positions": torch.tensor([0, 7, 2]), "end_positions": torch.tensor([3, 60, 4])}
    expected, outputs = (model(ids, attention_mask=mask) for model in (theirs, ours))
    close(outputs.start_logits[real], expected.start_logits[real])
    close(outputs.end_logits[real], expected.end_logits[real])
    full = draw(2, 96)
    if causal:
        labels = {name: value[:2] for name, value in labels.items()}
        close(ours(full, **labels).loss, theirs(full, **labels).loss)


def gradients_of(model: nn.Module, outputs: Tensor, real: Tensor) -> dict[str, Tensor]:
    weight = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (outputs * weight.to(outputs.dtype))[real].sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        *[("ReformerModelWithLMHead", KINDS[kind]) for kind in KINDS if kind != "common multiple 24"],
        ("ReformerForMaskedLM", {"is_decoder": False, "lsh_num_chunks_after": 1, "local_num_chunks_after": 1}),
        ("ReformerForQuestionAnswering", {"is_decoder": False}),
        ("ReformerForSequenceClassification", ENWIK8_LIKE | {"is_decoder": False}),
        ("ReformerModel", {"attn_layers": ["lsh", "local"]}),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_are_equal(pair: Pair, name: str, overrides: dict[str, Any], padded: bool) -> None:
    theirs, ours = pair(name, **overrides)
    # transformers trains at no other length than that of its axial grid.
    ids, mask = draw(2, 128), right_padding(128, 100 if padded else 128, 60 if padded else 128)
    if not theirs.config.is_decoder:
        mask[:, -16:] = 0
    inputs = {"attention_mask": mask} if padded or not theirs.config.is_decoder else {}
    real = slice(None) if name == "ReformerForSequenceClassification" else mask.bool()
    expected = gradients_of(theirs, theirs.train()(ids, **inputs)[0], real)
    gradients = gradients_of(ours, ours.train()(ids, hash_seed=REFORMER["hash_seed"], **inputs)[0], real)
    # The one parameter of theirs that nothing uses.
    assert "lm_head.bias" not in expected
    bare = {key.removeprefix("model."): gradient for key, gradient in weights_from_reformer(expected).items()}
    assert bare.keys() == {key.removeprefix("model.") for key in gradients}
    assert len(gradients) == len(list(ours.parameters()))
    for key, gradient in gradients.items():
        assert gradient.abs().max() > 0, key
        close(gradient, bare[key.removeprefix("model.")], 1e-8)


def test_gradients_are_equal_in_single_precision(pair: Pair) -> None:
    theirs, ours = pair("ReformerModelWithLMHead", our_dtype=torch.float32, **ENWIK8_LIKE)
    ids, real = draw(2, 128), torch.ones(2, 128, dtype=torch.bool)
    expected = weights_from_reformer(gradients_of(theirs, theirs.train()(ids).logits, real))
    gradients = gradients_of(ours, ours.train()(ids, hash_seed=REFORMER["hash_seed"]).logits, real)
    for key, gradient in gradients.items():
        error = (gradient - expected[key]).norm() / expected[key].norm()
        assert error < 1e-4, key


@torch.no_grad()
def test_another_rotation_gives_other_numbers(pair: Pair) -> None:
    theirs, ours = pair("ReformerModelWithLMHead", num_hashes=1)
    ids = draw(2, 128)
    difference = (ours(ids, hash_seed=8).logits - theirs(ids).logits).abs().max()
    assert difference > 1e-2


@torch.no_grad()
def test_fewer_hashes_than_configured_are_equal(pair: Pair) -> None:
    theirs, ours = pair("ReformerModelWithLMHead", num_hashes=4)
    ids = draw(2, 100)
    close(ours(ids, num_hashes=2).logits, theirs(ids, num_hashes=2).logits)
