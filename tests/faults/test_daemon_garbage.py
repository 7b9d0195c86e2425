"""What an earlier run left that nobody can use, and answers that nobody can read: the loop goes on, and says so."""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
import threading
from pathlib import Path
from typing import Any, Never, Self

import pytest

from autotune.adapters.web import Web
from engine.control_client import ControlClient, EngineUnreachable

PRESSURE = "policy: {rules: literature, quality_budget: null}\n"
JOURNAL = "journal.db"


def pressed(engine: Any) -> None:
    engine.set_usage(0.95, running=60, waiting=30)
    engine.serve_requests(5, ttft_s=3.0, gap_s=0.2)


def rewrite(path: Path, change: dict[str, Any] | str) -> None:
    """Have the journal's memory of the loop be other than it was: parts of it, or the whole text."""
    with sqlite3.connect(path) as connection:
        (text,) = connection.execute("SELECT value FROM memory WHERE key = 'loop'").fetchone()
        value = change if isinstance(change, str) else json.dumps({**json.loads(text), **change})
        connection.execute("UPDATE memory SET value = ? WHERE key = 'loop'", (value,))
    connection.close()


OPEN = {"instance": "a", "moved_ns": 0, "back": [], "failed": [], "cooling": {}, "values": {}}


@pytest.mark.parametrize(
    "change",
    [
        "nonsense",
        "[" * 100_000,
        "[" * 900 + "]" * 900,
        "5",
        {"policy": 5},
        {"policy": {"since": {"load": "x"}, "active": 3}},
        {"guard": None},
        {"guard": {"quality": 3}},
        {"guard": {"changed": 5, "quality": {"purse": "x"}}},
        {"watch": [1]},
        {"watch": {**OPEN, "open": [5]}},
        {"watch": {**OPEN, "failed": [{"knob": [], "value": {}, "tick": None, "conditions": 1}], "open": []}},
        {"instance": [1]},
        {"replaced": {"kv_format": ["native"]}},
    ],
)
def test_states_that_nobody_can_use_are_begun_anew(make_rig: Any, tmp_path: Path, change: Any) -> None:
    """The daemon comes up, one tick may fail by them, and neither the next nor the next daemon does."""
    first = make_rig(PRESSURE)
    first.run_s(14, lambda: pressed(first.engine))
    assert first.engine.state.revision == 1
    first.close()
    rewrite(tmp_path / JOURNAL, change)
    for most_failed in (1, 0):
        again = make_rig(PRESSURE, engine=first.engine, clock=first.clock)
        again.daemon.restore()
        again.run_s(8, lambda: pressed(again.engine))  # noqa: B023
        assert again.loop.ticks == 8
        assert again.metric("autotune_tick_errors_total") <= most_failed
        assert again.daemon.status()["healthy"], again.daemon.status()["problem"]
        again.close()


def test_a_state_that_fails_later_is_begun_anew_as_well(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a tick has gone well with it, three in a row have to fail: one failure may be anything's."""
    rig = make_rig(PRESSURE)
    rig.run_s(4, lambda: pressed(rig.engine))
    guard = type(rig.parts.minds.guard)
    check = guard.check

    def strict(self: Any, proposal: Any, context: Any, state: Any) -> Any:
        assert "wrong" not in state
        return check(self, proposal, context, state)

    monkeypatch.setattr(guard, "check", strict)
    rig.loop._memory.states.guard["wrong"] = 5
    rig.run_s(8, lambda: pressed(rig.engine))
    assert rig.metric("autotune_tick_errors_total") == 3
    assert rig.daemon.status()["healthy"]


@pytest.mark.parametrize("error", [OverflowError("too large"), RecursionError(), KeyError("x"), MemoryError()])
def test_a_reading_that_cannot_be_used_is_told_once_and_never_ends_the_loop(
    make_rig: Any, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(3, lambda: pressed(rig.engine))
    stats = rig.engine.stats

    def fail() -> Never:
        raise error

    rig.engine.stats = fail
    rig.run_s(3)
    status = rig.daemon.status()
    assert (status["engine"], status["healthy"]) == ("invalid", False)
    assert "its reading cannot be used" in status["problem"]
    assert rig.parts.collector.counters.invariant_violations == 6
    assert rig.metric("autotune_tick_errors_total") == 0
    assert sum("could not be used" in record.message for record in caplog.records) == 1
    rig.engine.stats = stats
    rig.run_s(1)
    assert rig.daemon.status()["engine"] == "ok"


class Dripping:
    """A server that is never silent for long and never comes to an end. ``head`` comes at once; use it in ``with``."""

    def __init__(self, listener: socket.socket, head: bytes) -> None:
        self._listener, self._head = listener, head
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self._listener.listen(4)
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            stream, _ = self._listener.accept()
            with stream:
                stream.recv(65536)
                stream.sendall(self._head)
                while not self._over.wait(0.01):
                    stream.sendall(b" ")


HEADS = {"in the body": b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n{", "in the head": b"HTTP/1.1 200 OK\r\nx:"}


@pytest.mark.parametrize("where", HEADS)
def test_an_engine_that_answers_without_end_is_given_up_in_time(tmp_path: Path, where: str) -> None:
    """Every byte of it comes in time; the whole never would."""
    with (
        socket.socket(socket.AF_UNIX) as listener,
        ControlClient(tmp_path / "s", timeout_s=0.2) as client,
    ):
        listener.bind(str(tmp_path / "s"))
        with Dripping(listener, HEADS[where]), pytest.raises(EngineUnreachable, match="no answer within"):
            client.stats()


def test_an_engine_of_another_make_that_does_is_given_up_as_well() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    web = Web(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.2)
    with Dripping(listener, HEADS["in the body"]), pytest.raises(EngineUnreachable, match="too long"):
        web.text("/metrics")


def test_a_page_that_ends_early_is_not_read() -> None:
    """Its last figure might be a part of one, and a counter that fell is taken for a restart."""
    listener = socket.create_server(("127.0.0.1", 0))
    web = Web(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=30)

    def serve() -> None:
        with listener.accept()[0] as stream:
            stream.recv(65536)
            stream.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nvllm:num_requests_running 1")

    with listener:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(EngineUnreachable, match="cut off"):
            web.text("/metrics")
        thread.join()
