"""Windows over an engine's cumulative figures: differences of two readings, whatever the readings hold. Stdlib only.

An engine may restart (its counters begin again), answer with a field missing, or be wrong. What cannot be known is
None, never 0; a quiet window is a valid one with zero arrivals.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import Final

from engine.stats import HISTOGRAM_BUCKETS, EngineStats, Histogram

_ABSURD_COUNT: Final = 2**62


def number(value: object) -> float | None:
    """``value`` as a finite float, or None for anything else (booleans, text, NaN, infinities, absurd integers)."""
    if type(value) is float:  # the usual case
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def amount(value: object) -> float | None:
    """``value`` as a finite float >= 0, or None."""
    result = number(value)
    return result if result is not None and result >= 0 else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """Share of part in whole; None when either is unknown or the whole is 0 (0/0 at idle is unknown, not 0)."""
    if part is None or whole is None or whole <= 0:
        return None
    return number(part / whole) if whole > 1e-300 else None


@dataclass(frozen=True)
class StatsWindow:
    """What happened between two readings of the same engine instance.

    ``before`` is None when there is no usable earlier reading; then only the gauges of ``after`` are known. ``after``
    is None when the engine is lost; then nothing is.
    """

    before: EngineStats | None
    after: EngineStats | None
    _differences: dict[str, Histogram | None] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def between(cls, before: EngineStats | None, after: EngineStats | None) -> StatsWindow:
        """A window that drops ``before`` when it belongs to another instance or does not lie before ``after``."""
        if before is None or after is None or before.instance != after.instance:
            return cls(None, after)
        start, end = number(before.stamp_ns), number(after.stamp_ns)
        return cls(before if start is not None and end is not None and start < end else None, after)

    @property
    def duration_s(self) -> float | None:
        """Length in seconds, > 0, by the engine's own clock; None for a window without a start."""
        if self.before is None or self.after is None:
            return None
        return (self.after.stamp_ns - self.before.stamp_ns) / 1e9

    def count(self, counter: str) -> float | None:
        """How much a counter of :class:`engine.stats.Counters` grew; None when it fell or either value is unusable."""
        if self.before is None or self.after is None:
            return None
        earlier, later = (amount(getattr(stats.counters, counter, None)) for stats in (self.before, self.after))
        return None if earlier is None or later is None else amount(later - earlier)

    def rate(self, counter: str, scale: float = 1.0) -> float | None:
        """Growth per second, times ``scale``."""
        grown = ratio(self.count(counter), self.duration_s)
        return None if grown is None else grown * scale

    def gauge(self, name: str) -> float | None:
        """A gauge of the last reading, None when it is not a number >= 0."""
        return None if self.after is None else amount(getattr(self.after.gauges, name, None))

    def histogram(self, name: str) -> Histogram | None:
        """Values added to a histogram in the window (maybe none at all); None when it shrank or cannot be read."""
        if self.before is None or self.after is None:
            return None
        if name not in self._differences:  # several figures come from each
            earlier, later = getattr(self.before, name, None), getattr(self.after, name, None)
            self._differences[name] = _difference(earlier, later)
        return self._differences[name]

    def quantile(self, name: str, q: float) -> float | None:
        """The q-quantile of a histogram's values in the window, in seconds; None without values."""
        histogram = self.histogram(name)
        return None if histogram is None else number(histogram.quantile_s(q))

    def mean(self, name: str) -> float | None:
        """The mean of a histogram's values in the window, in seconds; None without values."""
        histogram = self.histogram(name)
        return None if histogram is None else ratio(histogram.sum_s, float(histogram.count))

    def share_within(self, name: str, limit_s: float) -> float | None:
        """Share of a histogram's values in the window that are <= ``limit_s``; None without values."""
        histogram = self.histogram(name)
        return None if histogram is None else histogram.share_within(limit_s)


def _difference(earlier: object, later: object) -> Histogram | None:
    if not isinstance(earlier, Histogram) or not isinstance(later, Histogram):
        return None
    if len(earlier.counts) != HISTOGRAM_BUCKETS or len(later.counts) != HISTOGRAM_BUCKETS:
        return None
    if {*map(type, later.counts), *map(type, earlier.counts)} != {int} or max(later.counts) > _ABSURD_COUNT:
        return None
    counts = list(map(sub, later.counts, earlier.counts))
    if min(counts) < 0:
        return None
    total_now, total_before = number(later.sum_s), number(earlier.sum_s)
    if total_now is None or total_before is None:
        return None
    # Sums of floats may fall short of each other by rounding, never by more.
    if total_now < total_before - 1e-6 * abs(total_before):
        return None
    return Histogram(counts, max(0.0, total_now - total_before))


class History:
    """Recent readings of one engine instance, newest last: windows of any length up to ``longest_s``.

    A reading of another instance, or one whose clock went back, starts the history again; so does :meth:`lose`.
    """

    def __init__(self, longest_s: float) -> None:
        if not (math.isfinite(longest_s) and longest_s > 0):
            raise ValueError(f"the longest window must be > 0 s, got {longest_s}")
        self._longest_ns = round(longest_s * 1e9)
        self._readings: deque[EngineStats] = deque()
        self._changed_ns: int | None = None

    def add(self, stats: EngineStats) -> None:
        """Take a reading in. A repeated one (same stamp) replaces its twin; one without a usable stamp is ignored."""
        if number(stats.stamp_ns) is None:
            return
        last = self._readings[-1] if self._readings else None
        if last is not None and (last.instance != stats.instance or stats.stamp_ns < last.stamp_ns):
            self.lose()
            last = None
        if last is not None and last.effective != stats.effective:
            self._changed_ns = stats.stamp_ns
        if last is not None and last.stamp_ns == stats.stamp_ns:
            self._readings.pop()
        self._readings.append(stats)
        # The first reading at least a longest window old is kept: it is that window's start.
        while len(self._readings) > 2 and stats.stamp_ns - self._readings[1].stamp_ns >= self._longest_ns:
            self._readings.popleft()

    def lose(self) -> None:
        """The engine went away: nothing from before may be compared with what comes after."""
        self._readings.clear()
        self._changed_ns = None

    @property
    def readings(self) -> Sequence[EngineStats]:
        return tuple(self._readings)

    @property
    def observed_s(self) -> float:
        """Seconds between the oldest reading held and the newest one (at most a little over the longest window)."""
        return (self._readings[-1].stamp_ns - self._readings[0].stamp_ns) / 1e9 if self._readings else 0.0

    @property
    def since_change_s(self) -> float | None:
        """Seconds since the knobs in force were first seen changed, None when no change has been seen."""
        if self._changed_ns is None or not self._readings:
            return None
        return (self._readings[-1].stamp_ns - self._changed_ns) / 1e9

    def window(self, seconds: float) -> StatsWindow:
        """The window over about the last ``seconds``: from the newest reading at least that old, else the oldest."""
        if not self._readings:
            return StatsWindow(None, None)
        after = self._readings[-1]
        before = self._readings[0]
        for reading in reversed(self._readings):
            if after.stamp_ns - reading.stamp_ns >= round(seconds * 1e9):
                before = reading
                break
        return StatsWindow.between(before, after)
