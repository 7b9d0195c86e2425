"""What can be saved of a damaged journal: everything before the damage. The tail is cut off, and how much is told."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

_BATCH = 500


def salvage(damaged: Path, into: sqlite3.Connection) -> str:
    """Copy runs, memory and ticks up to the first that cannot be read; one line that says how far that was.

    ``into`` is an empty journal. The damaged file is only read. Never raises for what it finds there.
    """
    last, number = 0, 0
    with contextlib.suppress(sqlite3.Error), contextlib.closing(_open(damaged)) as source:
        for table in ("runs", "memory"):
            with contextlib.suppress(sqlite3.Error):
                _copy(source.execute(f"SELECT * FROM {table}").fetchall(), table, into)  # noqa: S608  # fixed names
        rows = source.execute("SELECT * FROM ticks ORDER BY id")
        while batch := _read(rows):
            _copy(batch, "ticks", into)
            last, number = batch[-1][0], number + len(batch)
            if len(batch) < _BATCH:
                break
    return f"{number} ticks were kept, up to {last}" if number else "nothing in it could be read"


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


def _read(rows: sqlite3.Cursor) -> list[tuple[Any, ...]]:
    """The next rows, fewer where the damage begins."""
    batch: list[tuple[Any, ...]] = []
    with contextlib.suppress(sqlite3.Error):
        for row in rows:
            batch.append(row)
            if len(batch) == _BATCH:
                break
    return batch


def _copy(rows: list[tuple[Any, ...]], table: str, into: sqlite3.Connection) -> None:
    into.execute("BEGIN")
    try:
        for row in rows:
            values = (
                (*row, None) if table == "ticks" and len(row) == 7 else row
            )  # the first version's have no check sum
            marks = ", ".join("?" * len(values))
            into.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", values)  # noqa: S608  # fixed names
        into.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            into.execute("ROLLBACK")
        raise
