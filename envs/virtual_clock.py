"""Simulated time: whole nanoseconds that pass only when told to. Stdlib only."""

from __future__ import annotations


class VirtualClock:
    """An :class:`engine.clock.Clock` that starts at 0; its wall clock started at ``wall_start_s``."""

    def __init__(self, wall_start_s: float = 1_700_000_000.0) -> None:
        self._now_ns = 0
        self._wall_start_s = wall_start_s

    def now_ns(self) -> int:
        return self._now_ns

    def wall_s(self) -> float:
        return self._wall_start_s + self._now_ns / 1e9

    def advance_ns(self, duration_ns: int) -> int:
        """Let time pass; returns what it is then. Raises ValueError for a negative duration."""
        if duration_ns < 0:
            raise ValueError(f"time does not go back by {-duration_ns} ns")
        self._now_ns += duration_ns
        return self._now_ns

    def move_to_ns(self, now_ns: int) -> None:
        """Let time pass up to a moment; one that has passed already changes nothing."""
        self._now_ns = max(self._now_ns, now_ns)
