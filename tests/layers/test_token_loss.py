"""The loss of a head equals cross entropy of its logits, also when the head is wrapped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_longmem.layers.token_loss import head_cross_entropy


class Adapter(nn.Module):
    """What a low-rank adapter does: a base weight of its own name, and more."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.delta = nn.Linear(base.in_features, base.out_features, bias=False, dtype=base.weight.dtype)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.delta(x)


def hooked(base: nn.Linear) -> nn.Linear:
    base.register_forward_hook(lambda module, args, out: 2 * out)
    return base


@pytest.mark.parametrize("wrap", [lambda base: base, Adapter, hooked])
@pytest.mark.parametrize("num_items", [None, 5, torch.tensor(5)])
@pytest.mark.parametrize("chunk_size", [0, 3])
def test_loss_and_gradients_equal_cross_entropy(wrap: object, num_items: object, chunk_size: int) -> None:
    torch.manual_seed(0)
    head = wrap(nn.Linear(6, 11).double())
    hidden = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (2, 7))
    labels[1, 3:] = -100
    loss = head_cross_entropy(head, hidden, labels, chunk_size=chunk_size, num_items=num_items)
    summed = nn.functional.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
    expected = summed / (10 if num_items is None else num_items)
    torch.testing.assert_close(loss, expected)
    inputs = (hidden, *head.parameters())
    for ours, plain in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(ours, plain)


def test_hooks_of_a_head_are_called() -> None:
    head, calls = nn.Linear(4, 9), []
    head.register_full_backward_hook(lambda *_: calls.append("after"))
    head.register_full_backward_pre_hook(lambda *_: calls.append("before"))
    hidden = torch.randn(1, 3, 4, requires_grad=True)
    head_cross_entropy(head, hidden, torch.tensor([[1, 2, 3]]), chunk_size=0).backward()
    assert calls == ["before", "after"]


def test_no_label_to_predict_gives_zero() -> None:
    labels = torch.full((2, 3), -100)
    for head in (nn.Linear(4, 5), hooked(nn.Linear(4, 5))):
        assert head_cross_entropy(head, torch.randn(2, 3, 4), labels, chunk_size=2) == 0


@pytest.mark.parametrize("num_items", [0, torch.tensor(0)])
def test_no_item_in_the_whole_batch_gives_zero(num_items: object) -> None:
    labels = torch.full((2, 3), -100)
    for head in (nn.Linear(4, 5), hooked(nn.Linear(4, 5))):
        assert head_cross_entropy(head, torch.randn(2, 3, 4), labels, chunk_size=2, num_items=num_items) == 0
