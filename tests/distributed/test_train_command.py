"""`longmem train` on two gloo processes, as ``torchrun`` starts it: both families, streams and packed sequences.

Part of this file is the program of those processes.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from processes import Processes
from transformers import AutoModelForCausalLM

from hf_longmem.cli.main import main

COMMON = (
    "--hidden_size 16 --num_attention_heads 2 --sequence_length 64 --max_new_tokens 3 --max_steps 6 --save_steps 3 "
    "--logging_steps 1 --disable_tqdm true --gradient_accumulation_steps 2"
)
RUNS = {
    "reformer_lsh": "--attn_layers local lsh --lsh_attn_chunk_length 16 --local_attn_chunk_length 16",
    "infinite_former": "--model_type infinite_former --config_overrides num_hidden_layers=1 segment_length=16 "
    "num_basis=16",
}


def program(arguments: list[str]) -> int:
    return main(["train", *arguments])


@pytest.mark.parametrize("family", RUNS)
def test_two_processes_train_save_and_go_on(family: str, tmp_path: Path) -> None:
    for number, length in enumerate((300, 90, 200, 40)):
        (tmp_path / f"{number}.txt").write_text(f"Document {number}. " * length, encoding="utf-8")
    texts = [str(path) for path in sorted(tmp_path.glob("*.txt"))]
    arguments = [*shlex.split(COMMON), *shlex.split(RUNS[family]), "--text", *texts]
    output = tmp_path / "out"
    with Processes(
        __file__, "program", tmp_path / "run", 2, arguments=[*arguments, "--output_dir", str(output)]
    ) as processes:
        assert processes.results() == [0, 0], processes.logs()
    first, second = ((tmp_path / "run" / f"{rank}.log").read_text() for rank in range(2))
    before, after = map(float, re.search(r"bits per byte: ([\d.]+) before, ([\d.]+) after", first).groups())
    assert after < before
    assert "which gives the same loss when loaded again" in first
    assert "bits per byte" not in second
    assert AutoModelForCausalLM.from_pretrained(output).config.model_type == family

    # The number of processes changes how much is read at a time, and nothing in what is measured.
    alone = [*arguments, "--output_dir", str(tmp_path / "alone"), "--model_name_or_path", str(output), "--no_do_train"]
    with Processes(__file__, "program", tmp_path / "run-alone", arguments=alone) as process:
        assert process.results() == [0]
    assert f"{after:.3f} after" in process.logs()

    (output / "checkpoint-6" / "optimizer.pt").write_bytes(b"torn")
    resumed = [*arguments, "--output_dir", str(output), "--resume_from_checkpoint", "true"]
    with Processes(__file__, "program", tmp_path / "run-again", 2, arguments=resumed) as processes:
        assert processes.results() == [0, 0], processes.logs()
    assert "checkpoint-6: optimizer.pt is cut short" in processes.logs()
    history = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    assert f"{before:.3f} before, {after:.3f} after" in processes.logs()
