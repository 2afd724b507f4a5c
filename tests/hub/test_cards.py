"""Model cards: valid metadata, every section, no number that was not measured."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from local_hub import card_problems
from tiny_models import causal_lm
from transformers import AutoModelForCausalLM, BertConfig, TrainingArguments

from hf_longmem import InfiniteFormerConfig, MemoryAugmentedConfig, ReformerLSHConfig, ReformerLSHForMaskedLM
from hf_longmem.cli.main import main
from hf_longmem.hub.card_texts import TEXTS
from hf_longmem.hub.cards import CardFacts, model_card, render_recipe, write_card
from hf_longmem.hub.training_card import _without_secrets
from hf_longmem.models.auto import MODEL_TYPES

RECIPES = sorted((Path(__file__).parents[2] / "model_cards").glob("*.json"))
CONFIGS = [ReformerLSHConfig(), InfiniteFormerConfig(), MemoryAugmentedConfig()]
SECTIONS = ["How to load it", "Data", "Training", "Results", "Memory and speed", "Limits", "Citation"]
FULL = CardFacts(
    name="my-model",
    path="user/my-model",
    notes="A note | with a pipe.",
    num_parameters=1_234_567,
    data="Some text.\nMore about it.",
    datasets=("wikitext",),
    language="en",
    license="apache-2.0",
    base_model="user/base",
    command="longmem train --text book.txt",
    unit="byte",
    training=TrainingArguments("unused", learning_rate=3e-3, max_steps=7, seed=5),
    metrics={"bits_before": 8.1, "bits": 2.75, "peak_memory": 2.0**31, "tokens_per_second": 21500.4, "own_score": 0.5},
    date="2026-11-29",
    machine="a machine",
    versions="torch 2",
)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
@pytest.mark.parametrize("facts", [FULL, CardFacts("bare", tokenizer=False)], ids=lambda facts: facts.name)
def test_a_card_is_valid_and_has_every_section(config: Any, facts: CardFacts) -> None:
    text = str(model_card(config, facts))
    assert card_problems(text) == []
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == SECTIONS
    assert f"# {facts.name}\n" in text
    assert "trust_remote_code=True" in text
    assert "import hf_longmem" in text
    assert "{{" not in text
    assert "None" not in text.replace("None measured.", "")
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        compile(block, "card", "exec")


def test_everything_known_is_told() -> None:
    card = model_card(ReformerLSHConfig(architectures=["ReformerLSHForCausalLM"]), FULL)
    text = str(card)
    for told in (
        "1,234,567",
        "longmem train --text book.txt",
        "| `learning_rate` | 0.003 |",
        "| `max_steps` | 7 |",
        "| held-out bits per byte | 2.750 |",
        "| held-out bits per byte, before training | 8.100 |",
        "| own score | 0.5 |",
        "| peak memory of the process | 2.00 GiB |",
        "| training, tokens per second | 21,500 |",
        "Measured by `longmem train --text book.txt`, 2026-11-29, torch 2.",
        "Machine: a machine.",
        'from_pretrained("user/my-model")',
        "kitaev2020reformer",
    ):
        assert told in text
    data = card.data
    assert (data.license, data.language, data.pipeline_tag) == ("apache-2.0", "en", "text-generation")
    assert data.base_model == "user/base"
    assert data.datasets == ["wikitext"]
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("bits_per_byte", 2.75, "wikitext")


def test_a_bare_card_invents_nothing() -> None:
    card = model_card(InfiniteFormerConfig(), CardFacts("bare", tokenizer=False))
    text = str(card)
    assert "None measured." in text
    assert "Not measured." in text
    assert text.count("Not stated.") == 2
    assert "AutoTokenizer" not in text
    assert card.data.eval_results is None
    assert card.data.license is None


def test_the_card_of_another_head_names_its_class_and_task(tmp_path: Path) -> None:
    config = ReformerLSHConfig(
        hidden_size=16, num_attention_heads=2, attn_layers=["local"], is_decoder=False, max_position_embeddings=64
    )
    ReformerLSHForMaskedLM(config).save_pretrained(tmp_path)
    text = write_card(tmp_path).read_text()
    assert "AutoModelForMaskedLM.from_pretrained" in text
    assert "pipeline_tag: fill-mask" in text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "2.7", None])
def test_a_metric_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"metric bits must be a finite number, got .*; leave it out"):
        model_card(CONFIGS[0], CardFacts("name", metrics={"bits": value}))


def test_another_packages_model_is_refused() -> None:
    with pytest.raises(ValueError, match="describes models of this package"):
        model_card(BertConfig(), CardFacts("bert"))


def test_every_architecture_has_its_text() -> None:
    assert {config.model_type for config in CONFIGS} == set(MODEL_TYPES) == set(TEXTS)
    for config in CONFIGS:
        shown = re.findall(r"^\| `([\w.]+)` \|", str(model_card(config, CardFacts("bare"))), flags=re.MULTILINE)
        assert shown == list(TEXTS[config.model_type].config_fields)
    for text in TEXTS.values():
        assert text.limits
        assert "@" in text.citation


def test_a_training_run_writes_its_card_without_its_token(tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("Once upon a time there was a text.\n" * 60)
    output = tmp_path / "out"
    arguments = ["--text", str(text), "--output_dir", str(output), "--sequence_length", "64", "--hidden_size", "16"]
    more = [
        "--max_train_samples",
        "2",
        "--max_new_tokens",
        "0",
        "--hub_token",
        "hf_secret",
        "--held_out_fraction",
        "0.2",
    ]
    assert main(["train", *arguments, *more]) == 0
    card = (output / "README.md").read_text()
    assert card_problems(card) == []
    assert "hf_secret" not in card
    assert "book.txt" in card
    results = json.loads((output / "all_results.json").read_text())
    assert f"| held-out bits per byte | {results['bits']:.3f} |" in card
    assert f"| training, tokens per second | {results['tokens_per_second']:,.0f} |" in card


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--hub_token", "hf_x", "--seed", "1"], ["--hub_token", "...", "--seed", "1"]),
        (["--hub_token=hf_x"], ["--hub_token=..."]),
        (["--hub-token", "hf_x"], ["--hub-token", "..."]),
        (["--tokenizer_name", "x"], ["--tokenizer_name", "x"]),
    ],
)
def test_a_token_on_the_command_line_stays_out(given: list[str], kept: list[str]) -> None:
    assert _without_secrets(given) == kept


def test_a_damaged_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    causal_lm("infinite_former").save_pretrained(tmp_path)
    for name, content, words in (
        ("all_results.json", "[1]", "must hold numbers by name"),
        ("model.safetensors", "cut", "must be whole"),
        ("config.json", '{"model_type": "infinite_former", "hidden_size": "x"}', "expected int"),
    ):
        (tmp_path / name).write_text(content)
        assert main(["card", str(tmp_path)]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("longmem card: error: ")
        assert words in error
        if name == "all_results.json":
            (tmp_path / name).unlink()


def test_results_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    causal_lm("infinite_former").save_pretrained(tmp_path)
    (tmp_path / "all_results.json").write_text('{"eval_loss": NaN, "bits": null, "train_loss": 2.5}')
    card = write_card(tmp_path).read_text()
    assert "2.5000" in card
    assert "| nan |" not in card


def test_a_name_with_quotes_is_still_a_program() -> None:
    name = 'it\'s "mine"\\'
    card = model_card(InfiniteFormerConfig(), CardFacts(name=name)).text
    programs = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(programs) == 2
    for program in programs:
        strings = {node.value for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Constant)}
        assert name in strings


def test_the_command_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    causal_lm("infinite_former").save_pretrained(folder)
    (folder / "all_results.json").write_text('{"eval_loss": 1.25, "epoch": 1.0}')
    assert main(["card", str(folder)]) == 0
    card = (folder / "README.md").read_text()
    assert "# model\n" in card
    assert "1.2500" in card
    parameters = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    assert f"| parameters | {parameters:,} |" in card
    assert main(["card", str(folder)]) == 2
    assert "must not exist yet" in capsys.readouterr().err
    (folder / "README.md").write_text("mine")
    assert main(["card", "--overwrite", str(folder)]) == 0
    assert (folder / "README.md").read_text() == card

    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"name": "r", "config": {"model_type": "reformer_lsh"}}))
    assert main(["card", "--check", str(recipe)]) == 1
    assert main(["card", str(recipe)]) == 0
    assert (tmp_path / "recipe.md").read_text() == render_recipe(recipe)
    assert main(["card", "--check", str(recipe)]) == 0
    recipe.write_text(json.dumps({"name": "renamed", "config": {"model_type": "reformer_lsh"}}))
    assert main(["card", "--check", str(recipe)]) == 1
    assert f"{tmp_path / 'recipe.md'} too, got other text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "Expecting value"),
        ("[]", "must hold a config and a name"),
        ('{"name": "a"}', "must hold a config and a name"),
        ('{"name": "a", "config": {}}', "model_type"),
        ('{"name": "a", "config": {"model_type": "bert"}}', "model_type"),
        ('{"name": "a", "config": {"model_type": "reformer_lsh"}, "result": 1}', "got result; leave it out"),
        ('{"name": "a", "config": {"model_type": "reformer_lsh", "num_buckets": 3}}', "num_buckets must be even"),
        ('{"name": "a", "config": {"model_type": "reformer_lsh", "hidden_size": "x"}}', "expected int"),
        ('{"name": "a", "config": {"model_type": "reformer_lsh"}, "metrics": {"bits": NaN}}', "finite"),
        ('{"name": "a", "config": {"model_type": "reformer_lsh"}, "metrics": {"bits": 1' + "0" * 400 + "}}", "finite"),
        ('{"name": "a", "config": {"model_type": "reformer_lsh"}, "metrics": [1]}', "numbers by name"),
    ],
)
def test_a_wrong_recipe_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text(content)
    assert main(["card", str(recipe)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
    assert main(["card", str(tmp_path / "nothing.json")]) == 2


def test_there_is_a_recipe_of_each_kind() -> None:
    types = {json.loads(recipe.read_text())["config"]["model_type"] for recipe in RECIPES}
    assert {"reformer_lsh", "infinite_former"} <= types
    assert {recipe.stem for recipe in RECIPES} >= {"reformer-lsh-demo", "infinite-former-demo", "reformer-enwik8"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_the_cards_in_the_repository_are_fresh_and_valid(recipe: Path) -> None:
    card = recipe.with_suffix(".md").read_text(encoding="utf-8")
    assert card == render_recipe(recipe), "run longmem card model_cards/*.json"
    assert card_problems(card) == []
    content = json.loads(recipe.read_text())
    assert not content.get("metrics") or (content["command"] and content["date"] and content["machine"])
    if "num_parameters" in content:
        from transformers import AutoConfig

        settings = dict(content["config"])
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
        assert model.num_parameters() == content["num_parameters"]


def test_every_card_has_a_recipe() -> None:
    folder = Path(__file__).parents[2] / "model_cards"
    cards = {card.stem for card in folder.glob("*.md") if card.name != "README.md"}
    assert cards == {recipe.stem for recipe in RECIPES}
