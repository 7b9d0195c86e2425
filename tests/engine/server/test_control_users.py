"""Nobody but the engine's own user, root and those named gets an answer from the control socket, whatever they ask."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import app
from autotune.cli._shared import fail_with
from autotune.journal import Journal
from autotune.journal_file import Tick
from engine.control_client import ControlClient

Serve = Callable[..., Any]
NOBODY = 65534
# What another user's process does: every request of the API by hand, since a client of ours might refuse by itself.
ASKING = """
import os, socket, sys
if int(sys.argv[2]):  # only now, since another user may not even reach this interpreter
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
asked = [
    b"GET /v1/tunables", b"GET /v1/stats", b"GET /v1/audit", b"GET /v1/pins", b"DELETE /v1/pins", b"DELETE /v1/pins/1",
    b"GET /v1/about", b"PATCH /v1/tunables",
]
body = b'{"changes": {"kv_format": "int8"}, "writer": "operator:mallory"}'
for line in asked:
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(20)
        try:
            stream.connect(sys.argv[1])
            stream.sendall(line + b" HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body)
            answer = stream.recv(100)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        print(line.decode(), len(answer))
"""


def ask(path: Path, uid: int) -> list[str]:
    command = [sys.executable, "-I", "-c", ASKING, str(path), str(uid)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd="/")
    return done.stdout.splitlines()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_gets_no_answer_to_anything(serve: Serve) -> None:
    """The socket's mode and folder would keep them out before; here both are open, and credentials alone decide."""
    server = serve()
    folder = Path("/tmp") / f"kv-users-{os.getpid()}"
    folder.mkdir(mode=0o755)
    try:
        server.control_path.chmod(0o666)
        try:
            (folder / "s").hardlink_to(server.control_path)
        except OSError:
            pytest.skip("temporary folders are on several file systems")
        answers = ask(folder / "s", NOBODY)
        assert len(answers) == 8
        assert [line for line in answers if not line.endswith(" 0")] == []
        assert [line for line in ask(folder / "s", 0) if line.endswith(" 0")] == [], "it asks in vain"
    finally:
        shutil.rmtree(folder)
    with ControlClient(server.control_path) as client:
        assert client.tunables()["writers"]["kv_format"]["writer"] == "operator:mallory"  # root's, of the second run


VERBS = {
    "set": ["set", "kv_format=int8"],
    "pin": ["pin", "kv_format=int8", "--for", "2h"],
    "release one": ["release", "kv_format"],
    "release all": ["release"],
    "undo": ["undo", "1"],
    "unpin": ["unpin", "--all"],
    "tunables": ["tunables"],
    "pins": ["pins"],
    "audit": ["audit"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_the_command_line_says_that_this_user_may_not(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str
) -> None:
    """Here ours is made to look wrong, so that every verb can be asked of the same server."""
    monkeypatch.setattr("engine.server.run.allowed_uids", lambda _extra: frozenset({os.geteuid() + 1}))
    server = serve()
    arguments = [*VERBS[verb], "--control", str(server.control_path)]
    if verb == "undo":
        journal = Journal(tmp_path / "journal.db", wall_s=lambda: 0.0)
        row = {"tick": 1, "knob": "kv_format", "old": "native", "new": "native", "verdict": "applied"}
        journal.append(Tick(1, "run", 0.0, 1, True, {"decision": row}), "loop", {})
        journal.close()
        arguments += ["--journal", str(journal.path)]
    before = server.engine.core.tunables_json()
    assert fail_with(lambda: app(arguments, standalone_mode=False)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "connection closed (is this user allowed?)" in captured.err
    assert server.engine.core.tunables_json() == before
