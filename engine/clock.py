"""The clock that every component is given. Durations come from here, never from wall time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time in integer nanoseconds, and wall time for display only."""

    def now_ns(self) -> int:
        """Nanoseconds of a monotonic clock with an arbitrary start."""
        ...

    def wall_s(self) -> float:
        """Seconds since the Unix epoch; may jump, never used for durations."""
        ...


class RealClock:
    """The machine's clocks."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def wall_s(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told to: tests and simulation."""

    def __init__(self, start_ns: int = 0, wall_start_s: float = 1_700_000_000.0) -> None:
        self._now_ns = start_ns
        self._wall_s = wall_start_s

    def now_ns(self) -> int:
        return self._now_ns

    def wall_s(self) -> float:
        return self._wall_s

    def advance_s(self, seconds: float) -> None:
        """Move both clocks forward; raises ValueError for a negative step of the monotonic clock."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now_ns += round(seconds * 1e9)
        self._wall_s += seconds

    def set_wall_s(self, wall_s: float) -> None:
        """Jump the wall clock alone, as NTP or an operator might."""
        self._wall_s = wall_s
