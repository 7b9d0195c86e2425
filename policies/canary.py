"""Coarse changes begin with one step: the next declared value on the way, judged before anything goes further."""

from __future__ import annotations

from collections.abc import Collection

from engine.tunables import TUNABLES
from envs.port import Change
from envs.spaces import Observation


def first_step(change: Change, observation: Observation, knobs: Collection[str]) -> Change | None:
    """The step to take in place of ``change``; None where it is not coarse, or its knob is not among ``knobs``."""
    tunable = TUNABLES.get(change.knob)
    if tunable is None or change.knob not in knobs or change.value not in tunable.values:
        return None
    now = observation.tunables.get(change.knob)
    if now not in tunable.values:
        return None
    here, there = tunable.values.index(now), tunable.values.index(change.value)
    if abs(there - here) < 2:
        return None
    return Change(change.knob, tunable.values[here + (1 if there > here else -1)])
