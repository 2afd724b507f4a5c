"""The README's section "Sharing" does what it shows, against a hub on localhost."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from local_hub import LocalHub, card_problems
from programs import call

PROGRAMS = Path(__file__).parent / "sharing_programs.py"
SECTION = """\
## Sharing

```python
import hf_longmem
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("my-model")  # what `longmem train` saved
tokenizer = AutoTokenizer.from_pretrained("my-model")
model.push_to_hub("user/my-model")
tokenizer.push_to_hub("user/my-model")
hf_longmem.bundle(model, "my-bundle", tokenizer=tokenizer, push_to="user/my-bundle")
model = AutoModelForCausalLM.from_pretrained("user/my-bundle")
```

A bundle holds the code of its model beside the weights, and a model card. Who has this package runs the package's code;
who has not loads it by `AutoModelForCausalLM.from_pretrained("user/my-bundle", trust_remote_code=True)`.

```bash
longmem bundle my-model my-second-bundle --push_to user/my-second-bundle
longmem card my-second-bundle --overwrite
```

Weights are written and read as safetensors. A pickle is refused, but for the published `google/reformer-*`, which
PyTorch's restricted unpickler reads.
"""


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
