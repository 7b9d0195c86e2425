"""The journal's file: its place, who may use it, reading it from any process, and keeping it in bounds."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import sqlite3
import stat
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.json_text import load_json
from engine.shapes import fits
from engine.text import one_line

_MANY_RUNS: Final = 100
_LARGEST_ID: Final = 2**63 - 1
_COLUMNS: Final = (7, 8)
_END_OF_TIME_S: Final = 250_000_000_000.0  # the year 9892: no calendar here goes on much longer
_Figures = dict[str, float | None]
_EFFECT: Final[Mapping[str, Any]] = {
    "before": _Figures, "after": _Figures, "outcome": str, "why": str, "unknown": str, "together_with": list[int],
    "without_service_s": float | None,
}  # fmt: skip
_PRUNE_BATCH: Final = 500  # rows per transaction, so that the loop never waits long for a prune
_DELETE_OLDEST: Final = "DELETE FROM ticks WHERE id IN (SELECT id FROM ticks ORDER BY id LIMIT ?)"
_DELETE_OLDEST_OF: Final = "DELETE FROM ticks WHERE id IN (SELECT id FROM ticks WHERE acted = ? ORDER BY id LIMIT ?)"


class JournalError(Exception):
    """The journal cannot be used, in one line that says what to do."""


@dataclass(frozen=True)
class Tick:
    """One row. ``body`` is JSON: observation, policy state, proposal, verdict, what was written.

    ``acted``: something was proposed, so the row counts as a decision and outlives mere no-ops.
    """

    id: int
    run: str
    wall_s: float
    stamp_ns: int
    acted: bool
    body: Mapping[str, Any]
    effect: Mapping[str, Any] | None = None
    damaged: str = ""
    """Why the row is not what was written; its body is empty then."""


def row_check(tick_id: int, run: str, stamp_ns: int, body: str) -> int:
    """A row's check sum: SQLite finds broken pages, not bytes that changed inside one."""
    return zlib.crc32(f"{tick_id}|{run}|{stamp_ns}|{body}".encode())


def read_ticks(path: Path, *, limit: int, acted_only: bool = False, after_id: int = 0) -> list[Tick]:
    """The newest ``limit`` ticks with an id above ``after_id``, oldest first; any process may call it.

    Raises JournalError when the file is missing or unreadable.
    """
    where = "id > ?" + (" AND acted" if acted_only else "")
    query = f"SELECT * FROM ticks WHERE {where} ORDER BY id DESC LIMIT ?"  # noqa: S608  # no outside text in it
    with _reading(path) as connection:
        rows = connection.execute(query, (after_id, limit)).fetchall()
        return [_tick(row) for row in reversed(rows)]


def read_tick(path: Path, tick_id: int) -> Tick | None:
    """One tick by its id, None if the journal does not hold it (any more). Raises JournalError as above."""
    ticks = read_ticks_between(path, tick_id, tick_id)
    return next(ticks, None)


def read_ticks_between(path: Path, first: int, last: int | None = None) -> Iterator[Tick]:
    """Ticks by id, both ends included, oldest first, read as they are taken. Raises JournalError as above."""
    with _reading(path) as connection:
        query = "SELECT * FROM ticks WHERE id BETWEEN ? AND ? ORDER BY id"
        for row in connection.execute(query, (min(first, _LARGEST_ID), min(last or _LARGEST_ID, _LARGEST_ID))):
            yield _tick(row)


def read_runs(path: Path) -> dict[str, Any]:
    """What the journal keeps of every run, by the run's name. Raises JournalError as above."""
    with _reading(path) as connection:
        rows = connection.execute("SELECT run, config FROM runs").fetchall()
    runs = {}
    for run, text in rows:
        with contextlib.suppress(TypeError, ValueError):
            runs[run] = load_json(text)
    return runs


def _tick(row: tuple[Any, ...]) -> Tick:
    if len(row) not in _COLUMNS:
        raise sqlite3.DatabaseError("not a journal of this program")
    tick_id, run, wall_s, stamp_ns, acted, body, effect, *check = row
    read: Any = {}
    # Rows of the first version have no check sum.
    damaged = "" if not check or check[0] in {None, row_check(tick_id, run, stamp_ns, body)} else "check sum differs"
    try:
        read = load_json(body)
    except (TypeError, ValueError) as error:
        damaged = damaged or f"not JSON: {error}"
    # The check sum is of body and stamp; a bit may change in any column.
    if not (isinstance(run, str) and isinstance(stamp_ns, int) and isinstance(read, dict)):
        damaged = damaged or "not a tick"
    if not isinstance(wall_s, float) or not 0 <= wall_s < _END_OF_TIME_S:
        wall_s, damaged = 0.0, damaged or "its time is none"
    if damaged:
        stamp_ns = stamp_ns if isinstance(stamp_ns, int) else 0
        return Tick(tick_id, str(run), wall_s, stamp_ns, bool(acted), {}, None, one_line(damaged))
    return Tick(tick_id, run, wall_s, stamp_ns, bool(acted), read, None if effect is None else _effect(effect))


def _effect(text: Any) -> Mapping[str, Any]:
    """What a change did. It has no check sum, as it comes later: what is not one is unknown."""
    try:
        effect = load_json(text)
    except (TypeError, ValueError):
        effect = None
    is_one = isinstance(effect, dict) and all(
        fits(effect[name], kind) for name, kind in _EFFECT.items() if name in effect
    )
    if not is_one or ("outcome" in effect and "why" not in effect):
        return {"unknown": "its row is damaged"}
    return dict(effect)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        path.stat()  # SQLite would only say that it is unable to open the file
        with _connect(path, read_only=True) as connection:
            yield connection
    except (sqlite3.Error, OSError) as error:
        raise JournalError(f"journal {path}: {getattr(error, 'strerror', None) or error}") from error


def default_journal(environment: Mapping[str, str], uid: int) -> Path:
    """The journal's place: systemd's state directory, the one that XDG names, root's, or a user's own.

    As elsewhere, root's own folder is only where nothing is said; a path that is not absolute says nothing (XDG).
    """
    state = environment.get("STATE_DIRECTORY", "").split(":")[0]
    if state:
        return Path(state) / "journal.db"
    named = environment.get("XDG_STATE_HOME", "")
    if named.startswith("/"):
        return Path(named) / "kv-autotune" / "journal.db"
    if uid == 0:
        return Path("/var/lib/kv-autotune/journal.db")
    return Path(environment.get("HOME", "/tmp")) / ".local/state/kv-autotune/journal.db"  # noqa: S108


def take_ownership(path: Path) -> int:
    """Lock ``path`` for this process through a file beside it, and make sure that the path is safe to open."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_file(path)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        raise JournalError(f"journal {path}: {reason}; set journal.path") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise JournalError(f"journal {path}: another daemon is using it; stop that one or set journal.path") from error
    return lock


def _check_file(path: Path) -> None:
    """Create the file for its owner alone, or refuse one that is a link, not a file, or somebody else's."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            raise JournalError(f"journal {path}: not a regular file of this user; set journal.path")
    finally:
        os.close(handle)


def prune_file(path: Path, max_rows: int, max_bytes: int, keep_run: str = "") -> int:
    """Delete oldest rows until both bounds hold; half the rows are kept for decisions. Returns rows deleted.

    ``keep_run``: the run that is going on, which may have no tick yet.


    Works on a connection of its own in small transactions, so that the control loop never waits long for it.
    """
    deleted = 0
    with contextlib.suppress(sqlite3.Error), _connect(path) as connection:
        deleted = _prune_rows(connection, max_rows) + _prune_bytes(connection, max_bytes)
        _prune_runs(connection, keep_run)
        connection.executescript("PRAGMA incremental_vacuum")  # as a script: execute() would free one page only
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    return deleted


@contextlib.contextmanager
def _connect(path: Path, *, read_only: bool = False) -> Iterator[sqlite3.Connection]:
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
    connection = sqlite3.connect(uri, uri=True, timeout=1, isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()


def _prune_rows(connection: sqlite3.Connection, max_rows: int) -> int:
    """Keep at most ``max_rows``: the newest, with up to half of the room reserved for decisions, which tell more."""
    counts = dict(connection.execute("SELECT acted, count(*) FROM ticks GROUP BY acted").fetchall())
    decisions, others = counts.get(1, 0), counts.get(0, 0)
    kept_others = min(others, max_rows - min(decisions, max_rows // 2))
    deleted = 0
    for acted, excess in ((0, others - kept_others), (1, decisions - (max_rows - kept_others))):
        for start in range(0, excess, _PRUNE_BATCH):
            connection.execute(_DELETE_OLDEST_OF, (acted, min(_PRUNE_BATCH, excess - start)))
        deleted += max(0, excess)
    return deleted


def _prune_bytes(connection: sqlite3.Connection, max_bytes: int) -> int:
    deleted = 0
    while (used := _used_bytes(connection)) > max_bytes:
        rows = connection.execute("SELECT count(*) FROM ticks").fetchone()[0]
        if rows == 0:
            break
        batch = min(_PRUNE_BATCH, math.ceil(rows * (1 - max_bytes / used)))
        connection.execute(_DELETE_OLDEST, (batch,))
        deleted += batch
    return deleted


def _prune_runs(connection: sqlite3.Connection, keep_run: str) -> None:
    """Drop runs that no tick is left of, once there are many: finding them reads the whole table."""
    if connection.execute("SELECT count(*) FROM runs").fetchone()[0] > _MANY_RUNS:
        connection.execute("DELETE FROM runs WHERE run NOT IN (SELECT run FROM ticks) AND run != ?", (keep_run,))


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)
