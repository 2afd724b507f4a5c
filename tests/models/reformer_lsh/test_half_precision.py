"""Streams are float32 whatever the compute dtype, so half precision trains and reverses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_longmem import ReformerLSHForCausalLM

Make = Callable[..., Any]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_with_float32_streams(causal_lm: Make, tokens: Make, dtype: torch.dtype) -> None:
    model: ReformerLSHForCausalLM = causal_lm().train()
    streams: list[torch.dtype] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, args, out: streams.extend(x.dtype for x in (*args[:2], *out)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids = tokens(2, 100)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = model(ids, labels=ids).loss
        loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert set(streams) == {torch.float32}
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_has_exact_reversible_gradients(
    causal_lm: Make, tokens: Make, dtype: torch.dtype
) -> None:
    ids = tokens(2, 100)
    gradients = []
    for reversible in (True, False):
        model = causal_lm(reversible=reversible, hidden_dropout_prob=0.1).to(dtype).train()
        torch.manual_seed(3)
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.float() for p in model.parameters()])
    for ours, plain in zip(*gradients, strict=True):
        assert (ours - plain).norm() <= 0.02 * plain.norm() + 1e-6
