"""From readings to what restart advice looks at; one :class:`policies.restart_advice.Look` per pair of readings."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.adapters.base import RestartableEngine
from autotune.adapters.reading import PartialStats
from engine.tunables import TunableValue
from envs.signals import Targets
from envs.window import StatsWindow, amount, ratio
from policies.restart_advice import Settings
from policies.restart_looks import Look


def look_of(interval: StatsWindow, short: StatsWindow, targets: Targets, *, was_over: bool) -> Look | None:
    """``interval``: since the last look. ``short``: the window that tails are taken over. ``was_over``: the last look's
    word, which holds on while requests wait and none gets a first token. None for an interval without a beginning.
    """
    seconds = interval.duration_s
    if seconds is None or interval.after is None:
        return None
    waiting = interval.gauge("waiting")
    return Look(
        seconds=seconds,
        running=interval.gauge("running"),
        waiting=waiting,
        usage=interval.gauge("kv_usage"),
        slots=amount(interval.after.max_num_seqs),
        preemptions=interval.count("preemptions"),
        is_over=_is_over(short, targets, waits=was_over and bool(waiting)),
        rps=interval.rate("requests_offered"),
    )


def settings_of(engine: RestartableEngine, effective: Mapping[str, TunableValue]) -> Settings:
    """An engine's knobs as advice looks at them; ``effective``: those in force, as far as known."""
    return Settings(engine.tunables, effective, engine.storage, engine.kv_knobs, engine.slot_knob)


def mean_gap_s(window: StatsWindow) -> float | None:
    """Mean time between two tokens of a request, for engines that have no histogram of it."""
    before, after = window.before, window.after
    if not isinstance(before, PartialStats) or not isinstance(after, PartialStats):
        return None
    earlier, later = amount(before.decode_request_s), amount(after.decode_request_s)
    return None if earlier is None or later is None else ratio(later - earlier, window.count("generation_tokens"))


def _is_over(short: StatsWindow, targets: Targets, *, waits: bool) -> bool | None:
    first_s, gap_s = short.quantile("ttft", targets.quantile), short.quantile("itl", targets.quantile)
    if (first_s is not None and first_s > targets.ttft_s) or (gap_s is not None and gap_s > targets.tbt_s):
        return True
    mean_s = mean_gap_s(short)
    if gap_s is None and mean_s is not None and mean_s > targets.tbt_s:
        return True  # a tail is no better than the mean
    if waits and first_s is None:
        return True
    # An engine with histograms and nothing in them is idle; one without them does not tell.
    return False if short.histogram("ttft") is not None else None
