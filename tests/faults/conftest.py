"""Fixtures of the fault tests: the daemon's are those of its ordinary tests."""

from __future__ import annotations

from daemon_fixtures import fakes, make_rig

__all__ = ["fakes", "make_rig"]
