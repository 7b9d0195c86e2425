"""Quantiles of millions of durations in little memory. Stdlib only."""

from __future__ import annotations

import math
from collections.abc import Mapping


class Tail:
    """Durations in logarithmic buckets 1 % wide: quantiles err by under half of that, memory does not grow."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.number = 0

    def add(self, duration_ns: int, times: int = 1) -> None:
        """A duration of 0 counts as 1 ns."""
        bucket = round(math.log(max(1, duration_ns)) * 100)
        self._counts[bucket] = self._counts.get(bucket, 0) + times
        self.number += times

    def add_all(self, counts: Mapping[int, int]) -> None:
        """Durations in nanoseconds and how often each occurred."""
        for duration_ns, times in counts.items():
            self.add(duration_ns, times)

    def quantile_s(self, q: float) -> float | None:
        """The q-quantile in seconds, None without values."""
        rank, seen = max(1, math.ceil(q * self.number)), 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                return math.exp(bucket / 100) / 1e9
        return None
