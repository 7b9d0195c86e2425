"""What the Makefile does beside calling other things: what it keeps, and what it takes away again."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# Where the suite itself is run by make, these carry its own settings on, and clean would take away the environment that
# the suite runs in.
INHERITED = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "VENV", "ARGS")


def make(folder: Path, *arguments: str) -> str:
    plain = {name: value for name, value in os.environ.items() if name not in INHERITED}
    done = subprocess.run(
        ["make", *arguments], cwd=folder, env=plain, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "Makefile", tmp_path)
    return tmp_path


def test_clean_leaves_nothing_that_was_built(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = clone.with_name("of-somebody-else")
    elsewhere.mkdir()
    monkeypatch.setenv("MAKEFLAGS", f"-- VENV={elsewhere}")  # as under make test VENV=...
    monkeypatch.setenv("VENV", str(elsewhere))
    built = [".venv/bin/python", "run/demo/1/engine.log", "kv_autotune.egg-info/PKG-INFO", "build/x", "dist/x"]
    built += ["kernels/cpu/__pycache__/decode.nbi", "autotune/__pycache__/x.pyc", ".ruff_cache/x", ".mypy_cache/x"]
    built += [".pytest_cache/x", ".hypothesis/x", ".import_linter_cache/x"]
    for name in (*built, "kernels/cpu/decode.py"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).touch()
    make(clone, "clean")
    left = sorted(str(one.relative_to(clone)) for one in clone.rglob("*"))
    assert left == ["Makefile", "autotune", "kernels", "kernels/cpu", "kernels/cpu/decode.py"]
    assert elsewhere.is_dir()


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ("", True),
        ("--duration 25", True),
        ("--model DIR", False),
        ("--model=DIR --port 0", False),
        ("--demo --model DIR", True),
    ],
)
def test_the_demonstration_keeps_its_journal_below_run_which_git_ignores(
    clone: Path, arguments: str, kept: bool
) -> None:
    (clone / ".venv").mkdir()
    for name in ("pyproject.toml", "constraints.txt", ".venv/.engine"):
        (clone / name).touch()
    (clone / ".venv/bin").mkdir()
    (clone / ".venv/bin/python").touch()
    told = make(clone, "-n", "run", f"ARGS={arguments}", "-o", ".venv/.engine")
    assert ("autotune run --run-dir run/demo" in told) is kept
    assert "/run/" in (ROOT / ".gitignore").read_text().splitlines()
