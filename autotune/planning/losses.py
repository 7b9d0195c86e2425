"""What settings cost in quality: a profile's or a quality table's figures, else published ones. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.profiling import read_quality
from engine.errors import EngineError
from envs.profile import Profile, Quality
from envs.reward import literature_quality


@dataclass(frozen=True)
class Losses:
    """Relative increase of perplexity when all that a token attends is stored in a format, or dropped in a way; what is
    missing has not been measured. ``is_estimated``: published figures of other models.
    """

    by_format: Mapping[str, float]
    by_eviction: Mapping[str, float]
    source: str
    is_estimated: bool


def losses(profile: Profile | None, quality: Path | None, model: Path) -> Losses:
    """The figures to plan with. Raises EngineError for a table that cannot be read or is another model's."""
    if quality is not None:
        if not model.is_dir():
            raise EngineError(f"--quality needs the model's folder, not {model}: the table belongs to its weights")
        return _of(read_quality(quality, model), f"measured, {quality.name}")
    if profile is not None and profile.quality is not None:
        kind = "estimated, published figures in the profile" if profile.quality.estimated else "measured"
        return _of(profile.quality, f"{kind}, profile of {profile.model.name}")
    usual = literature_quality()
    return Losses(usual.by_format, usual.evicted_by, "estimated, published figures of other models", is_estimated=True)


def _of(quality: Quality, source: str) -> Losses:
    known = dict(quality.evicted_by)
    if quality.evicted is not None:
        known = dict.fromkeys(("window", "heavy_hitter"), quality.evicted) | known
    return Losses(quality.by_format, known, source, quality.estimated)
