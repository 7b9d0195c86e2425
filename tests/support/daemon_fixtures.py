"""Fixtures over fake engines and daemons, for the folders that name them in their conftest.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import fakes_engine
import pytest
from daemon_rig import Rig


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """The module with FakeEngine and FakeControlServer."""
    return fakes_engine


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes daemons over fake engines: ``make_rig("mode: advise")``."""
    rigs: list[Rig] = []

    def make(config: str = "", **parts: Any) -> Rig:
        rigs.append(Rig(tmp_path, config, **parts))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
