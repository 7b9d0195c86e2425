"""Windows over cumulative figures: restarts, repeated and impossible readings, quiet engines."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.stats import Counters, EngineStats, Gauges
from engine.tunables import default_values
from envs.window import History, StatsWindow, amount, number, ratio


def reading(seconds: float, *, instance: str = "a", gauges: Gauges | None = None, **counters: Any) -> EngineStats:
    return EngineStats(
        instance=instance,
        model="m",
        stamp_ns=round(seconds * 1e9),
        max_model_len=4096,
        max_num_seqs=64,
        revision=0,
        effective=default_values(),
        counters=Counters(**counters),
        gauges=gauges or Gauges(),
    )


@pytest.mark.parametrize("value", [None, "3", True, math.nan, math.inf, -math.inf, 10**400, [], {}])
def test_what_is_not_a_finite_number_is_unknown(value: object) -> None:
    assert number(value) is None
    assert amount(value) is None


def test_nothing_out_of_nothing_is_unknown() -> None:
    assert ratio(0.0, 0.0) is None
    assert ratio(1.0, None) is None
    assert ratio(0.0, 2.0) == 0.0
    assert ratio(1e308, 1e-299) is None


def test_rates_are_differences_over_the_engines_own_clock() -> None:
    window = StatsWindow.between(reading(10, requests_offered=5), reading(14, requests_offered=13))
    assert window.duration_s == 4
    assert window.rate("requests_offered") == 2
    assert window.count("requests_completed") == 0
    assert window.count("no_such_counter") is None


def test_quiet_is_zero_arrivals_and_unknown_latency() -> None:
    window = StatsWindow.between(reading(0), reading(10))
    assert window.rate("requests_offered") == 0
    assert window.quantile("ttft", 0.95) is None
    assert window.share_within("ttft", 1.0) is None
    assert window.mean("prompt_lengths") is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (reading(10, requests_offered=50), reading(11, instance="b", requests_offered=60)),  # restarted
        (reading(10, requests_offered=50), reading(10, requests_offered=60)),  # no time passed
        (reading(10, requests_offered=50), reading(9, requests_offered=60)),  # time went back
    ],
)
def test_readings_that_cannot_be_compared_tell_no_rates(before: EngineStats, after: EngineStats) -> None:
    window = StatsWindow.between(before, after)
    assert window.duration_s is None
    assert window.rate("requests_offered") is None
    assert window.gauge("running") == 0


def test_a_counter_that_fell_is_unknown_and_the_others_are_not() -> None:
    window = StatsWindow.between(reading(0, preemptions=9, steps=1), reading(1, preemptions=3, steps=2))
    assert window.rate("preemptions") is None
    assert window.rate("steps") == 1


def test_histograms_subtract_and_impossible_ones_are_unknown() -> None:
    before, after = reading(0), reading(1)
    before.ttft.observe(5.0)
    after.ttft.observe(5.0)
    after.ttft.observe(0.2, times=3)
    window = StatsWindow.between(before, after)
    assert window.quantile("ttft", 0.95) == pytest.approx(0.2, rel=0.06)
    assert window.mean("ttft") == pytest.approx(0.2)
    assert window.share_within("ttft", 1.0) == 1.0
    before.ttft.observe(1.0)  # now one bucket has shrunk
    assert StatsWindow.between(before, after).quantile("ttft", 0.5) is None
    after.ttft.counts = ["x", *after.ttft.counts[1:]]  # type: ignore[list-item]
    assert StatsWindow.between(reading(0), after).mean("ttft") is None


def test_history_gives_the_newest_start_that_is_old_enough() -> None:
    history = History(60)
    for second in range(100):
        history.add(reading(second, requests_offered=second * second))
    assert history.window(10).duration_s == 10
    assert history.window(60).duration_s == 60
    assert history.window(1000).duration_s == history.observed_s == 60
    assert history.window(0.5).duration_s == 1


def test_history_starts_again_with_another_engine_or_clock() -> None:
    history = History(60)
    for second in range(5):
        history.add(reading(second))
    history.add(reading(5, instance="b"))
    assert history.observed_s == 0
    assert history.window(10).before is None
    history.add(reading(6, instance="b"))
    history.add(reading(2, instance="b"))
    assert history.observed_s == 0


def test_a_repeated_reading_replaces_its_twin() -> None:
    history = History(60)
    for _ in range(3):
        history.add(reading(1))
    assert len(history.readings) == 1


def test_history_sees_when_knobs_changed() -> None:
    history = History(60)
    history.add(reading(0))
    assert history.since_change_s is None
    changed = reading(1)
    changed.effective = {**changed.effective, "kv_format": "int8"}
    history.add(changed)
    assert history.since_change_s == 0
    later = reading(4)
    later.effective = dict(changed.effective)
    history.add(later)
    assert history.since_change_s == 3
    history.lose()
    assert history.since_change_s is None


def test_history_is_bounded() -> None:
    history = History(5)
    for tick in range(1000):
        history.add(reading(tick * 0.1))
    assert len(history.readings) <= 52


@pytest.mark.parametrize("longest_s", [0, -1, math.nan, math.inf])
def test_history_needs_a_length(longest_s: float) -> None:
    with pytest.raises(ValueError, match="longest window"):
        History(longest_s)
