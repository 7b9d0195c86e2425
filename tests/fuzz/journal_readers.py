"""What reads the journal: people's verbs, the replay of decisions, the scoring of advice, and the next daemon."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Final

from daemon_rig import FakeEngine, Rig
from reader import BYTES, LINES, Reader, verb

from autotune.advice import AdviceReader
from autotune.journal_file import JournalError, read_ticks, row_check
from engine.clock import ManualClock

_CONFIG: Final = "policy: {rules: literature}\n"
_NAME: Final = "journal.db"
_ROWS: Final = "rows.jsonl"


def _journal(folder: Path) -> Path:
    """Of a daemon that changed something under pressure and saw what came of it."""
    clock = ManualClock(start_ns=5_000_000_000)
    rig = Rig(folder, _CONFIG, engine=FakeEngine(clock), clock=clock)
    rig.parts.journal.start_run(rig.loop.run_id, json.dumps({}))

    def press() -> None:
        rig.engine.serve_requests(2, ttft_s=9.0)
        rig.engine.set_usage(0.95)

    try:
        rig.run_s(40, press)
        assert any(tick.effect for tick in rig.ticks()), "no change was made and measured"
    finally:
        rig.close()
    return folder / _NAME


def _read(path: Path) -> None:
    _tidy(path)
    given = ("--journal", str(path))
    for words in (["decisions"], ["decisions", "--json"], ["undo"], ["replay-decisions"]):
        socket = ["--control", str(path.with_name("no.sock"))] if words == ["undo"] else []
        verb(*words, *given, *socket)
    ids: list[int] = []
    with contextlib.suppress(JournalError):
        ticks = read_ticks(path, limit=1000)
        AdviceReader().read(ticks)
        ids = [tick.id for tick in ticks if tick.acted][:2]
    for tick in (1, *ids):
        if 0 < tick < 10**18:
            verb("explain", str(tick), *given)
            verb("undo", str(tick), *given, "--control", str(path.with_name("no.sock")))
    _go_on(path)


def _go_on(path: Path) -> None:
    """The next daemon: it finds a state that it can use or begins anew, and its loop goes on."""
    rig = Rig(path.parent, _CONFIG)
    try:
        rig.daemon.restore()
        rig.run_s(4)
        assert rig.loop.ticks == 4
        assert rig.metric("autotune_tick_errors_total") <= 1
        assert rig.daemon.status()["healthy"], rig.daemon.status()["problem"]
    finally:
        rig.close()


def _tidy(path: Path) -> None:
    for beside in path.parent.glob(f"{path.name}?*"):
        beside.unlink()


def _rows(folder: Path) -> Path:
    """What the journal's columns of JSON hold, a line each."""
    path = _journal(folder)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        memory = dict(connection.execute("SELECT key, value FROM memory").fetchall())
        tick = connection.execute("SELECT id, body, effect FROM ticks WHERE effect IS NOT NULL LIMIT 1").fetchone()
        (run,) = connection.execute("SELECT config FROM runs LIMIT 1").fetchone()
    lines = [json.dumps(["memory", key]) + "\n" + value for key, value in sorted(memory.items())]
    lines += [json.dumps(["tick", tick[0]]) + "\n" + tick[1], json.dumps(["effect", tick[0]]) + "\n" + tick[2]]
    lines += [json.dumps(["run", ""]) + "\n" + run]
    (folder / _ROWS).write_text("\n".join(lines) + "\n")
    (folder / "good.db").write_bytes(path.read_bytes())
    return folder / _ROWS


def _read_rows(path: Path) -> None:
    """Whatever the lines hold is in the journal, with right check sums: only the shape is wrong."""
    journal = path.with_name(_NAME)
    _tidy(journal)
    journal.write_bytes(path.with_name("good.db").read_bytes())
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    with contextlib.closing(sqlite3.connect(journal, isolation_level=None)) as connection:
        for head, text in zip(lines[::2], lines[1::2], strict=False):
            with contextlib.suppress(ValueError, TypeError, RecursionError, sqlite3.Error):
                kind, key = json.loads(head)
                _put(connection, kind, key, text)
    _read(journal)


def _put(connection: sqlite3.Connection, kind: str, key: object, text: str) -> None:
    if kind == "memory":
        connection.execute("UPDATE memory SET value = ? WHERE key = ?", (text, key))
    elif kind == "effect":
        connection.execute("UPDATE ticks SET effect = ? WHERE id = ?", (text, key))
    elif kind == "run":
        connection.execute("UPDATE runs SET config = ?", (text,))
    elif kind == "tick":
        run, stamp = connection.execute("SELECT run, stamp_ns FROM ticks WHERE id = ?", (key,)).fetchone()
        check = row_check(int(str(key)), run, stamp, text)
        connection.execute("UPDATE ticks SET body = ?, check_sum = ? WHERE id = ?", (text, check, key))


READERS: Final = (
    Reader("journal", _journal, _read, (JournalError,), BYTES, examples=20),
    Reader("journal's rows", _rows, _read_rows, (JournalError,), LINES, examples=40),
)
