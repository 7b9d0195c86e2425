"""Orders over the admin port: refused without the token, done by the loop, answered in one line."""

from __future__ import annotations

import json
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from autotune.admin_token import TokenError, own_token, read_token
from autotune.cli import app
from autotune.cli._shared import fail_with
from autotune.commands import Commands, NotDoneError

ADMIN = "admin: {port: 0}\n"


class Answer:
    """A request sent from another thread, as a person's is, while the loop turns."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self.result: Any = None

        def run() -> None:
            self.result = ask()

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def while_turning(self, rig: Any) -> Any:
        def done() -> bool:
            rig.loop.turn()
            return not self._thread.is_alive()

        until(done, "the answer")
        return self.result


@pytest.fixture
def served(make_rig: Any) -> Iterator[Any]:
    rig = make_rig(ADMIN)
    rig.daemon.admin.start()
    rig.run_s(2)
    yield rig
    rig.daemon.admin.stop()


def post(rig: Any, name: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"{rig.daemon.admin.address}/control/{name}", body, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def token(rig: Any) -> str:
    return read_token(rig.folder / "admin.token")


def order(rig: Any, name: str, body: bytes = b"") -> tuple[int, dict[str, Any]]:
    return Answer(lambda: post(rig, name, body, authorization=f"Bearer {token(rig)}")).while_turning(rig)


@pytest.mark.parametrize("name", ["mode", "reload"])
def test_every_action_is_refused_without_the_token(served: Any, name: str) -> None:
    right = token(served)
    wrong = [
        "",
        "Bearer",
        "Bearer ",
        f"Basic {right}",
        right,
        f"Bearer {right}x",
        f"Bearer {right[:-1]}",
        "Bearer " + "x" * 43,
    ]
    for given in [None, *wrong]:
        headers = {} if given is None else {"authorization": given}
        status, answer = post(served, name, b'{"mode": "off"}' if name == "mode" else b"", **headers)
        assert status == 401, given
        assert "token" in answer["error"]
    served.run_s(2)
    assert served.daemon.status()["mode"] == "active"
    assert served.daemon.last_reload is None


def test_nothing_that_changes_anything_is_open(served: Any) -> None:
    """Every route that is not a mere reading, the next one to be added too, is refused without the token."""
    app = served.daemon.admin._server.config.app
    writing = [(route.path, method) for route in app.routes for method in route.methods - {"GET", "HEAD"}]
    assert {path for path, _ in writing} >= {"/control/mode", "/control/reload"}
    for path, method in writing:
        for given in ({}, {"authorization": "Bearer " + "x" * 43}, {"authorization": f"Bearer {token(served)} x"}):
            request = urllib.request.Request(served.daemon.admin.address + path, b"{}", given, method=method)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=30)
            assert refused.value.code == 401, (path, given)
    served.run_s(2)
    assert served.daemon.status()["mode"] == "active"
    assert served.daemon.last_reload is None


def test_mode_is_switched_and_outlives_the_daemon(served: Any, make_rig: Any) -> None:
    status, answer = order(served, "mode", b'{"mode": "advise"}')
    assert status == 200
    assert answer["answer"].startswith("mode advise, was active; holds over restarts")
    served.run_s(2)
    assert served.daemon.status()["mode"] == "advise"
    assert served.daemon.status()["mode_by"] == "order"
    assert served.parts.actuator.mode == "advise"
    assert served.metric("autotune_mode", mode="advise") == 1
    for bad in (b"", b"{}", b'{"mode": "loud"}', b'{"mode": "off", "x": 1}', b'{"mode": ["off"]}'):
        assert order(served, "mode", bad)[0] == 400
    served.write_config(ADMIN + "tick_s: 2\n")
    assert order(served, "reload")[0] == 200
    assert served.parts.actuator.mode == "advise", "a reload of something else ended the order"
    served.daemon.admin.stop()
    served.close()
    again = make_rig(engine=served.engine, clock=served.clock)
    again.daemon.restore()
    assert again.parts.actuator.mode == "advise"
    again.write_config("mode: 'off'\n")
    again.daemon.request_reload()
    again.run_s(2)
    assert again.parts.actuator.mode == "off"
    again.close()
    last = make_rig("mode: 'off'\n", engine=served.engine, clock=served.clock)
    last.daemon.restore()
    assert last.daemon.status()["mode_by"] == "configuration"


def test_reload_answers_key_by_key_or_says_why_not(served: Any) -> None:
    served.write_config(ADMIN + "tick_s: 2\njournal: {path: /elsewhere.db}\n")
    assert order(served, "reload") == (
        200,
        {"answer": "reload: applied tick_s; needs restart journal.path", "needs_restart": ["journal.path"]},
    )
    served.config_path.write_text("nosuch: 1\n")
    status, answer = order(served, "reload")
    assert status == 400
    assert answer["error"].startswith("reload refused, nothing changed: nosuch: unknown key")
    assert order(served, "reload", b'{"path": "/etc/passwd"}')[0] == 400


@pytest.mark.parametrize("body", [b"{", b"[]", b"3", b"\xff", b"[" * 4000])
def test_what_is_no_object_is_refused(served: Any, body: bytes) -> None:
    assert order(served, "mode", body)[0] == 400


def test_long_bodies_are_refused(served: Any) -> None:
    assert order(served, "mode", b" " * 5000)[0] == 413


def test_a_loop_that_is_stuck_is_said_and_the_order_is_dropped(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.admin_actions._PATIENCE_S", 0.05)
    status, answer = post(served, "mode", b'{"mode": "off"}', authorization=f"Bearer {token(served)}")
    assert status == 503
    assert "nothing was done" in answer["error"]
    served.run_s(3)
    assert served.daemon.status()["mode"] == "active"
    served.clock.advance_s(11)
    assert served.daemon.status()["healthy"] is False
    assert served.daemon.status()["problem"] == "the control loop is stuck"


def test_orders_are_bounded() -> None:
    commands = Commands(lambda: None)
    for _ in range(16):
        with pytest.raises(NotDoneError):
            commands.order(lambda: "never", 0)
    with pytest.raises(NotDoneError, match="too many"):
        commands.order(lambda: "never", 0)
    commands.carry_out()
    with pytest.raises(NotDoneError, match="nothing was done"):
        commands.order(lambda: "never", 0)


def test_the_token_is_private(served: Any, tmp_path: Path) -> None:
    path = served.folder / "admin.token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert own_token(path, make=True) == token(served), "a restart keeps it"
    assert len(token(served)) >= 43
    path.chmod(0o640)
    with pytest.raises(TokenError, match="others may read it"):
        own_token(path, make=True)
    short = tmp_path / "short"
    short.write_text("secret\n")
    with pytest.raises(TokenError, match="shorter than 16"):
        read_token(short)
    with pytest.raises(TokenError, match="No such file"):
        own_token(tmp_path / "none", make=False)
    short.write_bytes(b"\xff" * 40)
    with pytest.raises(TokenError, match="not ASCII"):
        read_token(short)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TokenError):
        own_token(link, make=True)
    assert not (tmp_path / "elsewhere").exists()


def test_the_command_line_orders_with_the_token(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def autotune(*arguments: str) -> tuple[int, str, str]:
        def ask() -> int:
            return fail_with(lambda: app(list(arguments), standalone_mode=False))

        code = Answer(ask).while_turning(served)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    there = ("--admin", served.daemon.admin.address)
    right = ("--token-file", str(served.folder / "admin.token"))
    code, out, err = autotune("mode", "advise", *there, *right)
    assert (code, err, len(out.splitlines())) == (0, "", 1)
    assert out.startswith("mode advise, was active")
    assert autotune("mode", "act", *there, *right)[1].startswith("mode active, was advise")
    assert autotune("mode", "active", *there, *right)[1].startswith("mode active, was active"), "as it prints it"
    assert autotune("reload", *there, *right)[:2] == (0, "reload: no change\n")
    served.write_config(ADMIN + "journal: {path: /elsewhere.db}\n")
    assert autotune("reload", *there, *right)[:2] == (3, "reload: needs restart journal.path\n")
    wrong = served.folder / "wrong.token"
    wrong.write_text("x" * 43)
    for verb in (("mode", "off"), ("reload",)):
        code, out, err = autotune(*verb, *there, "--token-file", str(wrong))
        assert (code, out) == (1, "")
        assert err == "error: a token is needed; the daemon's is in its admin.token file\n"
        code, _, err = autotune(*verb, *there, "--token-file", str(served.folder / "none"))
        assert (code, len(err.splitlines())) == (1, 1)
        assert "none: No such file or directory; name the daemon's with --token-file or --config" in err
        code, _, err = autotune(*verb, "--admin", "http://127.0.0.1:1", *right)
        assert (code, "no daemon answers" in err) == (1, True)
    code, _, err = autotune("mode", "loud", *there, *right)
    assert (code, err) == (2, "error: mode 'loud': choose active, advise or off\n")
    assert served.daemon.status()["mode"] == "active"
