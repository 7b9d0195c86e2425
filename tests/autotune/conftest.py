"""Fixtures of the daemon's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from daemon_fixtures import fakes, make_rig

from autotune.cli import app
from autotune.cli._shared import fail_with

__all__ = ["autotune", "fakes", "make_rig"]


@pytest.fixture
def autotune(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in this process: exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = fail_with(lambda: app(list(arguments), standalone_mode=False))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
