"""Tells one run of an engine from the next where the engine itself gives its runs no names."""

from __future__ import annotations

from engine.stats import EngineStats

_WATCHED = (
    "requests_completed",
    "requests_aborted",
    "requests_failed",
    "prompt_tokens",
    "generation_tokens",
    "preemptions",
    "prefix_cache_queries",
    "steps",
)


class Instances:
    """By the time at which the process started, where its page has that; else another run begins when a counter falls.

    A run that is over before anything was counted cannot be told from the next one without that time.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._last: dict[str, EngineStats] = {}
        self._runs: dict[str, int] = {}

    def name(self, label: str, reading: EngineStats, started_s: float | None) -> None:
        """Set the reading's instance, and keep its arrivals from falling within one.

        Arrivals are added up from figures that an engine updates one after the other, so they may fall by a few.
        """
        before = self._last.get(label)
        if started_s is not None:
            instance = f"{self._kind}:{label}:{started_s:.2f}"
        else:
            if before is not None and _fell(before, reading):
                self._runs[label] = self._runs.get(label, 0) + 1
            instance = f"{self._kind}:{label}:run-{self._runs.get(label, 0)}"
        reading.instance = instance
        counters = reading.counters
        if before is not None and before.instance == instance:
            earlier = before.counters.requests_offered
            if earlier is not None and counters.requests_offered is not None:
                counters.requests_offered = max(earlier, counters.requests_offered)
        self._last[label] = reading


def _fell(before: EngineStats, now: EngineStats) -> bool:
    pairs = ((getattr(before.counters, name), getattr(now.counters, name)) for name in _WATCHED)
    return any(earlier is not None and later is not None and later < earlier for earlier, later in pairs)
