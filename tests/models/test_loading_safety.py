"""An untrusted checkpoint runs nothing, is read as safetensors only, and asks for no absurd memory."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import causal_lm
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    pipeline,
)

from hf_longmem import (
    InfiniteFormerConfig,
    InfiniteFormerForCausalLM,
    LongTermMemoryConfig,
    ReformerLSHByteTokenizer,
    ReformerLSHConfig,
    ReformerLSHForCausalLM,
    add_long_term_memory,
)

FAMILIES = ("reformer_lsh", "infinite_former")
CONFIGS = {"reformer_lsh": ReformerLSHConfig, "infinite_former": InfiniteFormerConfig}
MODELS = {"reformer_lsh": ReformerLSHForCausalLM, "infinite_former": InfiniteFormerForCausalLM}
HUGE = 10**12


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def checkpoint(family: str, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    causal_lm(family, vocab_size=258).save_pretrained(folder)
    ReformerLSHByteTokenizer().save_pretrained(folder)
    return folder


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def as_pickle(folder: Path, *, name: str = "pytorch_model.bin") -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / name)
    (folder / "model.safetensors").unlink()


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> Any:
        return open, (self.file, "w")


def test_code_beside_a_checkpoint_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    (checkpoint / "evil.py").write_text(f"open({str(fired)!r}, 'w').close()\nclass Evil:\n    pass\n")
    custom_generate = checkpoint / "custom_generate"
    custom_generate.mkdir()
    (custom_generate / "generate.py").write_text(f"open({str(fired)!r}, 'w').close()\n")
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForVision2Seq")
    rewrite(checkpoint / "config.json", auto_map=dict.fromkeys(names, "evil.Evil"), architectures=["evil.Evil", "os"])
    rewrite(checkpoint / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", None]})
    rewrite(checkpoint / "generation_config.json", custom_generate=str(checkpoint))
    for trust in (None, False, True):
        if trust:
            # Who says so runs this folder's generate: transformers' rule, and no matter of the config.
            custom_generate.rename(tmp_path / "elsewhere")
        assert type(AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust)) in CONFIGS.values()
        for auto in (AutoModel, AutoModelForCausalLM):
            model = auto.from_pretrained(checkpoint, trust_remote_code=trust)
            assert type(model).__module__.startswith("hf_longmem.")
        assert type(AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust)) is ReformerLSHByteTokenizer
    assert pipeline("text-generation", checkpoint, device="cpu")("a", max_new_tokens=2)
    if not type(model).__name__.startswith("Reformer"):
        with pytest.raises(ValueError, match="Unrecognized configuration class"):
            AutoModelForMaskedLM.from_pretrained(checkpoint)
    assert not fired.exists()


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("hidden_act", "os.system"),
        ("hidden_act", "__import__('os').system('true')"),
        ("hidden_act", "evil/activation"),
        ("attn_implementation", "evil/kernel"),
        ("_attn_implementation", "kernels-community/flash-attn2:forward"),
        ("transformers_weights", "pytorch_model.bin"),
        ("transformers_weights", "../../other.bin"),
    ],
)
def test_a_config_cannot_name_code_or_another_kind_of_file(
    family: str, checkpoint: Path, entry: str, value: str
) -> None:
    rewrite(checkpoint / "config.json", **{entry: value})
    with pytest.raises(ValueError, match=entry.lstrip("_")):
        AutoConfig.from_pretrained(checkpoint)
    with pytest.raises(ValueError, match=entry.lstrip("_")):
        MODELS[family].from_pretrained(checkpoint)


@pytest.mark.parametrize("entry", ["attn_implementation", "_attn_implementation", "auto_map", "transformers_weights"])
def test_a_config_cannot_name_code_for_the_model_within(entry: str, tmp_path: Path) -> None:
    base = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, n_positions=32, vocab_size=16))
    add_long_term_memory(base, LongTermMemoryConfig(segment_length=8, num_basis=8)).save_pretrained(tmp_path)
    fired = tmp_path / "fired"
    (tmp_path / "evil.py").write_text(f"open({str(fired)!r}, 'w').close()\nclass Evil:\n    pass\n")
    value: Any = (
        {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"} if entry == "auto_map" else "evil/a.bin"
    )
    base_config = json.loads((tmp_path / "config.json").read_text())["base_config"]
    rewrite(tmp_path / "config.json", base_config=base_config | {entry: value})
    if entry == "auto_map":
        model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
        assert type(model.language_model) is GPT2LMHeadModel
    else:
        with pytest.raises(ValueError, match=entry.lstrip("_")):
            AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not fired.exists()


def test_what_a_config_cannot_know_is_kept_as_data(family: str, checkpoint: Path) -> None:
    rewrite(checkpoint / "config.json", note="__import__('os')", trainer="os.system")
    config = AutoConfig.from_pretrained(checkpoint)
    assert type(config) is CONFIGS[family]
    assert config.note == "__import__('os')"
    MODELS[family].from_pretrained(checkpoint)


@pytest.mark.parametrize(
    "options", [{}, {"device_map": "auto"}, {"dtype": torch.bfloat16}, {"variant": "fp16"}], ids=str
)
def test_a_pickle_is_refused_with_the_way_out(
    family: str, checkpoint: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    as_pickle(checkpoint, name="pytorch_model.fp16.bin" if "variant" in options else "pytorch_model.bin")
    said = r"must be safetensors, got pytorch_model.bin; a pickle can run code, .*weights_only=True.*save_pretrained"
    for load in (MODELS[family].from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(OSError, match=said):
            load(checkpoint, **options)


def test_the_way_out_of_a_pickle_works(family: str, checkpoint: Path, tmp_path: Path) -> None:
    expected = MODELS[family].from_pretrained(checkpoint).state_dict()
    as_pickle(checkpoint)
    model = MODELS[family](AutoConfig.from_pretrained(checkpoint))
    model.load_state_dict(torch.load(checkpoint / "pytorch_model.bin", weights_only=True))
    model.save_pretrained(tmp_path / "safe")
    for name, tensor in MODELS[family].from_pretrained(tmp_path / "safe").state_dict().items():
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("option", ["use_safetensors", "weights_only"])
def test_no_argument_makes_it_read_a_pickle(family: str, checkpoint: Path, tmp_path: Path, option: str) -> None:
    (checkpoint / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Bomb(tmp_path / "fired")}, checkpoint / "pytorch_model.bin")
    with pytest.raises(ValueError, match=f"{option} must be True, got False; leave it out"):
        MODELS[family].from_pretrained(checkpoint, **{option: False})
    with pytest.raises(OSError, match="must be safetensors"):
        MODELS[family].from_pretrained(checkpoint)
    assert not (tmp_path / "fired").exists()


def test_an_index_of_safetensors_may_list_no_pickle(family: str, checkpoint: Path, tmp_path: Path) -> None:
    names = list(load_file(checkpoint / "model.safetensors"))
    (checkpoint / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Bomb(tmp_path / "fired")}, checkpoint / "model-00001-of-00001.bin")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.bin")}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(OSError, match=r"must be safetensors, got model-00001-of-00001.bin; a pickle can run code"):
        MODELS[family].from_pretrained(checkpoint)
    assert not (tmp_path / "fired").exists()


def test_a_pickle_beside_safetensors_is_left_alone(family: str, checkpoint: Path, tmp_path: Path) -> None:
    torch.save({"lm_head.weight": Bomb(tmp_path / "fired")}, checkpoint / "pytorch_model.bin")
    MODELS[family].from_pretrained(checkpoint)
    assert not (tmp_path / "fired").exists()


def test_only_safetensors_are_written(family: str, tmp_path: Path) -> None:
    causal_lm(family).save_pretrained(tmp_path, safe_serialization=False)
    assert [file.name for file in tmp_path.iterdir() if file.suffix not in (".json", ".md")] == ["model.safetensors"]


ABSURD = [
    *(
        ("reformer_lsh", changes)
        for changes in (
            {"num_buckets": HUGE},
            {"num_buckets": [2**20, 2**20]},
            {"num_buckets": 2**31 - 2},
            {"num_buckets": -2},
            {"num_hashes": HUGE},
            {"num_hashes": 2**31 - 1},
            {"num_hashes": -1},
            {"hidden_size": -16},
            {"hidden_size": HUGE},
            {"hidden_size": 2**30, "feed_forward_size": 2**30, "axial_pos_embds_dim": [2**29, 2**29]},
            {"vocab_size": HUGE},
            {"vocab_size": -1},
            {"num_attention_heads": 2**31 - 1, "attention_head_size": 2},
            {"attention_head_size": 2**31 - 2},
            {"lsh_attn_chunk_length": 2**31 - 1},
            {"local_attn_chunk_length": 2**31 - 1},
            {"lsh_num_chunks_before": 2**31 - 1},
            {"local_num_chunks_before": 2**31 - 1},
            {"max_position_embeddings": HUGE},
            {"max_position_embeddings": 0},
            {"axial_pos_shape": [2**40, 2**40]},
            {"axial_pos_shape": [-8, -16]},
            {"num_hidden_layers": HUGE},
            {"num_hidden_layers": -1},
            {"chunk_size_feed_forward": -1},
        )
    ),
    *(
        ("infinite_former", changes)
        for changes in (
            {"num_basis": HUGE},
            {"num_basis": 2**31 - 1},
            {"num_basis": 2**20},
            {"num_basis": -8},
            {"num_samples": 2**31 - 1},
            {"segment_length": 2**31 - 1},
            {"segment_length": -1},
            {"short_term_window": 2**31 - 1},
            {"short_term_window": -1},
            {"histogram_bins": 2**31 - 1},
            {"uniform_segments": 2**31 - 1, "memory_decay": "uniform"},
            {"num_hidden_layers": HUGE},
            {"num_hidden_layers": 2**31 - 1},
            {"num_hidden_layers": 2**31 - 1, "memory_layers": []},
            {"num_hidden_layers": -1},
            {"memory_layers": [-1]},
            {"hidden_size": HUGE},
            {"hidden_size": 2**30, "feed_forward_size": 2**30},
            {"hidden_size": -16},
            {"attention_head_size": 2**31 - 2},
            {"num_attention_heads": 2**31 - 1, "attention_head_size": 2},
            {"vocab_size": 2**31 - 1, "hidden_size": 2**14},
            {"vocab_size": -1},
            {"bptt_segments": 0},
        )
    ),
]


@pytest.mark.parametrize(("family", "changes"), ABSURD, ids=str)
def test_absurd_sizes_are_refused_before_anything_is_allocated(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    causal_lm(family).save_pretrained(folder)
    rewrite(folder / "config.json", **changes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    names = "|".join(changes)
    for load in (AutoConfig.from_pretrained, AutoModelForCausalLM.from_pretrained, CONFIGS[family].from_pretrained):
        with pytest.raises(ValueError, match=rf"{names}|rotations|num_buckets|maps of a write|parameters|attn_chunk"):
            load(folder)
    with pytest.raises(ValueError, match=r"got"):
        CONFIGS[family](**(causal_lm(family).config.to_diff_dict() | changes))
    # Overrides go the same way.
    causal_lm(family).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"got"):
        AutoConfig.from_pretrained(folder, **changes)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("value", ["text", None, 1.5, [1], {"a": 1}, True])
def test_a_size_of_another_type_is_refused(family: str, value: Any, tmp_path: Path) -> None:
    causal_lm(family).save_pretrained(tmp_path)
    rewrite(tmp_path / "config.json", hidden_size=value)
    with pytest.raises(Exception, match="hidden_size"):
        AutoConfig.from_pretrained(tmp_path)
