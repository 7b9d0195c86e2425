"""The monotonic tick: no drift, no burst."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.ticker import PipeWaiter, Ticker
from engine.clock import ManualClock, RealClock


def test_late_looks_do_not_drift() -> None:
    ticker = Ticker(1.0, 0)
    taken = []
    now_ns = 0
    for _ in range(1000):
        if ticker.take(now_ns):
            taken.append(now_ns)
        now_ns = ticker.next_ns + 7_000_000  # always 7 ms late
    assert len(taken) == 1000
    assert taken[-1] == 999 * 10**9 + 7_000_000
    assert ticker.missed == 0


def test_a_stall_costs_ticks_and_brings_no_burst() -> None:
    ticker = Ticker(1.0, 0)
    assert ticker.take(0)
    assert ticker.take(10_300_000_000)
    assert not ticker.take(10_300_000_001)
    assert ticker.missed == 9
    assert ticker.next_ns == 11 * 10**9


@given(st.lists(st.integers(0, 5 * 10**9), max_size=50), st.integers(1, 3 * 10**9))
def test_ticks_lie_on_the_grid_and_none_is_taken_twice(steps: Any, period_ns: Any) -> None:
    ticker = Ticker(period_ns / 1e9, 0)
    now_ns, taken = 0, 0
    for step in steps:
        now_ns += step
        if ticker.take(now_ns):
            taken += 1
        assert ticker.next_ns > now_ns
        assert ticker.next_ns % period_ns == 0
        assert ticker.next_ns - now_ns <= period_ns
    assert taken + ticker.missed <= now_ns // period_ns + 1


def test_a_shorter_period_takes_effect_at_once() -> None:
    ticker = Ticker(60.0, 0)
    ticker.take(0)
    ticker.set_period(1.0, 5 * 10**9)
    assert ticker.next_ns == 6 * 10**9


@pytest.mark.parametrize("period_s", [0, -1, float("nan")])
def test_a_period_must_be_positive(period_s: Any) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Ticker(period_s, 0)


def test_the_waiter_returns_at_the_deadline_and_when_woken() -> None:
    clock = RealClock()
    waiter = PipeWaiter(clock)
    start_ns = clock.now_ns()
    waiter.wait_until(start_ns + 20_000_000)
    assert clock.now_ns() - start_ns >= 19_000_000
    threading.Timer(0.02, waiter.wake).start()
    waiter.wait_until(clock.now_ns() + 30 * 10**9)
    assert clock.now_ns() - start_ns < 10 * 10**9
    for _ in range(100_000):  # more than a pipe holds: waking never blocks
        waiter.wake()
    waiter.close()


def test_the_waiter_does_not_wait_for_the_past() -> None:
    waiter = PipeWaiter(ManualClock(start_ns=10))
    waiter.wait_until(5)
    waiter.close()
