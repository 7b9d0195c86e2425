"""The limits that a guard is given, and a value brought inside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.tunables import TUNABLES, CostClass, TunableValue


@dataclass(frozen=True)
class RateLimit:
    """At most ``changes`` within ``per_s`` seconds."""

    changes: int
    per_s: float


def _dwell() -> dict[CostClass, float]:
    return {CostClass.STEP: 2.0, CostClass.BACKGROUND: 5.0, CostClass.RESTART: 600.0}


def _rates() -> dict[CostClass, RateLimit]:
    return {
        CostClass.STEP: RateLimit(20, 60.0),
        CostClass.BACKGROUND: RateLimit(12, 60.0),
        CostClass.RESTART: RateLimit(1, 600.0),
    }


@dataclass(frozen=True)
class GuardConfig:
    """Limits. Raises ValueError for values that no knob has.

    ``writer``: the daemon's own name in the control API; ``nobody``: names that stand for no writer at all (values from
    the engine's start). ``window_s``: what must have been seen before the first
    action. ``allowed``: by knob, the values that may be set (a knob left out: all of them; an empty list: none).
    ``dwell_s``: by cost class, how long a knob stays before it moves again; ``knob_dwell_s`` overrides it by knob.
    ``retry_s``: how long before a change that the engine did not take is tried again.
    """

    writer: str = "autotune"
    nobody: tuple[str, ...] = ("", "startup")
    window_s: float = 10.0
    allowed: Mapping[str, tuple[TunableValue, ...]] = field(default_factory=dict)
    dwell_s: Mapping[CostClass, float] = field(default_factory=_dwell)
    knob_dwell_s: Mapping[str, float] = field(default_factory=dict)
    rates: Mapping[CostClass, RateLimit] = field(default_factory=_rates)
    retry_s: float = 60.0

    def __post_init__(self) -> None:
        for knob, values in self.allowed.items():
            if knob not in TUNABLES:
                raise ValueError(f"allowed.{knob}: unknown tunable; known: {', '.join(TUNABLES)}")
            for value in values:
                TUNABLES[knob].parse(value)
        unknown = [knob for knob in self.knob_dwell_s if knob not in TUNABLES]
        if unknown:
            raise ValueError(f"knob_dwell_s.{unknown[0]}: unknown tunable; known: {', '.join(TUNABLES)}")


def clamped(value: object, allowed: list[TunableValue]) -> TunableValue | None:
    """``value`` if it is allowed, the nearest bound for a number beyond the allowed ones, else None."""
    numbers = [number for number in allowed if isinstance(number, int)]
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    # Whole numbers are finite however large, and some are too large to be asked.
    if numbers and (isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))):
        value = min(max(numbers), max(min(numbers), value))
    return next((candidate for candidate in allowed if candidate == value), None)
