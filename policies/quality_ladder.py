"""How far a change may go that the quality budget does not bear whole. Formats are a ladder, from native to the
smallest: part of the way is better than nothing, as a number beyond a bound is set to the bound.

What is dropped is gone, so ways of evicting are no ladder: they are borne or refused.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from engine.tunables import TUNABLES, TunableValue
from envs.port import Change
from envs.spaces import Observation
from policies.quality_budget import QualityBudget, QualityState

LADDER: Final = "kv_format"


def rungs(change: Change, now: TunableValue) -> tuple[TunableValue, ...]:
    """The values that a change of format passes on its way from where the knob is, in that order, its own the last."""
    values = TUNABLES[LADDER].values
    if change.knob != LADDER or now not in values or change.value not in values:
        return (change.value,)
    here, there = values.index(now), values.index(change.value)
    return values[here + 1 : there + 1] if here < there else tuple(reversed(values[there:here]))


def as_far_as_borne(
    budget: QualityBudget,
    change: Change,
    allowed: Collection[TunableValue],
    observation: Observation,
    state: QualityState,
) -> tuple[Change, str]:
    """What of a change the budget bears: the change itself with no word, or the farthest that is allowed on its way,
    staying included, with why it may not go on. A change that is no format's is returned as it is.
    """
    why = budget.objection(change, observation, state) if change.knob == LADDER else None
    if why is None or LADDER not in observation.tunables:
        return change, ""
    now = observation.tunables[LADDER]
    for value in reversed(rungs(change, now)[:-1]):
        nearer = Change(LADDER, value)
        if value in allowed and budget.objection(nearer, observation, state) is None:
            return nearer, why
    return Change(LADDER, now), why
