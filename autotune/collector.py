"""Polls the engine, refuses readings that cannot be true, and says whether the newest one may be acted on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from operator import lt
from typing import Final

from autotune.adapters.reading import PartialStats
from engine.clock import Clock
from engine.stats import Counters, EngineStats, Gauges, Histogram, ResidentBytes
from engine.text import one_line
from envs.window import History, StatsWindow, amount

_LOG: Final = logging.getLogger("autotune.collector")
_FORGIVE_AFTER: Final = 5


class Health(StrEnum):
    """What the last poll found; bounded, so good as a metric label."""

    OK = "ok"
    STARTING = "starting"  # no reading yet
    GONE = "gone"  # the engine does not answer
    STALE = "stale"  # it answers with the same old figures
    INVALID = "invalid"  # its figures cannot be true


@dataclass
class CollectorCounters:
    """Cumulative; fed to the metrics."""

    polls: int = 0
    failed_polls: int = 0
    invariant_violations: int = 0  # readings refused: NaN, negative, or a counter that fell
    restarts: int = 0  # a new engine instance appeared


class Collector:
    """Keeps the readings of the last ``long_s`` seconds; :meth:`poll` adds one.

    Windows are differences of readings, so a missed poll loses nothing. Reading times are the engine's own monotonic
    stamps; whether a reading is stale is judged by this process's clock, so the two clocks are never compared. Another
    instance of the engine starts the history anew. Not thread-safe: the control loop owns it.
    """

    def __init__(
        self, read: Callable[[], EngineStats | None], clock: Clock, *, long_s: float, stale_after_s: float
    ) -> None:
        self._read = read
        self._clock = clock
        self._stale_after_s = stale_after_s
        self._history = History(long_s)
        self._heard_ns = 0  # our clock when the newest reading arrived
        self._answered = True
        self._refused = 0  # in a row
        self._last_instance: str | None = None
        self.problem = ""
        """Why :attr:`health` is INVALID, in one line; else empty."""
        self.counters = CollectorCounters()

    def configure(self, *, long_s: float, stale_after_s: float) -> None:
        """Change the horizon and the patience; readings held so far stay."""
        self._stale_after_s = stale_after_s
        history = History(long_s)
        for reading in self._history.readings:
            history.add(reading)
        self._history = history

    def poll(self) -> EngineStats | None:
        """Ask the engine once; the reading if it is new and believable, else None. Never raises: whatever an engine
        answers, the loop goes on.
        """
        self.counters.polls += 1
        try:
            return self._take(self._read())
        except Exception as error:  # noqa: BLE001  # logged, once
            problem = one_line(f"its reading cannot be used: {error!r}")
            if problem != self.problem:  # once, not twice a second
                _LOG.exception("a reading of the engine could not be used")
            self._answered, self.problem = True, problem
            self.counters.invariant_violations += 1
            return None

    def _take(self, reading: EngineStats | None) -> EngineStats | None:
        self._answered = reading is not None
        if reading is None:
            self.counters.failed_polls += 1
            return None
        self._notice_instance(reading.instance)
        newest = self.latest
        self.problem = one_line(implausible(reading, newest) or "")
        if self.problem:
            self.counters.invariant_violations += 1
            self._refused += 1
            if self._refused < _FORGIVE_AFTER or implausible(reading, None) is not None:
                return None
            # So many in a row: the wrong one was the old reading. Begin a new history with this one.
            self._history.lose()
            self.problem, newest = "", None
        self._refused = 0
        if newest is not None and reading.stamp_ns <= newest.stamp_ns:
            return None
        self._heard_ns = self._clock.now_ns()
        self._history.add(reading)
        return reading

    @property
    def health(self) -> Health:
        """Whether the newest reading may be acted on: only OK may."""
        if not self._answered:
            return Health.GONE
        if self.problem:
            return Health.INVALID
        if self.latest is None:
            return Health.STARTING
        return Health.STALE if self._is_stale() else Health.OK

    @property
    def latest(self) -> EngineStats | None:
        """The newest reading however old, None before the first."""
        readings = self._history.readings
        return readings[-1] if readings else None

    @property
    def fresh(self) -> EngineStats | None:
        """The newest believable reading if it is not stale; one poll that failed does not make the engine lost."""
        return None if self._is_stale() else self.latest

    def window(self, seconds: float) -> StatsWindow:
        """The last ``seconds``, or as much of them as has been read; its ends are None where nothing is known."""
        return self._history.window(seconds)

    def since(self, stamp_ns: int) -> StatsWindow:
        """From the first reading at or after ``stamp_ns`` (the engine's clock) to the newest."""
        start = next((reading for reading in self._history.readings if reading.stamp_ns >= stamp_ns), None)
        return StatsWindow.between(start, self.latest)

    def _is_stale(self) -> bool:
        return self._clock.now_ns() - self._heard_ns > self._stale_after_s * 1e9

    def _notice_instance(self, instance: str) -> None:
        if instance == self._last_instance:
            return
        if self._last_instance is not None:
            self.counters.restarts += 1
            self._history.lose()
        self._last_instance = instance


_HISTOGRAMS: Final = ("ttft", "itl", "e2e", "queue", "prompt_lengths", "output_lengths")
_COUNTERS: Final = tuple(item.name for item in fields(Counters))
# By name: whether it may be None, and whether it is a flag.
_GAUGES: Final = tuple((item.name, "None" in str(item.type), "bool" in str(item.type)) for item in fields(Gauges))


def implausible(reading: EngineStats, before: EngineStats | None) -> str | None:
    """Why a reading cannot be true, or None: not a number, negative, or lower than a counter was ``before``.

    What an engine of another make does not tell is None in its readings; in ours a figure that is missing is wrong.
    """
    is_partial = isinstance(reading, PartialStats)
    for name in _COUNTERS:
        value = getattr(reading.counters, name)
        if value is None and is_partial:
            continue
        if amount(value) is None:
            return f"counter {name} is {value!r}"
        earlier = None if before is None else getattr(before.counters, name)
        if earlier is not None and value < earlier and name != "feedback_sum":
            return f"counter {name} fell from {earlier} to {value}"
    for name, may_be_none, is_flag in _GAUGES:
        value = getattr(reading.gauges, name)
        if value is None and not (may_be_none or is_partial):
            return f"gauge {name} is null"
        if value is None:
            continue
        if not _is_figure(name, value, is_flag=is_flag):
            return f"gauge {name} is {value!r}"
    for name in _HISTOGRAMS:
        now = getattr(reading, name)
        if now is None and is_partial:
            continue
        problem = _implausible_histogram(now, None if before is None else getattr(before, name))
        if problem is not None:
            return f"histogram {name} {problem}"
    return None


def _is_figure(name: str, value: object, *, is_flag: bool) -> bool:
    if name == "resident":
        return isinstance(value, list) and all(_is_row(row) for row in value)
    if name == "kv_bytes_per_token":
        return isinstance(value, dict) and all(amount(one) is not None for one in value.values())
    return isinstance(value, bool) if is_flag else amount(value) is not None


def _is_row(row: ResidentBytes) -> bool:
    figures = (row.block_size, row.bytes, row.tokens)
    return isinstance(row.kv_format, str) and all(amount(figure) is not None for figure in figures)


def _implausible_histogram(now: Histogram, before: Histogram | None) -> str | None:
    if amount(now.sum_s) is None or {*map(type, now.counts)} != {int} or min(now.counts) < 0:
        return f"is negative or not a number (sum {now.sum_s!r})"
    if before is not None and any(map(lt, now.counts, before.counts)):
        return "lost values"
    return None
