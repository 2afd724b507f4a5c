"""No family has a static cache, and asking for one says so before anything is computed."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, causal_lm
from transformers import StaticCache


@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_cache_is_refused_in_plain_words(family: str) -> None:
    model, ids = causal_lm(family).eval(), torch.randint(2, 40, (1, 12))
    for make in (
        lambda: model.generate(ids, max_new_tokens=3, cache_implementation="static"),
        lambda: model.generate(ids, max_new_tokens=3, cache_implementation="offloaded_static"),
        lambda: StaticCache(config=model.config, max_cache_len=100),
    ):
        with pytest.raises(ValueError, match="got a static cache; leave cache_implementation out"):
            make()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["dynamic", "offloaded"])
def test_the_other_kinds_generate_the_same(family: str, kind: str) -> None:
    model, ids = causal_lm(family).eval(), torch.randint(2, 40, (2, 12))
    expected = model.generate(ids, max_new_tokens=20, eos_token_id=None)
    found = model.generate(ids, max_new_tokens=20, eos_token_id=None, cache_implementation=kind)
    assert torch.equal(found, expected)
