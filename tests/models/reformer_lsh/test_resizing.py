"""A checkpoint's positions can be cut and grown: the rows that both have stay, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from hf_longmem import ReformerLSHConfig, ReformerLSHForCausalLM, ReformerLSHModel

Make = Callable[..., Any]
AXIAL = {"axial_pos_shape": [4, 4, 8], "axial_pos_embds_dim": [8, 8, 16], "max_position_embeddings": 128}
LEARNED = {"position_embedding_type": "learned", "max_position_embeddings": 128}


def table(model: Any, rows: int) -> torch.Tensor:
    return model.base_model.position_embeddings(torch.arange(rows)[None])[0]


@pytest.mark.parametrize(
    ("saved", "wanted", "positions"),
    [
        (AXIAL, {"axial_pos_shape": [9, 4, 8]}, 288),
        (AXIAL, {"axial_pos_shape": [2, 4, 8], "max_position_embeddings": 60}, 64),
        (LEARNED, {"max_position_embeddings": 300}, 300),
        (LEARNED, {"max_position_embeddings": 50}, 50),
    ],
)
@pytest.mark.parametrize("auto", [AutoModelForCausalLM, ReformerLSHForCausalLM, ReformerLSHModel, AutoModel])
def test_loading_with_other_positions_keeps_the_first_rows(
    causal_lm: Make, tokens: Make, tmp_path: Path, auto: Any, saved: dict, wanted: dict, positions: int
) -> None:
    model = causal_lm(**saved)
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path, **wanted).eval()
    both = min(positions, 128)
    assert torch.equal(table(loaded, both), table(model, both))
    assert loaded.config.num_positions == positions
    assert loaded.config.max_position_embeddings == wanted.get("max_position_embeddings", 128)
    ids = tokens(2, both)
    assert torch.equal(loaded.base_model(ids).last_hidden_state, model.model(ids).last_hidden_state)
    with pytest.raises(ValueError, match=f"from 1 to {positions} tokens"):
        loaded(tokens(1, positions + 1))
    if positions > 128:
        new_rows = table(loaded, positions)[128:]
        assert torch.isfinite(new_rows).all()
        assert new_rows.std() > 0
        loaded(tokens(1, positions))


def test_a_resized_model_saves_and_trains(causal_lm: Make, tokens: Make, tmp_path: Path) -> None:
    model = causal_lm(**AXIAL)
    model.resize_position_embeddings(200)
    assert model.config.axial_pos_shape == (7, 4, 8)
    ids = tokens(2, 224)
    model.train()(ids, labels=ids).loss.backward()
    assert model.model.position_embeddings.weights[0].grad.shape == (7, 1, 1, 8)
    model.eval().save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, model(ids).logits)


def test_a_config_object_is_honoured_and_left_alone(causal_lm: Make, tmp_path: Path) -> None:
    model = causal_lm(**LEARNED)
    model.save_pretrained(tmp_path)
    config = ReformerLSHConfig.from_pretrained(tmp_path, max_position_embeddings=64)
    before = config.to_dict()
    loaded, report = ReformerLSHForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    assert loaded.config.num_positions == 64
    assert config.to_dict() == before


def test_rotary_models_have_a_limit_only(causal_lm: Make, tokens: Make, tmp_path: Path) -> None:
    causal_lm(position_embedding_type="rotary", max_position_embeddings=64).save_pretrained(tmp_path)
    loaded = ReformerLSHForCausalLM.from_pretrained(tmp_path, max_position_embeddings=100)
    assert loaded(tokens(1, 100)).logits.shape == (1, 100, 60)
    loaded.resize_position_embeddings(101)
    assert loaded(tokens(1, 101)).logits.shape == (1, 101, 60)


def test_axes_that_would_move_every_row_are_refused(causal_lm: Make, tmp_path: Path) -> None:
    model = causal_lm(**AXIAL)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"only the first axis .* \[4, 4, 8\], got \[4, 8, 8\]; change that one"):
        ReformerLSHForCausalLM.from_pretrained(tmp_path, axial_pos_shape=[4, 8, 8])
    with pytest.raises(ValueError, match="at least 1 position, got 0"):
        model.resize_position_embeddings(0)


@pytest.mark.parametrize("wanted", ["axial", "learned", "rotary"])
@pytest.mark.parametrize("saved", [AXIAL, LEARNED, {"position_embedding_type": "rotary"}])
def test_another_kind_of_positions_begins_anew(
    causal_lm: Make, tmp_path: Path, saved: dict[str, Any], wanted: str
) -> None:
    model = causal_lm(**saved)
    model.save_pretrained(tmp_path)
    loaded = ReformerLSHForCausalLM.from_pretrained(tmp_path, position_embedding_type=wanted)
    assert loaded.config.position_embedding_type == wanted
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert torch.isfinite(loaded(torch.arange(2, 12)[None]).logits).all()
