"""The decision journal: every control tick in SQLite, bounded, surviving kill -9.

Write-ahead logging makes each tick one append that a crash leaves whole. A journal that cannot be written right now
(locked by a backup, disk full) must never stop the control loop: rows wait in a bounded buffer and are tried again at
the next tick. A damaged file is moved aside and a new one begun; at start, with all that could be read before the
damage. All of it is counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from autotune.journal_file import JournalError, Tick, prune_file, row_check, take_ownership
from autotune.journal_salvage import salvage
from autotune.jsonable import finite
from engine.json_text import load_json

_LOG: Final = logging.getLogger("autotune.journal")
_SCHEMA_VERSION: Final = 2
_BUSY_MS: Final = 200  # longer would hold up the control loop
_BUFFERED_ROWS: Final = 2000
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS runs (
    run TEXT PRIMARY KEY, started_wall_s REAL NOT NULL, config TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ticks (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL, wall_s REAL NOT NULL, stamp_ns INTEGER NOT NULL,
    acted INTEGER NOT NULL, body TEXT NOT NULL, effect TEXT, check_sum INTEGER);
CREATE INDEX IF NOT EXISTS ticks_acted ON ticks (id) WHERE acted;
CREATE TABLE IF NOT EXISTS memory (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


@dataclass
class JournalCounters:
    """How often the journal had trouble; fed to the metrics."""

    postponed: int = 0  # writes that had to be tried again later
    dropped: int = 0  # rows lost because the buffer was full
    moved_aside: int = 0  # damaged files replaced by new ones
    pruned: int = 0  # rows deleted to stay in bounds
    last_error: str = field(default="")


class Journal:
    """The journal at ``path``, owned by this process until :meth:`close`.

    Raises JournalError when another daemon owns it, or the path is not a safe place (a link, another user's file).
    Writes come from the control loop; reads and :meth:`prune` from other threads, on connections of their own.
    """

    def __init__(self, path: Path, *, wall_s: Callable[[], float]) -> None:
        self.path = path
        self.counters = JournalCounters()
        self._wall_s = wall_s
        self._lock = threading.Lock()
        self._closed, self._run = False, ""
        self._waiting: deque[tuple[str, tuple[object, ...]]] = deque()
        self._owner_fd = take_ownership(path)
        try:
            self._connection = self._open()
            self.next_id = self._last_id() + 1
        except BaseException:
            os.close(self._owner_fd)
            raise

    def close(self) -> None:
        """Write what waits, as far as possible, and let go of the file. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._flush()
            if self._waiting:
                self.counters.dropped += len(self._waiting)
            self._connection.close()
            os.close(self._owner_fd)

    def start_run(self, run: str, config_json: str) -> None:
        """Remember under which configuration the ticks of ``run`` were made."""
        self._run = run
        self._write(("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", (run, self._wall_s(), config_json)))

    def append(self, tick: Tick, key: str, value: object) -> None:
        """Write one tick, and with it keep ``value`` for :meth:`recall`. Never raises for a locked or damaged file."""
        effect, body = None if tick.effect is None else _dump(tick.effect), _dump(tick.body)
        check = row_check(tick.id, tick.run, tick.stamp_ns, body)
        row = (tick.id, tick.run, tick.wall_s, tick.stamp_ns, int(tick.acted), body, effect, check)
        self._write(
            ("INSERT OR REPLACE INTO ticks VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row),
            ("INSERT OR REPLACE INTO memory VALUES (?, ?)", (key, _dump(value))),
        )

    def set_effect(self, tick_id: int, effect: Mapping[str, Any]) -> None:
        """Add what a tick's change did, once it has been measured."""
        self._write(("UPDATE ticks SET effect = ? WHERE id = ?", (_dump(effect), tick_id)))

    def set_outcome(self, tick_id: int, outcome: str, why: str) -> None:
        """Add to a tick's effect whether it was what had been expected."""
        merge = "UPDATE ticks SET effect = json_set(coalesce(effect, '{}'), '$.outcome', ?, '$.why', ?) WHERE id = ?"
        self._write((merge, (outcome, why, tick_id)))

    def remember(self, key: str, value: object) -> None:
        """Keep ``value`` for :meth:`recall`, apart from any tick."""
        self._write(("INSERT OR REPLACE INTO memory VALUES (?, ?)", (key, _dump(value))))

    def recall(self, key: str) -> Any:
        """What the last tick kept under ``key``, in this run or an earlier one; None if nothing."""
        with self._lock, contextlib.suppress(sqlite3.Error, TypeError, ValueError):
            row = self._connection.execute("SELECT value FROM memory WHERE key = ?", (key,)).fetchone()
            return None if row is None else load_json(row[0])
        return None

    def prune(self, max_rows: int, max_bytes: int) -> int:
        """Keep the file in bounds; returns rows deleted. For another thread than the loop's."""
        deleted = prune_file(self.path, max_rows, max_bytes, self._run)
        self.counters.pruned += deleted
        return deleted

    def _open(self) -> sqlite3.Connection:
        try:
            return self._prepare()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise JournalError(f"journal {self.path}: {error}; free it or set journal.path") from error
            aside = self._move_aside(error)
            connection = self._prepare()
            kept = salvage(aside, connection)
            _LOG.warning("journal %s was damaged (%s): %s; the damaged file is %s", self.path, error, kept, aside)
            self.counters.last_error = f"was damaged: {kept}"
            return connection

    def _prepare(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=_BUSY_MS / 1000, isolation_level=None, check_same_thread=False, cached_statements=16
        )
        try:
            self._set_up(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _set_up(self, connection: sqlite3.Connection) -> None:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > _SCHEMA_VERSION:
            raise JournalError(f"journal {self.path}: written by a newer version; move it away or set journal.path")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")  # a crash loses nothing, a power cut perhaps the last rows
        connection.executescript(_SCHEMA)
        if version == 1:
            connection.execute("ALTER TABLE ticks ADD COLUMN check_sum INTEGER")
        if version != _SCHEMA_VERSION:  # a write, which a full disk would refuse
            connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("malformed: quick_check failed")

    def _move_aside(self, error: sqlite3.Error) -> Path:
        self.counters.moved_aside += 1
        self.counters.last_error = str(error)
        aside = self.path.with_name(f"{self.path.name}.damaged-{int(self._wall_s())}-{self.counters.moved_aside}")
        self.path.replace(aside)
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").replace(f"{aside}{suffix}")
        return aside

    def _last_id(self) -> int:
        return int(self._connection.execute("SELECT coalesce(max(id), 0) FROM ticks").fetchone()[0])

    def _write(self, *statements: tuple[str, tuple[object, ...]]) -> None:
        with self._lock:
            self._waiting.extend(statements)
            while len(self._waiting) > _BUFFERED_ROWS:
                self._waiting.popleft()
                self.counters.dropped += 1
            self._flush()

    def _flush(self) -> None:
        try:
            self._write_waiting()
        except sqlite3.DatabaseError as error:
            self.counters.last_error = str(error)
            if not _is_damage(error):
                self.counters.postponed += 1
                return
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            try:
                self._move_aside(error)
                self._connection = self._prepare()
                self._write_waiting()
            except (OSError, sqlite3.Error) as again:
                self.counters.last_error = str(again)
                self.counters.postponed += 1
        except OSError as error:
            self.counters.last_error = str(error)
            self.counters.postponed += 1

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for statement, values in self._waiting:
                self._connection.execute(statement, values)
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise
        self._waiting.clear()


def _is_damage(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", None) in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB} or (
        "malformed" in str(error)
    )


def _dump(value: object) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:  # NaN and infinities are not JSON; unknown is null
        return json.dumps(finite(value), separators=(",", ":"), allow_nan=False)
