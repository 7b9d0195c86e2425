"""Fixtures of the adapters' tests."""

from __future__ import annotations

from types import ModuleType

import fake_engines as module
import pytest


@pytest.fixture(scope="session")
def fake_engines() -> ModuleType:
    """The module with FakeServer."""
    return module
