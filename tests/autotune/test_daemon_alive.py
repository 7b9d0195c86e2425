"""Health turns 503 and pings stop for a loop that is frozen, and only then: not for one that waits or that is slow."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.clock import RealClock
from engine.sdnotify import Notifier, Watchdog

PING_S = 0.01
PRESSURE = "policy: {rules: literature, quality_budget: null}\n"


def pressed(engine: Any) -> None:
    engine.set_usage(0.95, running=60, waiting=30)
    engine.serve_requests(5, ttft_s=3.0, gap_s=0.2)


def slow(rig: Any, seconds: float, look: Callable[[], None]) -> None:
    """Have every call to the engine take so long; ``look`` at the end of each."""

    def made_slow(call: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*given: Any, **options: Any) -> Any:
            rig.clock.advance_s(seconds)
            look()
            return call(*given, **options)

        return answer

    for name in ("stats", "tunables", "patch"):
        setattr(rig.engine, name, made_slow(getattr(rig.engine, name)))


def health(rig: Any) -> int:
    try:
        with urllib.request.urlopen(f"{rig.daemon.admin.address}/healthz", timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(("timeout_s", "call_s"), [(2, 1.9), (20, 19), (60, 59)])
def test_slow_calls_are_no_freeze(make_rig: Any, timeout_s: float, call_s: float) -> None:
    """The longest turn there is: a reading, a look at the knobs and a write, each nearly as long as its patience."""
    windows = "window_s: 300\nlong_window_s: 600\n"
    rig = make_rig(f"{PRESSURE}{windows}engine: {{poll_s: 0.5, timeout_s: {timeout_s}, stale_after_s: 600}}\n")
    looks: list[bool] = []
    slow(rig, call_s, lambda: looks.append(rig.loop.alive()))
    rig.run_s(40 * call_s + 600, lambda: pressed(rig.engine))
    assert len(looks) > 40
    assert all(looks)
    assert rig.engine.state.revision > 0, "nothing was written: the longest turn was not seen"


@pytest.mark.parametrize(("tick_s", "poll_s"), [(1, 0.5), (600, 60), (0.05, 0.02)])
def test_waiting_for_what_is_due_is_no_freeze_and_being_late_is(make_rig: Any, tick_s: float, poll_s: float) -> None:
    config = (
        f"tick_s: {tick_s}\nengine: {{poll_s: {poll_s}, stale_after_s: 600}}\nwindow_s: 1200\nlong_window_s: 2400\n"
    )
    rig = make_rig(config)
    rig.run_s(3 * poll_s)
    due_ns = rig.loop.turn()
    rig.clock.advance_s((due_ns - rig.clock.now_ns()) / 1e9 + 9.9)
    assert rig.loop.alive(), "a little late"
    assert rig.daemon.status().get("problem") != "the control loop is stuck"
    rig.clock.advance_s(0.2)
    assert not rig.loop.alive()
    assert rig.daemon.status()["problem"] == "the control loop is stuck"
    rig.loop.turn()
    assert rig.loop.alive()


def test_a_frozen_loop_turns_health_to_503_and_stops_the_pings_until_it_goes_on(make_rig: Any, tmp_path: Path) -> None:
    rig = make_rig("admin: {enabled: true, port: 0}\n")
    rig.engine.serve_requests(5)
    rig.daemon.admin.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        watchdog = Watchdog(Notifier(str(tmp_path / "notify"), RealClock()), PING_S, rig.loop.alive)
        rig.run_s(3, lambda: rig.engine.serve_requests(1))
        watchdog.start()
        seen: list[Any] = []

        def frozen() -> None:
            """Looked at from outside while the loop hangs in a call."""
            if seen:
                return
            assert manager.recv(100) == b"WATCHDOG=1"
            seen.append(health(rig))
            rig.clock.advance_s(11)
            seen.append(health(rig))
            seen.append(pings_stop(manager))

        try:
            slow(rig, 0.0, frozen)
            rig.run_s(1)
            assert seen == [200, 503, True]
            assert manager.recv(100) == b"WATCHDOG=1", "it goes on"
            rig.run_s(3, lambda: rig.engine.serve_requests(1))
            assert health(rig) == 200
        finally:
            watchdog.stop()
            rig.daemon.admin.stop()


def pings_stop(manager: socket.socket) -> bool:
    """No ping for twenty times as long as between two, once those under way have come."""
    before = manager.gettimeout()
    try:
        manager.settimeout(20 * PING_S)
        for _ in range(10_000):
            manager.recv(100)
    except TimeoutError:
        return True
    finally:
        manager.settimeout(before)
    return False
