"""Histograms under fixed bounds. Stdlib only."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass
class Buckets:
    """Counts under fixed bounds, as Prometheus serves them: exact, where engine.stats.Histogram is 10 % wide.

    ``counts[i]`` counts values in (bounds[i - 1], bounds[i]]; the last one counts what lies beyond.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def is_one(self, low: float, high: float) -> bool:
        """Whether both values fall into the same bucket."""
        return bisect_left(self.bounds, low) == bisect_left(self.bounds, high)

    def observe_all(self, value: float, total: float, times: int) -> None:
        """Add values that sum up to ``total``, all of the bucket of ``value``."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += total

    def copy(self) -> Buckets:
        return Buckets(self.bounds, list(self.counts), self.total)
