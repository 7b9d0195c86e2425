"""Readings of one address over a while, each engine behind it apart: what advice is given on, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.adapters.looks import look_of, mean_gap_s
from engine.stats import EngineStats
from envs.signals import Targets
from envs.window import History, StatsWindow, ratio
from policies.load import Lengths
from policies.restart_looks import Look


@dataclass(frozen=True)
class Seen:
    """The load at one reading, for playing it again. ``at_s``: since the first one. None where unknown."""

    at_s: float
    rate_rps: float | None
    prompt: Lengths | None
    output: Lengths | None


@dataclass
class Watched:
    """One engine. ``restarts``: seen while it was watched; windows never reach across one."""

    history: History
    looks: list[Look] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    first: EngineStats | None = None
    last: EngineStats | None = None
    began_ns: int = 0
    readings: int = 0
    restarts: int = 0

    @property
    def whole(self) -> StatsWindow:
        """From the first reading of the instance that is there now to the newest."""
        return StatsWindow.between(self.first, self.last)


class Watch:
    """Takes readings in; ``short_s`` is the window of tails, ``long_s`` of lengths."""

    def __init__(self, targets: Targets, *, short_s: float, long_s: float) -> None:
        self.targets = targets
        self._short_s, self._long_s = short_s, long_s
        self.engines: dict[str, Watched] = {}

    def take(self, readings: Mapping[str, EngineStats]) -> None:
        for label, reading in readings.items():
            self._take(self.engines.setdefault(label, Watched(History(self._long_s))), reading)

    def _take(self, engine: Watched, reading: EngineStats) -> None:
        before = engine.last
        engine.readings += 1
        if before is None:
            engine.began_ns = reading.stamp_ns
        if before is None or before.instance != reading.instance:
            engine.restarts += before is not None
            engine.first = reading
        engine.last = reading
        engine.history.add(reading)
        short = engine.history.window(self._short_s)
        was_over = bool(engine.looks and engine.looks[-1].is_over)
        look = look_of(StatsWindow.between(before, reading), short, self.targets, was_over=was_over)
        if look is not None:
            engine.looks.append(look)
        long = engine.history.window(self._long_s)
        prompt, output = (_lengths(long, name) for name in ("prompt_lengths", "output_lengths"))
        at_s = (reading.stamp_ns - engine.began_ns) / 1e9
        engine.seen.append(Seen(at_s, short.rate("requests_offered"), prompt, output))


def measured(engine: Watched, quantile: float) -> dict[str, Any]:
    """What the engine's own figures say of the time watched; None where it does not tell."""
    whole, last = engine.whole, engine.last
    if last is None:
        return {}
    gap_s = whole.quantile("itl", quantile)
    return {
        "seconds": whole.duration_s,
        "requests_per_s": whole.rate("requests_offered"),
        "completed": whole.count("requests_completed"),
        "generated_tokens_per_s": whole.rate("generation_tokens"),
        "preemptions": whole.count("preemptions"),
        "ttft_tail_s": whole.quantile("ttft", quantile),
        "tbt_tail_s": gap_s,
        "tbt_mean_s": whole.mean("itl") if gap_s is not None else mean_gap_s(whole),
        "prefix_hit_ratio": ratio(whole.count("prefix_cache_hits"), whole.count("prefix_cache_queries")),
        "capacity_tokens": getattr(last, "capacity_tokens", None),
        "slots": last.max_num_seqs,
    }


def _lengths(window: StatsWindow, name: str) -> Lengths | None:
    median, long = window.quantile(name, 0.5), window.quantile(name, 0.95)
    return Lengths.of(None if median is None else 1000 * median, None if long is None else 1000 * long)
