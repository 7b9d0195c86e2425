"""Our own engine and daemon, and the verbs that ask them."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from canned import Canned
from daemon_rig import FakeEngine, Rig
from peer import Documents, Peer, turned
from reader import verb

from autotune.doctor.service import ask_daemon, ask_engine
from engine.clock import ManualClock
from engine.control_client import ControlClient, EngineUnreachable


def _engine() -> Documents:
    clock = ManualClock(start_ns=5_000_000_000)
    engine = FakeEngine(clock)
    engine.serve_requests(5)
    return {
        "/v1/stats": engine.stats().to_json(),
        "/v1/tunables": engine.tunables(),
        "/v1/about": {"version": "0.1", "torch": "2", "device": "cpu"},
        "/v1/pins": {"pins": [], "bytes": 0, "max_bytes": 1 << 20},
        "/v1/audit": {"problem": None, "took_s": 0.1},
    }


def _own_engine(_server: Canned, folder: Path) -> None:
    control = folder / "s"
    with ControlClient(control, timeout_s=5) as client:
        rig = Rig(folder, "", engine=client)
        try:
            turned(rig)
        finally:
            rig.close()
    for words in (
        ["status"], ["status", "--json"], ["tunables"], ["pins"], ["unpin", "--all"], ["audit"], ["release"],
        ["set", "kv_format=int8"], ["pin", "kv_format=int8", "--for", "2h"],
    ):  # fmt: skip
        verb(*words, "--control", str(control), *(["--admin", "http://127.0.0.1:9"] if words[0] == "status" else []))
    with contextlib.suppress(EngineUnreachable):
        ask_engine(control)


def _daemon() -> Documents:
    with tempfile.TemporaryDirectory() as place:
        rig = Rig(Path(place))
        rig.engine.serve_requests(5)
        rig.run_s(3)
        status = json.loads(json.dumps(dict(rig.daemon.status()), default=str))
        rig.close()
    told = {"answer": "done", "needs_restart": [], "error": "no"}
    return {"/status": status, "/control/mode": told, "/control/reload": told}


def _own_daemon(server: Canned, folder: Path) -> None:
    token = folder / "token"
    token.write_text("0123456789abcdef")
    for words in (["status"], ["status", "--json"]):
        verb(*words, "--admin", server.url, "--control", str(folder / "none"))
    for words in (["mode", "advise"], ["reload"]):
        verb(*words, "--admin", server.url, "--token-file", str(token))
    ask_daemon(server.url)


def own() -> Iterator[Peer]:
    yield Peer("our engine", _engine, _own_engine, unix=True)
    yield Peer("our daemon", _daemon, _own_daemon)
