"""The README's section "Sharing" does what it shows, against a hub on localhost."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from local_hub import LocalHub, card_problems
from programs import call

PROGRAMS = Path(__file__).parent / "sharing_programs.py"
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SECTION = re.search(r"^## Sharing\n.*?(?=^## )", README, flags=re.MULTILINE | re.DOTALL)[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTION, flags=re.DOTALL | re.MULTILINE)


def test_the_section_does_what_it_shows(tmp_path: Path, python_without_package: Path) -> None:
    (code,) = blocks("python")
    (commands,) = blocks("bash")
    (elsewhere,) = re.findall(r"`(AutoModelForCausalLM.from_pretrained\(.*?\))`", SECTION)
    assert len(code.splitlines()) <= 10
    with LocalHub() as hub:
        words = [shlex.split(line)[1:] for line in commands.splitlines()]
        environment = hub.environment(tmp_path / "home")
        shown = call(PROGRAMS, "run", tmp_path / "here", environment, code=code, commands=words)
        assert shown["statuses"] == [0] * len(words)
        other = hub.environment(tmp_path / "other home", token=None)
        loaded = call(PROGRAMS, "load", tmp_path / "there", other, python=python_without_package, expression=elsewhere)
    assert shown["logits"] == loaded["logits"]
    assert loaded["module"].startswith("transformers_modules.")
    assert set(hub.repositories) == {"user/my-model", "user/my-bundle", "user/my-second-bundle"}
    for name in ("user/my-bundle", "user/my-second-bundle"):
        files = hub.repositories[name].files
        assert {"modeling_reformer_lsh.py", "model.safetensors", "README.md"} <= set(files)
        assert card_problems(files["README.md"].decode()) == []
