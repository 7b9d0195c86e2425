"""What a change did: the same figures over the window before it and over the first full window after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from envs.spaces import Observation

# Observation features that a change is judged by.
EFFECT_FEATURES: Final = (
    "load",
    "kv_usage",
    "kv_demand",
    "offered_rps",
    "goodput_rps",
    "slo_attainment",
    "ttft_tail_s",
    "tbt_tail_s",
    "waiting",
    "preemptions_per_s",
    "decode_tps",
    "recode_time_share",
    "converged_fraction",
)


@dataclass(frozen=True)
class _Pending:
    tick: int
    instance: str | None
    before: dict[str, float | None]
    due_ns: int


class PendingEffects:
    """Changes whose effect is still to be measured, in the order in which they were made."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []

    def add(self, tick: int, observation: Observation, window_s: float) -> None:
        """A change was written at ``tick``, decided on ``observation``; measure it one window later."""
        due_ns = observation.stamp_ns + round(window_s * 1e9)
        self._pending.append(_Pending(tick, observation.instance, _figures(observation), due_ns))

    def due(self, observation: Observation) -> Iterator[tuple[int, dict[str, Any]]]:
        """Tick and effect of every change that can be judged now; each is given once.

        An effect says which later changes fell into its window, since those figures are theirs as well. Without an
        engine nothing is due; another instance of it makes the effect unknown.
        """
        if observation.instance is None:
            return
        remaining: list[_Pending] = []
        for index, change in enumerate(self._pending):
            if change.instance != observation.instance:
                yield change.tick, {"unknown": "the engine was restarted before the effect could be measured"}
            elif observation.stamp_ns < change.due_ns:
                remaining.append(change)
            else:
                together = [later.tick for later in self._pending[index + 1 :]]
                yield change.tick, {"before": change.before, "after": _figures(observation), "together_with": together}
        self._pending = remaining


def _figures(observation: Observation) -> dict[str, float | None]:
    return {name: observation.values.get(name) for name in EFFECT_FEATURES}
