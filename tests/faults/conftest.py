"""Fixtures of the fault tests: the daemon's are those of its ordinary tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_path = Path(__file__).parents[1] / "autotune" / "conftest.py"
_spec = importlib.util.spec_from_file_location("autotune_conftest", _path)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
fakes = _module.fakes
make_rig = _module.make_rig
