"""What the Makefile does beside calling other things: what it keeps, and what it takes away again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# Where the suite itself is run by make, these carry its own settings on, and clean would take away the environment that
# the suite runs in.
INHERITED = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "VENV", "ARGS", "WORKERS")


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


def built(clone: Path) -> None:
    for name in ("pyproject.toml", "constraints.txt", ".venv/.dev", ".venv/bin/python"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).touch()


@pytest.mark.parametrize(
    ("given", "workers"),
    [
        (("CORES=1", "FREE=20"), 0),
        (("CORES=2", "FREE=20"), 2),
        (("CORES=64", "FREE=100"), 4),
        (("CORES=8", "FREE=3"), 3),
        (("CORES=8", "FREE=1"), 0),
        (("CORES=8", "FREE=0"), 0),
        (("CORES=8", "FREE=20", "ARGS=tests/engine -x"), 0),
        (("CORES=8", "FREE=20", "ARGS=tests/engine -x", "WORKERS=3"), 3),
    ],
)
def test_the_whole_suite_runs_in_as_many_processes_as_the_machine_has_room_for(
    clone: Path, given: tuple[str, ...], workers: int
) -> None:
    built(clone)
    (told,) = [line for line in make(clone, "-n", "test", *given).splitlines() if "-m pytest" in line]
    assert f" -n {workers} --dist worksteal" in told
    assert told.rstrip().endswith("tests/engine -x") is any(one.startswith("ARGS") for one in given)


def test_cores_and_memory_are_those_of_this_machine(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what OMP_NUM_THREADS says, which nproc would tell."""
    built(clone)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cores = min(4, len(os.sched_getaffinity(0)))
    assert f" -n {cores if cores > 1 else 0} " in make(clone, "-n", "test", "FREE=4")
    free = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
    found = re.search(r" -n (\d) ", make(clone, "-n", "test", "CORES=4"))
    assert free is not None
    assert found is not None
    room = min(4, int(free[1]) >> 21)
    near = {room - 1, room, room + 1}  # other processes take and leave memory meanwhile
    assert int(found[1]) in {number if number > 1 else 0 for number in near}


def test_what_ci_runs_is_what_the_readme_says() -> None:
    assert "\nmake test    # the test suite\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("make ")] == [
        'make dev VENV="$venv"', 'make lint VENV="$venv"', 'make test VENV="$venv"'
    ]  # fmt: skip
