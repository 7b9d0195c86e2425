"""The journal when its file is locked, damaged or killed under: the loop goes on and nothing is lost silently."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.journal import Journal
from autotune.journal_file import Tick, read_ticks

WRITER = """
import sys
from pathlib import Path
from autotune.journal import Journal
from autotune.journal_file import Tick
journal = Journal(Path(sys.argv[1]), wall_s=lambda: 0.0)
for number in range(1, 1_000_000):
    journal.append(Tick(number, "run", 0.0, number, True, {"padding": "x" * 500}), "loop", {"n": number})
    print(number, flush=True)
"""


def tick(number: int) -> Tick:
    return Tick(number, "run", 0.0, number, True, {})


def test_kill_minus_nine_loses_no_tick_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if int(line) == 300:
            os.kill(process.pid, signal.SIGKILL)
            break
    written = [300, *(int(line) for line in process.stdout.read().split("\n")[:-1] if line)]
    process.wait()
    journal = Journal(path, wall_s=lambda: 0.0)
    ids = [t.id for t in read_ticks(path, limit=10**6)]
    assert ids == list(range(1, len(ids) + 1))
    assert len(ids) >= written[-1]
    assert journal.recall("loop") == {"n": ids[-1]}
    assert journal.counters.moved_aside == 0
    journal.close()


def test_a_locked_journal_postpones_and_catches_up(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path, wall_s=lambda: 0.0)
    journal.append(tick(1), "loop", {})
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    journal.append(tick(2), "loop", {})
    journal.append(tick(3), "loop", {})
    assert journal.counters.postponed == 2
    assert "locked" in journal.counters.last_error
    other.execute("ROLLBACK")
    other.close()
    journal.append(tick(4), "loop", {})
    assert [t.id for t in read_ticks(path, limit=10)] == [1, 2, 3, 4]
    assert journal.counters.dropped == 0
    journal.close()


def test_what_cannot_be_kept_is_bounded_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.journal._BUFFERED_ROWS", 10)
    monkeypatch.setattr("autotune.journal._BUSY_MS", 1)
    journal = Journal(tmp_path / "journal.db", wall_s=lambda: 0.0)
    other = sqlite3.connect(journal.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    for number in range(1, 21):
        journal.append(tick(number), "loop", {})
    other.execute("ROLLBACK")
    other.close()
    journal.append(tick(21), "loop", {})
    assert journal.counters.dropped == 32
    assert [t.id for t in read_ticks(journal.path, limit=99)] == [17, 18, 19, 20, 21]
    journal.close()


def test_a_damaged_journal_is_moved_aside_at_start(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    for number, damage in enumerate((b"not a database at all" * 100, b"SQLite format 3\0" + b"\xff" * 4000), 1):
        path.write_bytes(damage)
        journal = Journal(path, wall_s=lambda: 123.0)
        assert journal.counters.moved_aside == 1
        journal.append(tick(1), "loop", {})
        assert len(read_ticks(path, limit=10)) == 1
        journal.close()
        assert len(list(tmp_path.glob("journal.db.damaged-*"))) == min(number, 1)
        path.unlink()
        next(tmp_path.glob("journal.db.damaged-*")).unlink()


def test_damage_while_running_is_moved_aside_and_the_tick_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path, wall_s=lambda: 0.0)
    for number in range(1, 200):
        journal.append(Tick(number, "run", 0.0, 0, True, {"padding": "x" * 900}), "loop", {})
    journal._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    journal._connection.execute("PRAGMA shrink_memory").fetchall()  # or it would go on from its own cache
    with path.open("r+b") as stream:
        stream.seek(100)
        stream.write(b"\xa5" * (path.stat().st_size - 100))
    for number in range(200, 205):
        journal.append(tick(number), "loop", {})
    assert journal.counters.moved_aside == 1
    assert read_ticks(path, limit=10)[-1].id == 204
    journal.close()


def test_the_loop_goes_on_while_the_journal_is_locked(make_rig: Any) -> None:
    rig = make_rig("policy: {rules: literature, quality_budget: null}\n")

    def pressed() -> None:
        rig.engine.set_usage(0.95, running=60, waiting=30)
        rig.engine.serve_requests(5)

    rig.run_s(5, pressed)
    other = sqlite3.connect(rig.parts.journal.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    rig.run_s(8, pressed)
    assert rig.engine.state.desired["kv_format"] == "int4"
    assert rig.metric("autotune_journal_postponed_writes_total") > 0
    assert "locked" in rig.daemon.status()["journal"]["last_error"]
    other.execute("ROLLBACK")
    other.close()
    rig.run_s(2, pressed)
    assert [t.id for t in rig.ticks()] == list(range(1, 16))


def test_a_damaged_tail_is_cut_off_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path, wall_s=lambda: 0.0)
    journal.start_run("run", "{}")
    for number in range(1, 400):
        journal.append(Tick(number, "run", 0.0, number, True, {"padding": "x" * 900}), "loop", {"n": number})
    journal.close()
    with path.open("r+b") as stream:  # the last third of the file is somebody else's now
        size = path.stat().st_size
        stream.seek(size * 2 // 3)
        stream.write(b"\xa5" * (size - size * 2 // 3))
    journal = Journal(path, wall_s=lambda: 0.0)
    kept = [t.id for t in read_ticks(path, limit=10**6)]
    assert 100 < len(kept) < 399
    assert kept == list(range(1, len(kept) + 1))
    assert all(not t.damaged for t in read_ticks(path, limit=10**6))
    assert journal.counters.moved_aside == 1
    assert f"{len(kept)} ticks were kept, up to {kept[-1]}" in caplog.text
    assert f"{len(kept)} ticks were kept" in journal.counters.last_error
    assert journal.next_id == kept[-1] + 1
    journal.append(tick(journal.next_id), "loop", {})
    assert read_ticks(path, limit=1)[0].id == kept[-1] + 1
    journal.close()


def test_a_full_disk_postpones_and_catches_up(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path, wall_s=lambda: 0.0)
    journal.append(tick(1), "loop", {})
    pages = journal._connection.execute("PRAGMA page_count").fetchone()[0]
    journal._connection.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own word for a full disk
    for number in range(2, 12):
        journal.append(Tick(number, "run", 0.0, number, True, {"padding": "x" * 4000}), "loop", {})
    assert "full" in journal.counters.last_error
    assert journal.counters.postponed > 0
    assert journal.counters.moved_aside == 0
    journal._connection.execute("PRAGMA max_page_count = 1000000")
    journal.append(tick(12), "loop", {})
    assert [t.id for t in read_ticks(path, limit=99)] == list(range(1, 13))
    assert journal.counters.dropped == 0
    journal.close()


def test_a_journal_of_the_first_version_is_read_and_written_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with sqlite3.connect(path) as old:
        old.executescript(
            "CREATE TABLE ticks (id INTEGER PRIMARY KEY, run TEXT NOT NULL, wall_s REAL NOT NULL,"
            " stamp_ns INTEGER NOT NULL, acted INTEGER NOT NULL, body TEXT NOT NULL, effect TEXT);"
            "INSERT INTO ticks VALUES (7, 'run', 0.0, 1, 1, '{}', NULL); PRAGMA user_version = 1;"
        )
    assert not read_ticks(path, limit=9)[0].damaged
    journal = Journal(path, wall_s=lambda: 0.0)
    journal.append(tick(journal.next_id), "loop", {})
    journal.close()
    assert [(t.id, t.damaged) for t in read_ticks(path, limit=9)] == [(7, ""), (8, "")]
