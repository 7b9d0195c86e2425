"""Polling: which readings are believed, and when the newest one may be acted on."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autotune.collector import Collector, Health
from engine.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_ns=10**9)


@pytest.fixture
def engine(fakes: Any, clock: ManualClock) -> Any:
    return fakes.FakeEngine(clock)


@pytest.fixture
def collector(engine: Any, clock: ManualClock) -> Collector:
    return Collector(lambda: engine.stats() if engine.alive else None, clock, long_s=60, stale_after_s=5)


def poll(collector: Collector, clock: ManualClock, times: Any = 1) -> None:
    for _ in range(times):
        clock.advance_s(1)
        collector.poll()


def test_it_starts_without_knowing_anything(collector: Collector) -> None:
    assert collector.health is Health.STARTING
    assert collector.latest is None
    assert collector.window(10).after is None


def test_windows_are_differences_and_span_missed_polls(collector: Collector, engine: Any, clock: ManualClock) -> None:
    poll(collector, clock)
    for _ in range(10):
        engine.serve_requests(3)
        engine.alive = not engine.alive
        poll(collector, clock)
    engine.alive = True
    poll(collector, clock)
    assert collector.window(60).count("requests_completed") == 30
    assert collector.counters.failed_polls == 5


@pytest.mark.parametrize("emulated", [True, False, None])
def test_readings_of_an_engine_with_a_host_pool_are_believed(
    collector: Collector, engine: Any, clock: ManualClock, emulated: bool | None
) -> None:
    stats = engine.stats

    def with_host() -> Any:
        reading = stats()
        reading.gauges.host_link_is_emulated = emulated
        return reading

    engine.stats = with_host
    poll(collector, clock, 2)
    assert collector.health is not Health.STARTING
    assert collector.counters.failed_polls == 0
    assert collector.latest is not None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda f: setattr(f.gauges, "kv_usage", math.nan),
        lambda f: setattr(f.gauges, "running", -1),
        lambda f: setattr(f.gauges, "running", True),
        lambda f: setattr(f.gauges, "host_link_is_emulated", "yes"),
        lambda f: setattr(f.gauges, "memory_rss_bytes", math.inf),
        lambda f: setattr(f.counters, "requests_completed", f.counters.requests_completed - 1),
        lambda f: setattr(f.counters, "steps", "many"),
        lambda f: setattr(f.ttft, "sum_s", math.nan),
        lambda f: f.itl.counts.__setitem__(3, -2),
        lambda f: f.ttft.counts.__setitem__(slice(None), [0] * len(f.ttft.counts)),
    ],
)
def test_impossible_figures_are_refused(collector: Collector, engine: Any, clock: ManualClock, spoil: Any) -> None:
    engine.serve_requests(4)
    poll(collector, clock)
    believed = collector.latest
    spoil(engine.figures)
    poll(collector, clock)
    assert collector.health is Health.INVALID
    assert collector.problem
    assert collector.latest is believed
    assert collector.counters.invariant_violations == 1


def test_one_absurd_high_reading_does_not_blind_it_for_ever(
    collector: Collector, engine: Any, clock: ManualClock
) -> None:
    poll(collector, clock)
    engine.figures.counters.steps += 10**12
    poll(collector, clock)
    engine.figures.counters.steps -= 10**12
    poll(collector, clock, 4)
    assert collector.health is Health.INVALID
    poll(collector, clock)
    assert collector.health is Health.OK
    assert collector.window(60).before is None or collector.window(60).count("steps") == 0


def test_a_new_instance_starts_the_history_anew(collector: Collector, engine: Any, clock: ManualClock) -> None:
    engine.serve_requests(100)
    poll(collector, clock, 3)
    engine.restart()
    poll(collector, clock)
    assert collector.health is Health.OK
    assert collector.window(60).before is None
    assert collector.counters.restarts == 1
    assert collector.counters.invariant_violations == 0


def test_standing_figures_become_stale_by_our_own_clock(collector: Collector, engine: Any, clock: ManualClock) -> None:
    poll(collector, clock)
    engine.frozen = True
    poll(collector, clock, 5)
    assert collector.health is Health.OK
    poll(collector, clock)
    assert collector.health is Health.STALE
    assert collector.fresh is None
    engine.frozen = False
    poll(collector, clock)
    assert collector.health is Health.OK


def test_gone_at_once_but_the_last_reading_stays_fresh_for_a_while(
    collector: Collector, engine: Any, clock: ManualClock
) -> None:
    poll(collector, clock)
    engine.alive = False
    poll(collector, clock)
    assert collector.health is Health.GONE
    assert collector.fresh is not None
    poll(collector, clock, 5)
    assert collector.fresh is None


def test_history_is_bounded(collector: Collector, clock: ManualClock) -> None:
    poll(collector, clock, 500)
    assert len(collector._history.readings) <= 62
