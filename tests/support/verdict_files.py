"""Verdicts that nobody measured, for tests of what reads them and goes by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from envs import SIMULATED_ENGINE_ID
from policies.card import ProfileOf
from policies.profile_verdict import LEARNED, VERDICTS, Attained, Judged, Kind, ProfileVerdict, verdict_text

DIGEST = "0" * 64  # that of the made-up card
BUDGET = 0.005


def attained(value: float) -> Attained:
    return Attained(value=value, low=max(0.0, value - 0.02), high=min(1.0, value + 0.02))


def judged(kind: Kind, value: float, *, loss: float = 0.001, name: str = "", sha256: str | None = None) -> Judged:
    """``value``: its IQM."""
    usual = {"rules": "default", "predictor": "predictor", LEARNED: "made-up"}[kind]
    return Judged(
        kind=kind, name=name or usual, sha256=sha256, iqm=attained(value), worst_loss=loss, inside_budget=loss <= BUDGET
    )


def verdict(*candidates: Judged, **changes: Any) -> ProfileVerdict:
    """Of rules at 0.7 and a predictor at 0.8 if nobody is named. ``changes`` replace fields."""
    fields: dict[str, Any] = {
        "created": "2026-12-01T00:00:00Z",
        "program": "0.1.0",
        "environment": SIMULATED_ENGINE_ID,
        "profile": ProfileOf(digest=DIGEST, description="a profile", estimated=True),
        "quality_budget": BUDGET,
        "workloads": ["reasoning-long@0.5", "flash-crowd@1.2"],
        "seeds": 10,
        "duration_s": 600.0,
        "interval_s": 2.0,
        "length_scale": 1.0,
        "pool_bytes": None,
        "candidates": list(candidates) or [judged("rules", 0.7), judged("predictor", 0.8)],
        "native": attained(0.6),
        "best_static": attained(0.75),
    }
    return ProfileVerdict(**{**fields, **changes})


def put(bundled: Path, made: ProfileVerdict, name: str = "one.json") -> Path:
    """Into the folder of what is bundled."""
    folder = bundled / VERDICTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(verdict_text(made))
    return folder / name
