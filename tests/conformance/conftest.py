"""Makes ``support/`` importable and transformers' markers known, and holds every skip against the list of skips."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

from harness import source
from harness.skips import reason_to_skip

_MARKERS = (
    "accelerate_tests",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "flash_attn_test",
    "is_fsdp_test",
    "is_pipeline_test",
    "is_training_test",
    "order",
    "slow",
    "torch_compile_test",
)

collect_ignore = ["support"]
try:
    source.fetch()
except source.TestsUnavailable:
    collect_ignore += ["test_infinite_former.py", "test_reformer_lsh.py"]  # test_source.py fails, and says why


def pytest_configure(config: pytest.Config) -> None:
    for name in _MARKERS:
        config.addinivalue_line("markers", f"{name}: set by transformers' tests")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    file = item.path.name
    if report.skipped and file.startswith("test_") and reason_to_skip(file, item.name) is None:
        report.outcome = "failed"
        report.longrepr = f"{item.name} is skipped, and not in the list of skips: {report.longrepr}"
    return report
