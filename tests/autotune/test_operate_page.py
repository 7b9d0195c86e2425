"""The page for operators: every fault names a test that exists, every command is one."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from autotune.cli import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/operate.md").read_text()


def test_every_fault_names_a_test_that_exists() -> None:
    table = PAGE.partition("## Faults")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        found = re.search(r"`(tests/[\w/.]+)::(\w+)` \|$", row)
        assert found is not None, row
        assert f"def {found[2]}(" in (ROOT / found[1]).read_text(), row


def test_every_command_is_one() -> None:
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"(?:`|\$ )autotune ([a-z][a-z-]+)", PAGE))
    assert len(named) > 8
    assert named <= known, named - known
