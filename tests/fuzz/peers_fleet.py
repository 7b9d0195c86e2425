"""A Prometheus that knows a fleet, and the verb that asks it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from canned import Canned
from peer import Documents, Peer
from reader import verb

_NOW_S: Final = 1_800_000_000.0
_TARGET: Final = {"job": "autotune", "instance": "a:9466", "pod": "a-0", "namespace": "llm"}


def _prometheus() -> Documents:
    gauges = {"autotune_load": 0.5, "autotune_num_requests_running": 3.0, "vllm:num_requests_running": 2.0}
    labelled = {
        "autotune_mode": {"mode": "active"}, "autotune_engine_health": {"state": "ok"},
        "autotune_policy": {"policy": "rules"}, "autotune_override": {"knob": "kv_format"},
        "autotune_tunable": {"knob": "kv_format", "value": "int8"}, "autotune_kv_resident_bytes": {"kv_format": "int8"},
        "autotune_window_ttft_seconds": {"percentile": "95"}, "autotune_target_seconds": {"metric": "ttft"},
    }  # fmt: skip
    rows = [_row(name, {}, value) for name, value in gauges.items()]
    rows += [_row(name, labels, 1.0) for name, labels in labelled.items()]
    counter = {"metric": {"__name__": "autotune_decisions_total", "verdict": "applied", "knob": "kv_format", **_TARGET},
               "values": [[_NOW_S - 60 * n, str(9 - n)] for n in range(5, 0, -1)]}  # fmt: skip
    return {
        "time": _told("scalar", [_NOW_S, str(_NOW_S)]),
        "names": _told("vector", rows),
        "up": _told("vector", [_row("up", {}, 1.0)]),
        "lately": _told("vector", [_row("autotune_ticks_total", {}, 5.0)]),
        "decisions": _told("matrix", [counter]),
    }


def _row(name: str, labels: Mapping[str, str], value: float) -> dict[str, Any]:
    return {"metric": {"__name__": name, **labels, **_TARGET}, "value": [_NOW_S, str(value)]}


def _told(kind: str, result: Any) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": kind, "result": result}}


def _fleet(server: Canned, _folder: Path) -> None:
    told = server.reply

    def by_query(method: str, _path: str, body: bytes) -> bytes:
        kinds = {b"time": "time", b"up": "up", b"last_over_time": "lately", b"s%5D": "decisions"}
        kind = next((kind for word, kind in kinds.items() if b"query=" + word in body or body.endswith(word)), "names")
        return told(method, kind, body)

    server.reply = by_query
    for more in ([], ["--json"]):
        verb("fleet", "--prometheus", server.url, *more)


def prometheus() -> Iterator[Peer]:
    yield Peer("Prometheus", _prometheus, _fleet)
