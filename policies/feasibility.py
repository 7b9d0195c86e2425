"""What cannot work, whoever proposes it."""

from __future__ import annotations

from collections.abc import Callable

from envs.port import Change
from envs.spaces import Observation

Feasibility = Callable[[Change, Observation], str | None]
"""Why a change cannot work, in one line with the numbers, or None if it can."""


def native_fits(limit: float = 0.95) -> Feasibility:
    """A feasibility check on memory: no return to native while what is in hand would not fit the pool natively.

    Needs no model of the engine: ``kv_demand`` is measured. Unknown demand is no objection.
    """

    def why_not(change: Change, observation: Observation) -> str | None:
        demand = observation.values.get("kv_demand")
        if change != Change("kv_format", "native") or demand is None or demand <= limit:
            return None
        return f"running and waiting requests would need {demand:.2f} of the pool natively, the limit is {limit:g}"

    return why_not
