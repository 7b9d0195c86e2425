"""The contract of the control API, as its clients see it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import Brake, until

from engine.control_client import ControlClient, EngineUnreachable
from engine.errors import EngineError
from engine.paths import default_control_socket
from engine.server.control_socket import ControlSocket, allowed_uids, peer_checked_protocol
from engine.server.run import ServerOptions
from engine.tunables import TUNABLES, default_values

Serve = Callable[..., Any]


@pytest.fixture
def server(serve: Serve) -> Any:
    return serve()


@pytest.fixture
def client(server: Any) -> Iterator[ControlClient]:
    with ControlClient(server.control_path) as client:
        yield client


def test_tunables_at_start(client: ControlClient) -> None:
    view = client.tunables()
    assert view["instance"] == "instance-1"
    assert view["desired"] == view["effective"] == default_values()
    assert set(view["writers"]) == set(TUNABLES)
    assert view["writers"]["kv_format"]["writer"] == "startup"
    assert view["progress"]["resident"] == []
    assert view["progress"]["converged_fraction"] == 1
    assert view["progress"]["held_below_format_bytes"] == 0


def test_an_engine_says_what_it_is(serve: Serve) -> None:
    told = {"version": "1.2.3", "device": "cpu"}
    for about, options in ((told, ServerOptions(grace_s=0, about=told)), ({}, None)):
        with ControlClient(serve(server=options).control_path) as client:
            assert client.about() == about


def test_a_change_is_applied_recorded_and_idempotent(client: ControlClient, server: Any) -> None:
    start = client.tunables()["revision"]
    answer = client.patch({"kv_format": "int8", "max_num_seqs": 8}, writer="daemon", reason="load", if_revision=start)
    assert {name: result["status"] for name, result in answer["results"].items()} == {
        "kv_format": "applied",
        "max_num_seqs": "applied",
    }
    assert answer["revision"] == start + 1
    view = client.tunables()
    assert view["desired"]["kv_format"] == view["effective"]["kv_format"] == "int8"
    writer = view["writers"]["kv_format"]
    assert (writer["writer"], writer["reason"], writer["revision"]) == ("daemon", "load", start + 1)
    assert writer["stamp_ns"] > 0
    assert view["writers"]["block_size"]["writer"] == "startup"
    again = client.patch({"kv_format": "int8", "max_num_seqs": 8}, writer="daemon", reason="load")
    assert again == answer
    assert server.engine.stats.counters.tunable_changes == 2


def test_an_operator_takes_a_knob_over_by_asking_for_the_same_value(client: ControlClient) -> None:
    client.patch({"kv_format": "int8"}, writer="daemon")
    revision = client.tunables()["revision"]
    assert client.patch({"kv_format": "int8"}, writer="operator")["revision"] == revision + 1
    assert client.tunables()["writers"]["kv_format"]["writer"] == "operator"


def test_a_stale_revision_conflicts_and_changes_nothing(client: ControlClient) -> None:
    client.patch({"kv_format": "int8"}, writer="operator")
    before = client.tunables()
    answer = client.patch({"kv_format": "int4", "block_size": 64}, writer="daemon", if_revision=before["revision"] - 1)
    assert {result["status"] for result in answer["results"].values()} == {"conflict"}
    assert set(answer["results"]) == {"kv_format", "block_size"}
    assert answer["revision"] == before["revision"]
    assert client.tunables() == before


@pytest.mark.parametrize(
    ("changes", "bad", "hint"),
    [
        ({"kv_format": "int8", "block_size": 48}, "block_size", "16, 32, 64, 128, 256"),
        ({"kv_format": "int3"}, "kv_format", "native, int8, k8v4, int4"),
        ({"page_size": 16, "kv_format": "int8"}, "page_size", "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs", "1, 2, 4"),
        ({"max_num_seqs": True}, "max_num_seqs", "1, 2, 4"),
        ({"max_num_seqs": None}, "max_num_seqs", "1, 2, 4"),
        ({"max_num_seqs": [8]}, "max_num_seqs", "1, 2, 4"),
    ],
)
def test_one_bad_change_rejects_all(client: ControlClient, changes: dict[str, Any], bad: str, hint: str) -> None:
    before = client.tunables()
    answer = client.patch(changes, writer="daemon")
    assert {result["status"] for result in answer["results"].values()} == {"rejected"}
    assert hint in answer["results"][bad]["why"]
    assert client.tunables() == before


@pytest.mark.parametrize(
    ("method", "body", "status"),
    [
        ("PATCH", '{"changes": {}, "writer": "x"}', 400),
        ("PATCH", '{"changes": {"kv_format": "int8"}, "writer": ""}', 400),
        ("PATCH", '{"changes": {"kv_format": "int8"}}', 400),
        ("PATCH", '{"changes": {"kv_format": "int8"}, "writer": "x", "if_revison": 3}', 400),
        ("PATCH", '{"changes": {"kv_format": "int8"}, "writer": "x", "if_revision": "3"}', 400),
        ("PATCH", "{", 400),
        ("PATCH", "x" * 100_000, 413),
        ("PATCH", '{"changes": {"kv_format": "int9"}, "writer": "x"}', 422),
        ("PATCH", '{"changes": {"kv_format": "int8"}, "writer": "x", "if_revision": 99}', 409),
        ("PATCH", r'{"changes": {"\ud800": 1}, "writer": "x"}', 400),
        ("PATCH", r'{"changes": {"kv_format": "int8"}, "writer": "x", "\ud800": 1}', 400),
        ("PATCH", r'{"changes": {"kv_format": "\ud800"}, "writer": "x"}', 422),
        ("DELETE", "", 405),
    ],
)
def test_status_codes(server: Any, method: str, body: str, status: int) -> None:
    transport = httpx.HTTPTransport(uds=str(server.control_path))
    with httpx.Client(transport=transport, base_url="http://engine") as http:
        answer = http.request(method, "/v1/tunables", content=body)
        assert answer.status_code == status
        assert http.get("/v1/tunables").json()["revision"] == 0


def test_a_shrink_drains(server: Any, client: ControlClient) -> None:
    """Lowering max_num_seqs stops nothing that runs."""
    brake = server.engine.runner.before = Brake()
    statuses: list[int] = []

    def send() -> None:
        body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
        answer = httpx.post(server.url + "/v1/completions", json=body, trust_env=False, timeout=60)
        statuses.append(answer.json()["usage"]["completion_tokens"])

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: client.stats().gauges.running == 4, "four running requests")
    answer = client.patch({"max_num_seqs": 1}, writer="operator")
    assert answer["results"]["max_num_seqs"]["status"] == "converging"
    assert "4 requests" in answer["results"]["max_num_seqs"]["why"]
    assert client.stats().gauges.running == 4
    brake.let_go()
    for thread in threads:
        thread.join(60)
    assert statuses == [900] * 4
    assert client.patch({"max_num_seqs": 1}, writer="operator")["results"]["max_num_seqs"]["status"] == "applied"


def test_formats_converge_and_up_is_honest(server: Any, client: ControlClient) -> None:
    body = {"prompt": [97] * 500, "max_tokens": 1}
    assert httpx.post(server.url + "/v1/completions", json=body, trust_env=False).status_code == 200
    status = client.patch({"kv_format": "int8", "block_size": 64}, writer="operator")["results"]["kv_format"]["status"]
    assert status in {"converging", "applied"}
    until(lambda: client.tunables()["progress"]["converged_fraction"] == 1, "all KV in int8")
    rows = client.tunables()["progress"]["resident"]
    assert {"int8"} <= {row["kv_format"] for row in rows}
    assert all(row["bytes"] > 0 for row in rows)
    up = client.patch({"kv_format": "native"}, writer="operator")["results"]["kv_format"]
    assert up["status"] == "applied"
    assert re.fullmatch(r"for new KV; \d+\.\d KiB of resident KV stay in a lossier format", up["why"])
    assert client.tunables()["progress"]["held_below_format_bytes"] > 0
    assert client.stats().gauges.held_below_format_bytes > 0


def test_pins_are_made_over_http_and_ended_here(server: Any, client: ControlClient) -> None:
    assert client.pins() == {"pins": [], "bytes": 0, "max_bytes": server.engine.cache.pins.max_bytes}
    for first in (97, 98, 99):
        body = {"prompt": [first] * 40, "max_tokens": 1, "prefix_ttl_s": 100 + first}
        assert httpx.post(server.url + "/v1/completions", json=body, trust_env=False).status_code == 200
    view = client.pins()
    assert [row["ttl_s"] for row in view["pins"]] == [197, 198, 199]
    assert all(row["num_tokens"] == 32 and 0 < row["expires_in_s"] <= row["ttl_s"] for row in view["pins"])
    assert view["bytes"] == sum(row["bytes"] for row in view["pins"]) == client.stats().gauges.kv_pinned_bytes
    assert client.unpin(view["pins"][1]["id"]) == 1
    ended = view["pins"][1]["id"]
    left = sorted(row["id"] for row in client.pins()["pins"])
    with pytest.raises(ValueError, match=rf"no pin {ended}, .*those that exist: {left[0]}, {left[1]}$"):
        client.unpin(ended)
    assert client.stats().gauges.prefix_pins == 2
    assert client.unpin() == 2
    assert client.unpin() == 0
    with pytest.raises(ValueError, match="there are none"):
        client.unpin(ended)
    assert client.stats().gauges.kv_cached_bytes > 0  # still cached, until room is needed
    transport = httpx.HTTPTransport(uds=str(server.control_path))
    with httpx.Client(transport=transport, base_url="http://engine") as http:
        assert http.delete("/v1/pins/first").status_code == 404
        assert http.get("/v1/pins/1").status_code == 405
        assert http.post("/v1/pins").status_code == 405


def test_an_audit_recounts_the_cache(server: Any, client: ControlClient) -> None:
    body = {"prompt": [97] * 500, "max_tokens": 3}
    assert httpx.post(server.url + "/v1/completions", json=body, trust_env=False).status_code == 200
    found = client.audit()
    assert found["problem"] is None
    assert found["took_s"] > 0
    pool = server.engine.cache._pools[0]
    pool.resident_bytes += 64
    try:
        assert "resident" in (client.audit()["problem"] or "")
    finally:
        pool.resident_bytes -= 64
    assert client.audit()["problem"] is None


def test_stats(server: Any, client: ControlClient) -> None:
    httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 3}, trust_env=False)
    stats = client.stats()
    assert (stats.model, stats.instance) == ("bytes", "instance-1")
    assert stats.counters.requests_completed == 1
    assert stats.ttft.count == 1
    assert stats.itl.count == 2
    assert stats.effective == default_values()


# The socket


def test_an_engine_that_is_still_starting_is_not_told_to_be_started(tmp_path: Path) -> None:
    """Its socket listens before anybody takes connections, and polling fills the queue."""
    path = tmp_path / "full.sock"
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(path))
        listener.listen(1)
        for _ in range(100):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            waiting.setblocking(False)
            if waiting.connect_ex(str(path)) == errno.EAGAIN:
                break
        else:
            raise AssertionError("the queue never filled up")
        client = stack.enter_context(ControlClient(path, timeout_s=0.5))
        with pytest.raises(EngineUnreachable, match="still starting"):
            client.tunables()


def test_nobody_there() -> None:
    with ControlClient("/nonexistent/engine.sock") as client, pytest.raises(EngineUnreachable, match="autotune engine"):
        client.stats()
    with ControlClient("/tmp/" + "x" * 120) as client, pytest.raises(EngineUnreachable, match="bytes"):
        client.stats()


def test_a_server_that_is_no_engine(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()

        def answer() -> None:
            peer, _ = other.accept()
            peer.recv(4096)
            peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
            peer.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with ControlClient(path) as client, pytest.raises(EngineUnreachable):
            client.tunables()
        thread.join(5)


def test_a_kept_connection_that_has_ended_is_replaced(serve: Serve) -> None:
    first = serve()
    with ControlClient(first.control_path) as client:
        client.tunables()
        first.stop()
        with pytest.raises(EngineUnreachable, match="no engine listens here"):
            client.tunables()
        second = serve()
        second.control_path.rename(first.control_path)
        assert client.tunables()["revision"] == 0
        first.control_path.rename(second.control_path)


def _view(revision: int) -> bytes:
    """An answer to a question for the tunables."""
    progress = {"resident": [], "converged_fraction": 1.0, "held_below_format_bytes": 0}
    view = {"instance": "a", "desired": {}, "effective": {}, "writers": {}, "progress": progress}
    body = json.dumps({**view, "revision": revision}).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def test_an_answer_that_comes_too_late_is_never_taken_for_the_next_one(tmp_path: Path) -> None:
    path, asked = tmp_path / "s", threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()

        def answer() -> None:
            slow, _ = other.accept()
            slow.recv(4096)
            quick, _ = other.accept()
            quick.recv(4096)
            with contextlib.suppress(OSError):
                slow.sendall(_view(111))
            quick.sendall(_view(222))
            asked.wait(20)
            slow.close()
            quick.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with ControlClient(path, timeout_s=0.2) as client:
            with pytest.raises(EngineUnreachable, match=r"no answer within 0\.2 s$"):
                client.tunables()
            assert client.tunables()["revision"] == 222
        asked.set()
        thread.join(20)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 9000,
    ],
)
def test_whatever_answers_it_is_one_line(tmp_path: Path, answer: bytes) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()

        def serve_once() -> None:
            peer, _ = other.accept()
            peer.recv(4096)
            peer.sendall(answer)
            peer.close()

        thread = threading.Thread(target=serve_once)
        thread.start()
        with ControlClient(path, timeout_s=20) as client, pytest.raises(EngineUnreachable) as caught:
            client.tunables()
        assert "\n" not in str(caught.value)
        thread.join(20)


def test_the_socket_is_private(server: Any) -> None:
    assert stat.S_IMODE(server.control_path.stat().st_mode) == 0o600


def test_a_live_socket_is_refused_and_a_stale_one_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run" / "engine.sock"
    first = ControlSocket(path, mode=0o660)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with pytest.raises(EngineError, match="another engine listens"):
        ControlSocket(path)
    assert path.exists()
    first.close()
    assert not path.exists()
    # What kill -9 leaves behind.
    code = f"import os,socket; s=socket.socket(socket.AF_UNIX); s.bind({str(path)!r}); s.listen(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert path.exists()
    second = ControlSocket(path)
    second.close()


def test_a_clean_stop_leaves_nothing_and_a_lock_that_was_removed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock, removed, real = tmp_path / "e.sock", tmp_path / "e.sock.lock", [], fcntl.flock

    def flock(handle: int, how: int) -> None:
        real(handle, how)
        if not removed:
            lock.unlink()  # the last act of the engine before, between our open and our lock
            removed.append(lock)

    monkeypatch.setattr(fcntl, "flock", flock)
    first = ControlSocket(path)
    with lock.open() as handle, pytest.raises(BlockingIOError):
        real(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(EngineError, match="another engine listens"):
        ControlSocket(path)
    assert lock.exists(), "who is refused leaves the lock"
    first.close()
    assert list(tmp_path.iterdir()) == []


def test_something_else_that_listens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(EngineError, match="another engine listens"):
            ControlSocket(path)
    path.unlink()
    path.write_text("precious")
    with pytest.raises(EngineError, match="not a socket"):
        ControlSocket(path)
    assert path.read_text() == "precious"


def test_a_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="more than the 107") as caught:
        ControlSocket(tmp_path / ("x" * 120))
    assert "\n" not in str(caught.value)


def test_a_folder_open_to_everyone_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(EngineError, match="writable for everyone"):
        ControlSocket(folder / "engine.sock")


def test_other_users_are_cut_off(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's uid decides; here ours is made to look wrong, since a test has only one."""
    monkeypatch.setattr("engine.server.run.allowed_uids", lambda _extra: frozenset({os.geteuid() + 1}))
    server = serve()
    with ControlClient(server.control_path) as client, pytest.raises(EngineUnreachable, match="allowed"):
        client.tunables()
    assert httpx.get(server.url + "/health", trust_env=False).status_code == 200


def test_who_is_allowed() -> None:
    assert allowed_uids((7,)) == {os.geteuid(), 0, 7}
    assert issubclass(peer_checked_protocol({0}), object)


def test_default_path() -> None:
    assert default_control_socket({"XDG_RUNTIME_DIR": "/run/user/7"}, 7) == Path("/run/user/7/kv-autotune/engine.sock")
    assert default_control_socket({}, 0) == Path("/run/kv-autotune/engine.sock")
    assert default_control_socket({"XDG_RUNTIME_DIR": "relative"}, 7) == Path("/tmp/kv-autotune-7/engine.sock")
