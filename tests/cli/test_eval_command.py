"""`longmem eval` scores documents as `streaming_perplexity` does, and keeps what a model remembers of them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, ByT5Tokenizer, GPT2Config, GPT2LMHeadModel

from hf_longmem import (
    InfiniteFormerConfig,
    InfiniteFormerForCausalLM,
    ReformerLSHConfig,
    ReformerLSHForCausalLM,
    streaming_perplexity,
)
from hf_longmem.cli.eval import _documents as documents_to_score
from hf_longmem.cli.main import main
from hf_longmem.data.text import python_documents, split_documents

LINE = re.compile(
    r"(?P<name>\S+): (?P<tokens>[\d,]+) tokens, (?P<bytes>[\d,]+) bytes: (?P<nats>[\d.]+) nats per token, "
    r"perplexity (?P<perplexity>[\d.]+), bits per byte (?P<bits>[\d.]+)"
)
SIZES = {"vocab_size": 384, "hidden_size": 16, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    infinite = {"num_hidden_layers": 2, "segment_length": 16, "num_basis": 16, "basis_widths": (0.05, 0.1)}
    made: dict[str, Any] = {
        "infinite_former": InfiniteFormerForCausalLM(InfiniteFormerConfig(**SIZES, **infinite, initializer_range=0.2)),
        "reformer_lsh": ReformerLSHForCausalLM(
            ReformerLSHConfig(**SIZES, attn_layers=("local", "lsh"), num_buckets=4, position_embedding_type="rotary")
        ),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        ByT5Tokenizer().save_pretrained(folder / name)
    return {name: folder / name for name in made}


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    written = {"first.txt": "Grüße an alle,\r\n" * 40, "second.txt": "another document"}
    for name, text in written.items():
        (tmp_path / name).write_bytes(text.encode("utf-8"))
    return [tmp_path / name for name in written]


def scored(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    assert main(["eval", *arguments]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"peak memory: [\d.]+ GiB", printed)
    return [match.groupdict() for line in printed.splitlines() if (match := LINE.fullmatch(line))]


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    assert main(["eval", *arguments]) == status
    return capsys.readouterr().err.splitlines()[-1].removeprefix("longmem eval: error: ")


@pytest.mark.parametrize("name", ["infinite_former", "reformer_lsh"])
@pytest.mark.parametrize("piece_length", ["7", "1024"])
def test_documents_are_scored_one_by_one_and_together(
    models: dict[str, Path], texts: list[Path], name: str, piece_length: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(models[name]), "--text", *map(str, texts), "--piece_length", piece_length]
    *each, together = scored(arguments, capsys)
    model = AutoModelForCausalLM.from_pretrained(models[name])
    nats = count = 0.0
    for line, path in zip(each, texts, strict=True):
        ids = ByT5Tokenizer()(path.read_bytes().decode("utf-8"), add_special_tokens=False)["input_ids"]
        expected = streaming_perplexity(model, ids, progress=False)
        assert line["name"] == str(path)
        assert line["tokens"] == line["bytes"] == f"{path.stat().st_size - 1:,}"
        assert float(line["nats"]) == pytest.approx(expected.mean_nll, abs=1e-4)
        assert float(line["perplexity"]) == pytest.approx(expected.perplexity, rel=1e-4)
        assert float(line["bits"]) == pytest.approx(expected.mean_nll / math.log(2), abs=1e-4)
        nats, count = nats + expected.mean_nll * expected.num_tokens, count + expected.num_tokens
    assert together["name"] == "all"
    assert float(together["nats"]) == pytest.approx(nats / count, abs=1e-4)


def test_a_memory_is_saved_and_gone_on_with(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, whole = models["infinite_former"], "It is a long story, told in two parts. " * 9
    parts, memory = (whole[:150], whole[150:]), str(tmp_path / "memory.safetensors")
    for name, text in (("whole", whole), ("begin", parts[0]), ("end", parts[1])):
        (tmp_path / name).write_text(text)

    def nats(name: str, *options: str) -> float:
        (line,) = scored([str(model), "--text", str(tmp_path / name), *options], capsys)
        return float(line["nats"]) * int(line["tokens"])

    together = nats("whole")
    begin, end = nats("begin", "--save_memory", memory), nats("end", "--load_memory", memory)
    ids = torch.tensor([ByT5Tokenizer()(whole, add_special_tokens=False)["input_ids"]])
    logits = AutoModelForCausalLM.from_pretrained(model)(ids).logits[0]
    # The token between the parts is predicted by the first one's last.
    between = -logits[149].log_softmax(-1)[ids[0, 150]].item()
    assert begin + between + end == pytest.approx(together, abs=0.05)
    assert abs(nats("end") - end) > 0.5


def test_without_a_file_it_scores_the_held_out_part_of_pythons_own_text() -> None:
    expected = split_documents(python_documents())["held_out"]
    found = [(name, size, "".join(parts)) for name, size, parts in documents_to_score(None)]
    assert found == [(row["name"], len(row["text"].encode()), row["text"]) for row in expected]


def test_mistakes_are_one_line(
    models: dict[str, Path], texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text = str(models["infinite_former"]), ["--text", str(texts[0])]
    (tmp_path / "latin.txt").write_bytes(b"Fl\xfcsse und mehr")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    assert "gone.txt must be a text file, got no such file" in fails([model, "--text", "gone.txt"], capsys)
    assert "latin.txt must be UTF-8" in fails([model, "--text", str(tmp_path / "latin.txt")], capsys)
    assert "at least two tokens" in fails([model, "--text", str(tmp_path / "empty.txt")], capsys)
    assert "piece_length must be at least 1, got 0" in fails([model, *text, "--piece_length", "0"], capsys)
    assert str(tmp_path / "none") in fails([str(tmp_path / "none"), *text], capsys)
    assert "must be whole" in fails([model, *text, "--load_memory", str(tmp_path / "torn.safetensors")], capsys)
    missing = str(Path(model) / "nowhere" / "m.safetensors")
    assert "save_memory must lie in a folder" in fails([model, *text, "--save_memory", missing], capsys)
    assert "that of one document, got several" in fails([model, "--save_memory", "m"], capsys)
    reformer = str(models["reformer_lsh"])
    assert "infinite_former, memory_augmented have a memory" in fails([reformer, *text, "--save_memory", "m"], capsys)
    assert "device nowhere: " in fails([model, *text, "--device", "nowhere"], capsys)
    assert not Path("m").exists()


def test_a_document_too_long_for_a_model_is_one_clear_line(
    texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=384, n_embd=16, n_layer=1, n_head=2, n_positions=32)).save_pretrained(
        tmp_path
    )
    ByT5Tokenizer().save_pretrained(tmp_path)
    short, long = str(texts[1]), str(texts[0])
    assert len(scored([str(tmp_path), "--text", short], capsys)) == 1
    error = fails([str(tmp_path), "--text", short, long], capsys)
    assert error.startswith(f"a document must not be longer than the model can read, got {long}, 720 bytes; ")


def test_a_loss_that_is_not_finite_is_a_failure(
    texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = ReformerLSHForCausalLM(ReformerLSHConfig(**SIZES, attn_layers=("local",)))
    model.lm_head.weight.data *= 3e38
    model.save_pretrained(tmp_path / "broken")
    ByT5Tokenizer().save_pretrained(tmp_path / "broken")
    assert "the loss is not finite" in fails([str(tmp_path / "broken"), "--text", str(texts[1])], capsys, status=1)
