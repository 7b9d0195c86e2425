"""Notifications to the service manager, over path and abstract sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.clock import ManualClock, RealClock
from engine.sdnotify import Notifier, Watchdog, watchdog_interval_s


@pytest.fixture(params=["path", "abstract"])
def manager(request: Any, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    address = str(tmp_path / "notify") if request.param == "path" else f"@kv-autotune-test-{os.getpid()}"
    receiver.bind(address.replace("@", "\0", 1) if address.startswith("@") else address)
    receiver.settimeout(5)
    yield address, receiver
    receiver.close()


def test_messages(manager: Any) -> None:
    address, receiver = manager
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": address}, ManualClock(start_ns=12_345_678_901))
    notifier.ready("up\nand running")
    assert receiver.recv(4096) == b"READY=1\nSTATUS=up and running"
    notifier.reloading()
    assert receiver.recv(4096) == b"RELOADING=1\nMONOTONIC_USEC=12345678"
    notifier.status("x" * 10_000)
    assert len(receiver.recv(65536)) < 600
    notifier.stopping("bye")
    assert receiver.recv(4096) == b"STOPPING=1\nSTATUS=bye"
    assert notifier.failures == 0


def test_a_manager_that_is_away_is_counted_and_never_raised(tmp_path: Path) -> None:
    notifier = Notifier(str(tmp_path / "nobody"), ManualClock())
    notifier.watchdog()
    assert notifier.failures == 1


@pytest.mark.parametrize("address", [None, "", "vsock:2:1234", "relative"])
def test_without_a_usable_address_nothing_happens(address: Any) -> None:
    notifier = Notifier(address or None, ManualClock())
    assert not notifier.enabled
    notifier.ready("x")
    assert notifier.failures == 0


def test_interval_is_under_half_and_only_for_this_process() -> None:
    assert watchdog_interval_s({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "7"}, 7) < 0.25
    assert watchdog_interval_s({"WATCHDOG_USEC": "500000"}, 7) < 0.25
    assert watchdog_interval_s({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "8"}, 7) is None
    assert watchdog_interval_s({}, 7) is None
    assert watchdog_interval_s({"WATCHDOG_USEC": "soon"}, 7) is None


def test_pings_come_under_half_the_limit_and_stop_with_the_loop(manager: Any) -> None:
    address, receiver = manager
    clock = RealClock()
    alive = threading.Event()
    alive.set()
    watchdog = Watchdog(Notifier(address, clock), watchdog_interval_s({"WATCHDOG_USEC": "500000"}, 1), alive.is_set)
    watchdog.start()
    stamps = []
    for _ in range(4):
        assert receiver.recv(4096) == b"WATCHDOG=1"
        stamps.append(clock.now_ns())
    gaps_s = [(later - earlier) / 1e9 for earlier, later in pairwise(stamps)]
    assert max(gaps_s) < 0.25
    alive.clear()
    receiver.settimeout(0.4)
    late = 0
    with contextlib.suppress(TimeoutError):
        while receiver.recv(4096):
            late += 1
    assert late <= 1, "at most one was under way"
    watchdog.stop()
