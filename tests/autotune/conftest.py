"""Fixtures of the daemon's tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import app
from autotune.cli._shared import fail_with

# Tests are files, not a package: what several of them need lies there.
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))


def _load(name: str) -> Any:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def fakes() -> Any:
    """The module with FakeEngine and FakeControlServer."""
    _load("daemon_rig")
    return _load("fakes_engine")


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes daemons over fake engines: ``make_rig("mode: advise")``."""
    rigs = []

    def make(config: str = "", **parts: Any) -> Any:
        rig = _load("daemon_rig").Rig(tmp_path, config, **parts)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def autotune(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in this process: exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = fail_with(lambda: app(list(arguments), standalone_mode=False))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
