"""What a service manager is told of an engine: that it is ready, that its loops turn, that a step hangs, the end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import LIMIT_S, until

from engine.clock import RealClock
from engine.sdnotify import Notifier
from engine.server.run import ServerOptions

PING_S = 0.005


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(str(tmp_path / "notify"))
    receiver.settimeout(LIMIT_S)
    yield receiver
    receiver.close()


def read_until(manager: socket.socket, wanted: str) -> list[str]:
    lines: list[str] = []
    while not any(line.startswith(wanted) for line in lines):
        lines += manager.recv(4096).decode().splitlines()
    return lines


def test_ready_then_pings_then_the_end(serve: Callable[..., Any], manager: socket.socket) -> None:
    notifier = Notifier(str(manager.getsockname()), RealClock())
    server = serve(server=ServerOptions(grace_s=0, watchdog_s=PING_S), notifier=notifier)
    assert read_until(manager, "READY=1") == ["READY=1", "STATUS=serving bytes"]
    assert read_until(manager, "WATCHDOG=1") == ["WATCHDOG=1"]  # idle, and not frozen
    server.stop()
    assert read_until(manager, "STOPPING=1")[-1].startswith("STATUS=")


def test_without_a_watchdog_there_are_no_pings(serve: Callable[..., Any], manager: socket.socket) -> None:
    server = serve(notifier=Notifier(str(manager.getsockname()), RealClock()))
    server.stop()
    lines = read_until(manager, "STOPPING=1")
    assert "READY=1" in lines
    assert "WATCHDOG=1" not in lines


def test_a_step_that_hangs_is_told_and_nobody_pings_for_it(serve: Callable[..., Any], manager: socket.socket) -> None:
    begun, free = threading.Event(), threading.Event()

    def hang(_plan: object) -> None:
        begun.set()
        assert free.wait(LIMIT_S)

    notifier = Notifier(str(manager.getsockname()), RealClock())
    server = serve(server=ServerOptions(grace_s=0, stall_s=0.1, watchdog_s=PING_S), notifier=notifier)
    server.engine.runner.before = hang
    with httpx.Client(base_url=server.url, trust_env=False, timeout=LIMIT_S) as http:
        body = {"prompt": [1, 2], "max_tokens": 1}
        asking = threading.Thread(target=lambda: http.post("/v1/completions", json=body))
        asking.start()
        try:
            assert begun.wait(LIMIT_S)
            until(lambda: httpx.get(server.url + "/health", trust_env=False).status_code == 503, "a freeze to be seen")
            assert "no step has ended" in httpx.get(server.url + "/health", trust_env=False).text
            refused = httpx.post(server.url + "/v1/completions", json=body, trust_env=False)
            assert refused.status_code == 503
            assert read_until(manager, "STATUS=no step has ended")
            turns = [httpx.get(server.url + "/health", trust_env=False).status_code for _ in range(5)]
            assert turns == [503] * 5
            manager.setblocking(False)
            with pytest.raises(BlockingIOError):
                manager.recv(4096)
            manager.settimeout(LIMIT_S)
        finally:
            free.set()
            asking.join(LIMIT_S)
    until(lambda: httpx.get(server.url + "/health", trust_env=False).status_code == 200, "the engine to be well again")
    assert "WATCHDOG=1" in read_until(manager, "STATUS=serving")
