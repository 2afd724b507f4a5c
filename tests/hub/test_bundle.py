"""A bundle is one checkpoint for both worlds: its classes are this package's sources, made flat."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import call
from safetensors.torch import load_file, save_file
from tiny_models import causal_lm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from hf_longmem import LongTermMemoryConfig, ReformerLSHByteTokenizer, add_long_term_memory, bundle
from hf_longmem._version import __version__
from hf_longmem.cli.main import main
from hf_longmem.hub.sources import commit_of_working_tree, flat_name, flat_sources, flattened, source_version
from hf_longmem.models.auto import MODEL_TYPES, model_classes

PROGRAMS = Path(__file__).parent / "bundle_programs.py"
FAMILIES = ("reformer_lsh", "infinite_former", "memory_augmented")


def make(family: str) -> PreTrainedModel:
    """A tiny model; one of them is a memory around a GPT-2."""
    if family != "memory_augmented":
        return causal_lm(family, vocab_size=258).eval()
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 64, "initializer_range": 0.2}
    base = GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=258, bos_token_id=0, eos_token_id=1))
    memory = LongTermMemoryConfig(segment_length=8, num_basis=8, basis_widths=(0.05, 0.1), memory_zero_init=False)
    return add_long_term_memory(base, memory).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles of both families, and what their models compute."""
    folder = tmp_path_factory.mktemp("bundles")
    for family in FAMILIES:
        model = make(family)
        model.config.architectures, model.config.dtype = [type(model).__name__], "float32"  # as save_pretrained does
        before = model.config.to_dict()
        bundle(model, folder / family, tokenizer=ReformerLSHByteTokenizer() if family == "reformer_lsh" else None)
        assert model.config.to_dict() == before
        assert not hasattr(model.config, "auto_map")
        with torch.no_grad():
            save_file({"logits": model(torch.arange(2, 39)[None]).logits}, folder / f"{family}.safetensors")
    return folder


@pytest.fixture(scope="module")
def without(folder: Path, python_without_package: Path) -> dict[str, Any]:
    """What a Python without this package says of them."""
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    return call(PROGRAMS, "load", folder / "work", environment, python=python_without_package, folder=str(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_package_it_computes_and_generates_the_same(without: dict[str, Any], family: str) -> None:
    came = without[family]
    assert came["same logits"]
    assert came["cached"] == came["uncached"]
    assert len(came["cached"][0]) == 37 + 12
    assert came["beams"] == came["beams uncached"]
    assert came["cached, after another copy of the code has come"] == came["cached"]
    assert came["trains"]


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_package_every_head_loads(without: dict[str, Any], family: str) -> None:
    assert without[family]["heads"] == {
        auto: name for auto, (_, name) in model_classes(family).items() if auto != "AutoConfig"
    }


def test_without_the_package_the_tokenizer_loads(without: dict[str, Any]) -> None:
    assert without["tokenizer"] == {"ids": [112, 197, 171], "text": "né", "class": "ReformerLSHByteTokenizer"}


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_again_without_the_package_it_is_whole(without: dict[str, Any], family: str) -> None:
    assert without[family]["saved again"]


def test_with_the_package_its_classes_win_and_a_saved_model_has_no_map_to_nowhere(folder: Path, tmp_path: Path) -> None:
    for family in FAMILIES:
        config = json.loads((folder / family / "config.json").read_text())
        assert set(config["auto_map"]) == set(model_classes(family))
        assert "auto_map" not in AutoConfig.from_pretrained(folder / family).to_dict()
        for trust in (None, True, False):
            model = AutoModelForCausalLM.from_pretrained(folder / family, trust_remote_code=trust)
            assert type(model).__module__.startswith("hf_longmem.")
        if family != "memory_augmented":
            head = AutoModelForTokenClassification.from_pretrained(folder / family, trust_remote_code=True)
            assert type(head).__module__.startswith("hf_longmem.")
        model.save_pretrained(tmp_path / family)
        assert "auto_map" not in json.loads((tmp_path / family / "config.json").read_text())
        assert not list((tmp_path / family).glob("*.py"))


@pytest.mark.parametrize("family", FAMILIES)
def test_its_files_are_flat_and_name_their_version(folder: Path, family: str) -> None:
    files = {file.stem: file.read_text() for file in (folder / family).glob("*.py")}
    assert {f"configuration_{family}", f"modeling_{family}"} <= set(files)
    version = rf"hf-longmem {re.escape(__version__)}(, commit [0-9a-f]{{40}}( with changes)?)?"
    assert re.fullmatch(version, source_version())
    (told,) = {text.splitlines()[0].partition(" hf_longmem.bundle: ")[2] for text in files.values()}
    assert re.fullmatch(rf"{version}\.", told)
    for name, text in files.items():
        assert text.startswith("# hf_longmem.")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1, name
                assert (node.module in files) == (node.level == 1), name
                assert not (node.module or "").startswith("hf_longmem.") or node.level == 1, name
            elif isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.startswith("hf_longmem")], name
    assert "card" not in files
    assert (folder / family / "README.md").is_file()


def test_the_commit_is_that_of_the_tree_and_says_when_it_has_changed(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    package = tmp_path / "src" / "hf_longmem" / "hub"
    package.mkdir(parents=True)
    module = package / "sources.py"
    module.write_text("")
    assert commit_of_working_tree(module) is None
    subprocess.run([*git, "init", "-q"], check=True)
    assert commit_of_working_tree(module) is None
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert commit_of_working_tree(module) == commit
    module.write_text("# changed\n")
    assert commit_of_working_tree(module) == f"{commit} with changes"


def test_a_folder_is_bundled_without_what_does_not_belong(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "trained"
    causal_lm("reformer_lsh", vocab_size=258).save_pretrained(source, max_shard_size="20KB")
    ReformerLSHByteTokenizer().save_pretrained(source)
    for name in ("training_args.bin", "optimizer.pt", "trainer_state.json", "old.py", "rng_state.pth"):
        (source / name).write_bytes(b"{}")
    (source / "README.md").write_text("# My own card\n")
    (source / "checkpoint-2").mkdir()
    (source / "checkpoint-2" / "model.safetensors").write_bytes(b"")
    assert main(["bundle", str(source), str(tmp_path / "out")]) == 0
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert not names & {"training_args.bin", "optimizer.pt", "trainer_state.json", "old.py", "checkpoint-2"}
    assert "model.safetensors.index.json" in names
    assert (tmp_path / "out" / "README.md").read_text() == "# My own card\n"
    ours = AutoModelForCausalLM.from_pretrained(source).state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict().items():
        assert torch.equal(tensor, ours[name])
    # A bundle can be bundled again, by a later version.
    bundle(tmp_path / "out", tmp_path / "again")
    assert {file.name for file in (tmp_path / "again").iterdir()} == names


def test_what_cannot_be_bundled_is_refused_and_leaves_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8))
    gpt2.save_pretrained(tmp_path / "gpt2")
    damaged = tmp_path / "damaged"
    causal_lm("infinite_former").save_pretrained(damaged)
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:-5])
    pickle = tmp_path / "pickle"
    causal_lm("infinite_former").save_pretrained(pickle)
    torch.save(load_file(pickle / "model.safetensors"), pickle / "pytorch_model.bin")
    (pickle / "model.safetensors").unlink()
    no_shard, no_mapping = tmp_path / "no shard", tmp_path / "no mapping"
    causal_lm("infinite_former").save_pretrained(no_shard, max_shard_size="5KB")
    sorted(no_shard.glob("*.safetensors"))[-1].unlink()
    causal_lm("infinite_former").save_pretrained(no_mapping)
    (no_mapping / "config.json").write_text("[]")
    (tmp_path / "empty").mkdir()
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("")
    for source, out, words in (
        (gpt2, "out", "must be a model of this package"),
        (tmp_path / "gpt2", "out", "must be a model of this package"),
        (damaged, "out", "must be whole"),
        (pickle, "out", "as safetensors, got none; a pickle can run code"),
        (no_shard, "out", "must hold every shard"),
        (no_mapping, "out", "must be a checkpoint"),
        (tmp_path / "empty", "out", "must be a checkpoint"),
        (folder / "reformer_lsh", "full", "must be empty"),
        (folder / "reformer_lsh", "full/file", "must be a folder"),
    ):
        with pytest.raises((ValueError, OSError), match=words):
            bundle(source, tmp_path / out)
        if not isinstance(source, GPT2LMHeadModel):
            assert main(["bundle", str(source), str(tmp_path / out)]) == 2
            error = capsys.readouterr().err.splitlines()[-1]
            assert error.startswith("longmem bundle: error: ")
            assert words in error
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "damaged",
        "empty",
        "full",
        "gpt2",
        "no mapping",
        "no shard",
        "pickle",
    ]


def test_every_architecture_has_a_flat_form() -> None:
    for family in MODEL_TYPES:
        modules = {module for module, _ in model_classes(family).values()}
        texts = flat_sources(modules)
        assert {f"{flat_name(module)}.py" for module in modules} <= set(texts)
        for name, text in texts.items():
            compile(text, name, "exec")
            assert '"hf_longmem::' not in text


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("from hf_longmem.ops.lsh import a, b as c", "from .hf_longmem_ops_lsh import a, b as c"),
        ("from hf_longmem.ops.lsh import (\n    a,\n)", "from .hf_longmem_ops_lsh import (\n    a,\n)"),
        (
            "def f():\n    from hf_longmem._errors import complaint  # late\n    return complaint",
            "def f():\n    from .hf_longmem__errors import complaint  # late\n    return complaint",
        ),
        (
            "from hf_longmem.models.reformer_lsh.configuration_reformer_lsh import C",
            "from .configuration_reformer_lsh import C",
        ),
        (
            "from hf_longmem.ops.local import decode as d, local_attention",
            "import sys\nfrom .hf_longmem_ops_local_decode import __name__ as d\nd = sys.modules[d]\n"
            "from .hf_longmem_ops_local import local_attention as local_attention",
        ),
        (
            'separators = "\x0c\u2028"\nfrom hf_longmem.ops.lsh import a\n',
            'separators = "\x0c\u2028"\nfrom .hf_longmem_ops_lsh import a',
        ),
        ('"""from hf_longmem import x"""\nimport torch', '"""from hf_longmem import x"""\nimport torch'),
    ],
)
def test_imports_become_those_of_siblings(source: str, written: str) -> None:
    assert flattened("hf_longmem.models.x", source)[0] == written + "\n"


@pytest.mark.parametrize(
    "source",
    [
        "import hf_longmem",
        "import hf_longmem.ops",
        "from . import y",
        "from .y import z",
        "from importlib import import_module\nimport_module('hf_longmem.ops')",
        "def f():\n    import hf_longmem.ops.lsh as lsh",
    ],
)
def test_an_import_without_a_flat_form_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"another import in line [12] of hf_longmem.models.x; write it so"):
        flattened("hf_longmem.models.x", source)
