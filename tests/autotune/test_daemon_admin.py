"""The admin port over real HTTP."""

from __future__ import annotations

import json
import math
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from autotune.admin import AdminError, AdminServer, admin_app
from autotune.decisions import DecisionLog, DecisionRecord


def record(tick: Any, **fields: Any) -> DecisionRecord:
    base = {
        "tick": tick,
        "wall_s": 1.5,
        "knob": "kv_format",
        "old": "native",
        "new": "int8",
        "scenario": "rule",
        "reason": "kv_usage 0.9",
        "writer": "autotune",
        "verdict": "applied",
        "why": "",
    }
    return DecisionRecord(**{**base, **fields})


@pytest.fixture
def served() -> Iterator[tuple[AdminServer, DecisionLog, dict[str, Any]]]:
    registry, log, state = CollectorRegistry(), DecisionLog(size=100), {"healthy": True, "age": math.nan}
    Counter("autotune_things", "Things.", registry=registry).inc()
    server = AdminServer(admin_app(registry, log, lambda: state), "127.0.0.1", 0)
    server.start()
    yield server, log, state
    server.stop()


def get(server: Any, path: Path) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(server.address + path, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_pages(served: Any) -> None:
    server, log, state = served
    log.append(record(7))
    log.set_effect(7, {"before": {"load": 0.9}, "after": {"load": math.nan}})
    assert "autotune_things_total 1.0" in get(server, "/metrics")[1]
    (shown,) = json.loads(get(server, "/decisions")[1])["decisions"]
    assert shown == {**record(7).to_json(), "effect": {"before": {"load": 0.9}, "after": {"load": None}}}
    assert json.loads(get(server, "/status")[1]) == {"healthy": True, "age": None}
    assert get(server, "/healthz")[0] == 200
    state["healthy"] = False
    assert get(server, "/healthz")[0] == 503
    assert get(server, "/nothing")[0] == 404


def test_decisions_are_limited(served: Any) -> None:
    server, log, _ = served
    for tick in range(300):
        log.append(record(tick))
    assert [row["tick"] for row in json.loads(get(server, "/decisions?limit=2")[1])["decisions"]] == [298, 299]
    assert len(json.loads(get(server, "/decisions?limit=500")[1])["decisions"]) == 100
    for bad in ("0", "-1", "501", "x", "", "9" * 30, "9" * 5000):
        assert get(server, f"/decisions?limit={bad}")[0] == 400


def test_nothing_can_be_changed(served: Any) -> None:
    server, _, _ = served
    request = urllib.request.Request(server.address + "/status", data=b"{}", method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=5)
    assert caught.value.code == 405


def test_a_busy_or_unknown_address_is_one_line() -> None:
    app = admin_app(CollectorRegistry(), DecisionLog(), dict)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(AdminError, match=f"admin port {port} on 127.0.0.1: Address already in use"):
            AdminServer(app, "127.0.0.1", port)
    with pytest.raises(AdminError, match=r"set admin\.host"):
        AdminServer(app, "nosuch.invalid", 0)
