"""Pushing and pulling, with a hub that the tests start on localhost; each program is a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_hub import LocalHub, card_problems
from programs import call

PROGRAMS = Path(__file__).parent / "hub_programs.py"
FAMILIES = ("reformer_lsh", "infinite_former")
TOKENIZERS = {"reformer_lsh": "ReformerLSHByteTokenizer", "infinite_former": "ByT5Tokenizer"}
WAYS = ("pushed", "saved", "trained", "bundled")


@pytest.fixture(scope="module")
def hub() -> Iterator[LocalHub]:
    with LocalHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def shared(hub: LocalHub, work: Path) -> dict[str, Any]:
    """Models of both families on the hub, shared in every way and loaded again."""
    return call(PROGRAMS, "share", work, hub.environment(work / "home"), folder=str(work / "shared"))


@pytest.fixture(scope="module")
def failures(hub: LocalHub, shared: dict[str, Any], work: Path) -> dict[str, str]:
    """What is said of repositories that lack something."""
    for family in FAMILIES:
        files = hub.repositories[f"user/{family}-pushed"].files
        weights = files["model.safetensors"]
        index = b'{"metadata": {"total_size": 1}, "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}'
        rest = {path: data for path, data in files.items() if path != "model.safetensors"}
        for name, content in {
            "without-weights": rest,
            "without-shard": rest | {"model.safetensors.index.json": index},
            "without-config": {"model.safetensors": weights},
            "pickle": rest | {"pytorch_model.bin": b"\x80\x04N."},
        }.items():
            hub.create(f"user/{family}-{name}").commit(content)
    secret = hub.create("user/secret", private=True)
    secret.commit(hub.repositories["user/reformer_lsh-pushed"].files)
    return call(PROGRAMS, "failures", work, hub.environment(work / "home"), folder=str(work))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_what_was_shared_comes_back_as_it_was(shared: dict[str, Any], family: str, way: str) -> None:
    came = shared[family][way]
    assert came["same"]
    assert came["tokenizer"] == TOKENIZERS[family]
    assert came["text"] == "Nodes, née 1965"
    assert came["generation"] == [6, 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_repository_has_safetensors_and_a_valid_card(hub: LocalHub, shared: dict[str, Any], family: str) -> None:
    for way in WAYS:
        files = hub.repositories[f"user/{family}-{way}"].files
        assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"} <= set(files)
        assert not [path for path in files if path.endswith((".bin", ".pt")) and path != "training_args.bin"]
        if way != "saved":
            assert card_problems(files["README.md"].decode()) == []
            assert shared[family][way]["card"]["library_name"] == "transformers"
    for way in ("pushed", "bundled"):
        assert family in shared[family][way]["card"]["tags"]
        assert shared[family][way]["card"]["pipeline_tag"] == "text-generation"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_training_command_pushes_its_own_card(hub: LocalHub, shared: dict[str, Any], family: str) -> None:
    assert shared[family]["longmem train"] == 0
    files = hub.repositories[f"user/{family}-command"].files
    assert {"model.safetensors", "tokenizer_config.json", "config.json"} <= set(files)
    card = files["README.md"].decode()
    assert card_problems(card) == []
    assert f'from_pretrained("user/{family}-command")' in card
    assert "held-out bits per byte" in card


@pytest.mark.parametrize("family", FAMILIES)
def test_with_the_package_its_own_classes_load_a_bundle(shared: dict[str, Any], family: str) -> None:
    came = shared[family]
    assert came["snapshot"]
    assert came["class with the plugin"].startswith("hf_longmem.")
    assert came["class when told to trust"].startswith("hf_longmem.")
    assert came["tokenizer when told to trust"].startswith(("hf_longmem.", "transformers.models."))


def test_the_cache_is_enough_without_a_hub(shared: dict[str, Any], hub: LocalHub, work: Path) -> None:
    before = len(hub.requests)
    environment = hub.environment(work / "home", offline=True)
    came = call(PROGRAMS, "offline", work, environment, folder=str(work / "shared"))
    assert len(hub.requests) == before
    for family in FAMILIES:
        assert came[family] == {way: shared[family][way] for way in WAYS}
    assert {"model.safetensors", "modeling_reformer_lsh.py", "README.md"} <= set(came["snapshot"])
    assert came["unknown"].startswith("OSError")
    assert "offline mode" in came["unknown"]


def test_without_the_package_a_bundle_loads_from_the_hub_and_then_offline(
    shared: dict[str, Any], hub: LocalHub, work: Path, python_without_package: Path
) -> None:
    for offline in (False, True):
        environment = hub.environment(work / "another home", offline=offline)
        folder = str(work / "shared")
        came = call(
            PROGRAMS,
            "without_plugin",
            work,
            environment,
            python=python_without_package,
            folder=folder,
            online=not offline,
        )
        for family in FAMILIES:
            assert came[family]["same"]
            assert came[family]["module"].startswith("transformers_modules.")
            assert came[family]["cached"] == came[family]["uncached"]
        if not offline:
            assert "trust_remote_code=True" in came["untrusted"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("wrong revision", ["OSError", "v9", "revision"]),
        ("no weights", ["OSError", "without-weights", "model.safetensors"]),
        ("no shard", ["OSError", "without-shard", "model-00001-of-00001.safetensors"]),
        ("no config", ["ValueError", "without-config", "config.json"]),
        ("only a pickle", ["OSError", "safetensors", "pytorch_model.bin", "save_pretrained"]),
        ("unknown", ["OSError", "user/never-seen"]),
    ],
)
def test_what_is_missing_is_named(failures: dict[str, str], family: str, what: str, words: list[str]) -> None:
    said = failures[f"{family} {what}"]
    assert [word for word in words if word not in said] == [], said


def test_a_bundle_of_what_is_missing_names_it(failures: dict[str, str], work: Path) -> None:
    assert "user/never-seen" in failures["bundle unknown"]
    assert "safetensors" in failures["bundle pickle"]
    assert not (work / "unknown").exists()
    assert not (work / "pickle").exists()


def test_a_private_repository_needs_the_token(failures: dict[str, str], hub: LocalHub, work: Path) -> None:
    assert failures["private, with the token"] == "ReformerLSHForCausalLM"
    came = call(PROGRAMS, "private", work, hub.environment(work / "no home", token=None), name="user/secret")
    assert came["model"].startswith("OSError")
    assert "user/secret" in came["model"]
    assert "token" in came["model"]
    assert "user/secret" in came["snapshot"]
    assert "user/secret" in came["push"]
    assert "user/new" not in hub.repositories


@pytest.mark.parametrize("fault", ["refuse upload", "break commit"])
def test_an_interrupted_upload_changes_nothing_and_can_be_repeated(
    shared: dict[str, Any], hub: LocalHub, work: Path, fault: str
) -> None:
    name = f"user/{fault.replace(' ', '-')}"
    hub.blobs.clear()
    hub.faults[fault] = 1
    source, folder = str(work / "shared" / "reformer_lsh" / "saved"), str(work / fault)
    came = call(PROGRAMS, "interrupted", work, hub.environment(work / "home"), source=source, folder=folder, name=name)
    assert came["first"].startswith("OSError")
    assert f"hf upload {name} {folder}" in came["first"]
    assert came["in between"] == []
    assert came["again"] == sorted(hub.repositories[name].files)
    assert {"model.safetensors", "config.json", "modeling_reformer_lsh.py"} <= set(came["again"])


def test_a_connection_that_breaks_once_is_tried_again(shared: dict[str, Any], hub: LocalHub, work: Path) -> None:
    hub.blobs.clear()
    hub.faults |= {"break upload": 1, "break download": 1}
    source, folder, name = str(work / "shared" / "reformer_lsh" / "saved"), str(work / "broken"), "user/broken"
    hub.create(name).commit({"hf_longmem_of_an_earlier_version.py": b"", "handler.py": b"", "README.md": b"old"})
    came = call(PROGRAMS, "interrupted", work, hub.environment(work / "new"), source=source, folder=folder, name=name)
    assert came["first"] is None
    assert came["same"]
    assert "handler.py" in came["again"]
    assert "hf_longmem_of_an_earlier_version.py" not in came["again"]
    assert not any(hub.faults.values())
