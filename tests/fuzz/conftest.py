"""Tests are files, not a package: what several of them need lies in these folders."""

from __future__ import annotations

import sys
from pathlib import Path

_tests = Path(__file__).parents[1]
sys.path[1:1] = [str(_tests / name) for name in ("fuzz", "support", "autotune", "autotune/adapters")]
