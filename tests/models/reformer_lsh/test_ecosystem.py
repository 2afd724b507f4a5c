"""What others do to a model: adapters, compilers, exporters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_longmem import ReformerLSHForCausalLM

Make = Callable[..., Any]


@pytest.mark.parametrize("head", [False, True])
def test_low_rank_adapters_train_as_under_plain_autograd(causal_lm: Make, tokens: Make, head: bool) -> None:
    peft = pytest.importorskip("peft")
    ids = tokens(2, 80)
    targets = ["qk_proj", "q_proj", "k_proj", "v_proj", "o_proj"] + ["lm_head"] * head
    gradients = []
    for reversible in (True, False):
        model = causal_lm(reversible=reversible, hidden_dropout_prob=0.1).double()
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.1, init_lora_weights=False)
        adapted = peft.get_peft_model(model, config).train()
        torch.manual_seed(2)
        adapted(input_ids=ids, labels=ids).loss.backward()
        trainable = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
        assert len(trainable) == 2 * (4 + 3 + 3 + head)
        for name, parameter in trainable.items():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name
        assert all(p.grad is None for p in adapted.parameters() if not p.requires_grad)
        gradients.append([p.grad for p in trainable.values()])
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-9, rtol=1e-9)


KINDS = [
    {},
    {"position_embedding_type": "rotary", "lsh_candidates": "chunk", "round_merge": "sum", "num_buckets": [2, 2]},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [False, True])
def test_an_evaluation_step_compiles_without_a_graph_break(
    causal_lm: Make, tokens: Make, kind: dict[str, Any], padded: bool
) -> None:
    model: ReformerLSHForCausalLM = causal_lm(attn_layers=("local", "lsh"), **kind)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = tokens(2, 50)
    mask = {"attention_mask": (torch.arange(50) >= torch.tensor([[9], [0]])).long()} if padded else {}
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, **mask).logits, model(ids, **mask).logits, atol=1e-5, rtol=1e-5)


def test_a_training_step_compiles_and_has_the_gradients_of_the_eager_one(causal_lm: Make, tokens: Make) -> None:
    model = causal_lm(attn_layers=("local", "lsh"), hidden_dropout_prob=0, local_attention_probs_dropout_prob=0)
    ids = tokens(2, 50)
    gradients = []
    torch._dynamo.reset()
    for step in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        step.train()(ids, labels=ids, hash_seed=0).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for eager, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_inference_exports(causal_lm: Make, tokens: Make, kind: dict[str, Any]) -> None:
    model = causal_lm(attn_layers=("local", "lsh"), **kind)
    ids, other = tokens(2, 50), tokens(2, 50, seed=2)
    mask = (torch.arange(50) >= torch.tensor([[9], [0]])).long()
    exported = torch.export.export(model, (ids,), {"attention_mask": mask}).module()
    for given in (ids, other):
        ours = exported(given, attention_mask=mask).logits
        torch.testing.assert_close(ours, model(given, attention_mask=mask).logits, atol=1e-5, rtol=1e-5)
