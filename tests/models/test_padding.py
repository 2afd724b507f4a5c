"""The decorator moves padding behind the real tokens and puts every output back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_longmem.models.padding import compact_padding


class Echo:
    """Returns what it was given, as a model's outputs."""

    config = SimpleNamespace(return_dict=True)

    @compact_padding
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        self.seen = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        self.seen |= {"inputs_embeds": inputs_embeds}
        tokens = input_ids if input_ids is not None else inputs_embeds[..., 0]
        last = tokens.float()[..., None]
        pairs = (tokens[:, None, :, None] * 1000 + tokens[:, None, None, :]).float()
        return BaseModelOutputWithPast(
            last_hidden_state=last, hidden_states=(None, 2 * last, last), attentions=(pairs,)
        )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3), st.booleans())
def test_inside_real_tokens_come_first_and_outside_all_is_in_order(rows: list[list[bool]], embeds: bool) -> None:
    mask = torch.tensor(rows).long()
    ids = torch.arange(mask.numel()).view_as(mask) + 1
    positions = ids * 10
    model = Echo()
    given_tokens = {"inputs_embeds": ids[..., None].float()} if embeds else {"input_ids": ids}
    outputs = model.forward(attention_mask=mask, position_ids=positions, **given_tokens)
    assert torch.equal(outputs.last_hidden_state[..., 0], ids.float())
    assert outputs.hidden_states[0] is None
    assert torch.equal(outputs.hidden_states[1], 2 * outputs.last_hidden_state)
    assert outputs.hidden_states[2] is outputs.last_hidden_state
    assert torch.equal(outputs.attentions[0][:, 0], (ids[:, :, None] * 1000 + ids[:, None, :]).float())
    if mask.all():
        assert model.seen["attention_mask"] is None
        return
    inside = model.seen["attention_mask"]
    tokens = model.seen["inputs_embeds"][..., 0].long() if embeds else model.seen["input_ids"]
    assert torch.equal(model.seen["position_ids"], tokens * 10)
    for row in range(len(rows)):
        assert inside[row].tolist() == sorted(inside[row].tolist(), reverse=True)
        assert torch.equal(tokens[row][inside[row]], ids[row][mask[row].bool()])


def test_a_tuple_is_put_back_into_order_too() -> None:
    last, hidden, _ = Echo().forward(torch.tensor([[7, 8]]), attention_mask=torch.tensor([[0, 1]]), return_dict=False)
    assert last.flatten().tolist() == [7.0, 8.0]
    assert hidden[1].flatten().tolist() == [14.0, 16.0]


def test_one_row_of_positions_serves_all_rows() -> None:
    model = Echo()
    model.forward(
        torch.tensor([[7, 8], [9, 5]]),
        attention_mask=torch.tensor([[0, 1], [1, 1]]),
        position_ids=torch.tensor([[0, 1]]),
    )
    assert model.seen["position_ids"].tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("shape", "message"),
    [((1, 1, 3, 3), "two axes"), ((2, 3), "1 rows and 3 tokens"), ((1, 2), "must cover the input's 1 rows")],
)
def test_masks_of_another_shape_are_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Echo().forward(torch.tensor([[1, 2, 3]]), attention_mask=torch.ones(shape))


@pytest.mark.parametrize("shape", [(3,), (1, 1), (1, 2), (2, 3), (1, 3, 1)])
@pytest.mark.parametrize("mask", [None, torch.tensor([[0, 1, 1]])])
def test_positions_of_another_shape_are_refused(shape: tuple[int, ...], mask: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match=r"position_ids must be \[1, 3\] or \[1, 3\], as the input is, got shape"):
        Echo().forward(torch.tensor([[1, 2, 3]]), attention_mask=mask, position_ids=torch.zeros(shape).long())
