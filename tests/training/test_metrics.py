"""Streaming perplexity: every token but the first once, whatever the pieces."""

from __future__ import annotations

import math

import pytest
import torch

from hf_longmem import (
    InfiniteFormerCache,
    InfiniteFormerConfig,
    InfiniteFormerForCausalLM,
    ReformerLSHConfig,
    ReformerLSHForCausalLM,
    streaming_perplexity,
)

SIZES = {"vocab_size": 60, "hidden_size": 16, "num_attention_heads": 2}


def infinite_former() -> InfiniteFormerForCausalLM:
    torch.manual_seed(0)
    config = InfiniteFormerConfig(
        **SIZES, num_hidden_layers=2, segment_length=16, num_basis=16, basis_widths=(0.05, 0.1), initializer_range=0.2
    )
    return InfiniteFormerForCausalLM(config)


def reformer() -> ReformerLSHForCausalLM:
    torch.manual_seed(0)
    return ReformerLSHForCausalLM(ReformerLSHConfig(**SIZES, attn_layers=("local", "lsh"), num_buckets=4))


@pytest.mark.parametrize("make", [infinite_former, reformer])
@pytest.mark.parametrize("piece_length", [1, 7, 16, 1024])
def test_it_is_the_loss_of_the_whole_document(make: type, piece_length: int) -> None:
    model = make()
    tokens = torch.randint(2, 60, (90,), generator=torch.Generator().manual_seed(1))
    model.eval()
    loss = model(tokens[None], labels=tokens[None]).loss.item()
    model.train()
    ids = tokens.tolist()
    for document in (tokens, tokens[None], ids, [ids], [tokens], iter(ids), tokens.numpy(), tokens[None].numpy()):
        result = streaming_perplexity(model, document, piece_length=piece_length, progress=False)
        assert result.num_tokens == 89
        assert math.isclose(result.mean_nll, loss, rel_tol=1e-5)
        assert math.isclose(result.perplexity, math.exp(loss), rel_tol=1e-5)
    assert model.training


def test_it_leaves_every_module_in_its_mode_and_reports_nan() -> None:
    model = infinite_former().train()
    frozen = model.model.layers[0].eval()
    streaming_perplexity(model, torch.arange(2, 50), progress=False)
    assert model.training
    assert not any(module.training for module in frozen.modules())
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    assert math.isnan(streaming_perplexity(model, torch.arange(2, 50), progress=False).perplexity)


def test_what_cannot_be_scored_is_refused() -> None:
    model = infinite_former()
    with pytest.raises(ValueError, match="one document"):
        streaming_perplexity(model, torch.ones(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="at least two tokens"):
        streaming_perplexity(model, [3], progress=False)
    with pytest.raises(ValueError, match="at least two tokens"):
        streaming_perplexity(model, torch.ones(0, dtype=torch.long), progress=False)
    for document in ([[3, 4], [5, 6]], torch.ones(5).numpy(), [3.5, 4.5]):
        with pytest.raises(ValueError, match="scores the token ids of one document"):
            streaming_perplexity(model, document, progress=False)
    cache = InfiniteFormerCache(model.config)
    streaming_perplexity(model, torch.arange(2, 50), progress=False, cache=cache)
    for one in (torch.tensor([3]), iter([3])):
        with pytest.raises(ValueError, match="at least two tokens to be scored, got 1"):
            streaming_perplexity(model, one, progress=False, cache=cache)
    assert cache.get_seq_length() == 48
    with pytest.raises(ValueError, match="piece_length must be at least 1, got 0"):
        streaming_perplexity(model, [3, 4], piece_length=0)


def test_it_shows_progress_when_asked(capfd: pytest.CaptureFixture[str]) -> None:
    streaming_perplexity(infinite_former(), torch.arange(2, 50), piece_length=10)
    assert "48/48" in capfd.readouterr().err
