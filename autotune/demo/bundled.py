"""The model that comes with the engine, and its profile."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from autotune.demo.options import DemoError


def bundled_model() -> Path:
    """The model that comes with the engine. Found without importing torch. Raises DemoError without the engine."""
    return _package("engine") / "bundled" / "model"


def bundled_profile(model: Path) -> Path | None:
    """The profile that comes with the bundled model: what settings lose on it, whatever machine this is. None for any
    other model, and where none has come with it.
    """
    path = _package("envs") / "profiles" / "bundled_cpu.yaml"
    return path if path.is_file() and model.resolve() == bundled_model().resolve() else None


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise DemoError(f"the package `{name}` is not installed")
    return Path(spec.origin).parent
