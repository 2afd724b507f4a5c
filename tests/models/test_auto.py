"""``import hf_longmem`` registers everything with transformers, and imports nothing heavy."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import hf_longmem
from hf_longmem import ReformerLSHConfig
from hf_longmem.models.auto import register


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_package_imports_no_modelling_code() -> None:
    modules = "print(*sorted(sys.modules), sep='\\n')"
    plain = run(f"import sys; from transformers import AutoConfig, AutoModel, AutoTokenizer; {modules}").split()
    ours = run(f"import sys; import hf_longmem; {modules}").split()
    extra = {name for name in set(ours) - set(plain) if not name.startswith("hf_longmem")}
    assert "transformers.modeling_utils" not in ours
    assert len(extra) < 20, extra


def test_auto_classes_load_what_a_fresh_process_never_imported(tmp_path: object) -> None:
    config = ReformerLSHConfig(hidden_size=16, num_attention_heads=2, attn_layers=["lsh"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    code = "import hf_longmem; from transformers import AutoModelForCausalLM as Auto; "
    code += f"print(type(Auto.from_pretrained({str(tmp_path)!r})).__name__)"
    assert "ReformerLSHForCausalLM" in run(code)


def test_auto_classes_know_the_family() -> None:
    assert isinstance(AutoConfig.for_model("reformer_lsh"), ReformerLSHConfig)
    config = ReformerLSHConfig(hidden_size=16, num_attention_heads=2, attn_layers=["local"])
    assert type(AutoModel.from_config(config)) is hf_longmem.ReformerLSHModel
    assert type(AutoModelForCausalLM.from_config(config)) is hf_longmem.ReformerLSHForCausalLM
    assert ReformerLSHConfig in MODEL_FOR_CAUSAL_LM_MAPPING
    assert hf_longmem.ReformerLSHForCausalLM in MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.values()


def test_transformers_own_reformer_stays_its_own() -> None:
    assert AutoConfig.for_model("reformer").__class__ is transformers.ReformerConfig


def test_registering_twice_is_harmless_and_mappings_still_pickle() -> None:
    register()
    register()
    copied = pickle.loads(pickle.dumps(MODEL_FOR_CAUSAL_LM_MAPPING))
    assert copied[ReformerLSHConfig] is hf_longmem.ReformerLSHForCausalLM


def test_public_names_resolve_and_unknown_ones_do_not() -> None:
    for name in hf_longmem.__all__:
        assert getattr(hf_longmem, name) is not None
    assert set(hf_longmem.__all__) <= set(dir(hf_longmem))
    assert issubclass(hf_longmem.ReformerLSHModel, torch.nn.Module)
    with pytest.raises(AttributeError, match="no attribute 'Reformer'"):
        hf_longmem.Reformer  # noqa: B018


def test_label_smoothing_of_the_trainer_shifts_the_labels(tmp_path: object) -> None:
    config = ReformerLSHConfig(hidden_size=16, num_attention_heads=2, attn_layers=["local"], vocab_size=40)
    model = AutoModelForCausalLM.from_config(config).eval()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), label_smoothing_factor=0.1, report_to=[], use_cpu=True
    )
    ids = torch.randint(2, 40, (2, 12))
    loss = transformers.Trainer(model=model, args=arguments).compute_loss(model, {"input_ids": ids, "labels": ids})
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    torch.testing.assert_close(
        loss, torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    )
