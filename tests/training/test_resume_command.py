"""`longmem train --resume_from_checkpoint` after a crash, and with checkpoints that it cannot go on from."""

from __future__ import annotations

import json
import resource
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from processes import Processes
from safetensors.torch import load_file

from hf_longmem.cli.main import main

TINY = shlex.split(
    "--hidden_size 16 --num_attention_heads 2 --attn_layers local lsh --num_hashes 2 --sequence_length 64 "
    "--lsh_attn_chunk_length 16 --local_attn_chunk_length 16 --max_new_tokens 0 --use_cpu --max_steps 6 --save_steps 2 "
    "--logging_steps 1 --no_do_eval --save_total_limit 3 --disable_tqdm true"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The arguments of a run, but for its folder, and the folder."""
    folder = tmp_path_factory.mktemp("trained")
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"Document {number}. " * 60, encoding="utf-8")
    arguments = ["train", *TINY, "--text", *(str(folder / f"{number}.txt") for number in range(3))]
    assert main([*arguments, "--output_dir", str(folder / "out")]) == 0
    return arguments, folder / "out"


def losses(folder: Path) -> list[float]:
    history = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def test_a_torn_checkpoint_is_named_and_the_one_before_it_taken(
    trained: tuple[list[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments, whole = trained
    output = tmp_path / "out"
    for step in (2, 4):
        shutil.copytree(whole / f"checkpoint-{step}", output / f"checkpoint-{step}")
    optimizer = output / "checkpoint-4" / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:5000])
    assert main([*arguments, "--output_dir", str(output), "--resume_from_checkpoint", "true"]) == 0

    assert (
        f"{output / 'checkpoint-4'}: optimizer.pt is cut short or damaged: this checkpoint is not whole" in caplog.text
    )
    assert losses(output) == losses(whole)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (output, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def on_a_full_disk(arguments: list[str]) -> int:
    """The program of a process none of whose files can be longer than half of the optimizer's."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    return main(arguments)


def test_a_full_disk_is_one_clear_line(trained: tuple[list[str], Path], tmp_path: Path) -> None:
    arguments, whole = trained
    sizes = [(whole / "checkpoint-4" / name).stat().st_size for name in ("model.safetensors", "optimizer.pt")]
    assert sizes[0] < 100_000 < sizes[1]
    output = tmp_path / "out"
    given = [*arguments, "--output_dir", str(output)]
    with Processes(__file__, "on_a_full_disk", tmp_path / "run", arguments=given) as process:
        assert process.results() == [1]
    said = process.logs().splitlines()[-1]
    assert said.startswith(f"longmem train: error: {output / 'checkpoint-2'} could not be written: ")
    assert said.endswith("; make room on the disk, then go on with --resume_from_checkpoint true")


@pytest.mark.parametrize("named", [False, True])
def test_what_cannot_be_gone_on_from_is_one_clear_line_and_changes_nothing(
    trained: tuple[list[str], Path], named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, whole = trained
    folder = tmp_path / "out" / "checkpoint-4"
    shutil.copytree(whole / "checkpoint-4", folder)
    resume = ["--output_dir", str(tmp_path / "out"), "--resume_from_checkpoint", str(folder) if named else "true"]

    def refused() -> str:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert main([*arguments, *resume]) == 2
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        return capsys.readouterr().err.splitlines()[-1]

    random_state = folder / "rng_state.pth"
    for rank in range(2):
        shutil.copy(random_state, folder / f"rng_state_{rank}.pth")
    random_state.unlink()
    error = refused()
    assert f"{folder} was written by 2 processes and goes on with as many, got 1; start 2, or begin from its" in error
    (folder / "scheduler.pt").unlink()
    assert "no scheduler.pt" in refused()
