"""Rows of the journal in which bits have changed: one line each, and the others are shown."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.journal_file import JournalError, read_ticks, row_check

PRESSURE = "policy: {rules: literature, quality_budget: null}\n"
Autotune = Callable[..., tuple[int, str, str]]


@pytest.fixture
def journal(make_rig: Any, tmp_path: Path) -> Path:
    """Of a daemon that has made one change and measured what it did."""
    rig = make_rig(PRESSURE)

    def press() -> None:
        rig.engine.set_usage(0.95, running=60, waiting=30)
        rig.engine.serve_requests(5, ttft_s=3.0, gap_s=0.2)

    rig.run_s(30, press)
    rig.close()
    return tmp_path / "journal.db"


def change(path: Path, column: str, value: object) -> int:
    """Put something else into a column of the row with an effect; its id."""
    with sqlite3.connect(path) as connection:
        found = connection.execute("SELECT id, run, stamp_ns FROM ticks WHERE effect IS NOT NULL").fetchone()
        connection.execute(f"UPDATE ticks SET {column} = ? WHERE id = ?", (value, found[0]))
        if column == "body":
            check = row_check(*found, str(value))
            connection.execute("UPDATE ticks SET check_sum = ? WHERE id = ?", (check, found[0]))
    connection.close()
    return int(found[0])


@pytest.mark.parametrize(
    "effect", ["5", "[]", "{", '{"before": 3}', '{"outcome": "met"}', '{"after": {"load": "x"}}', b"\0"]
)
def test_an_effect_that_is_none_is_unknown(journal: Path, autotune: Autotune, effect: object) -> None:
    tick = change(journal, "effect", effect)
    code, out, err = autotune("decisions", "--journal", str(journal))
    assert (code, err) == (0, "")
    assert f"[{tick}] effect unknown: its row is damaged" in out
    code, out, _ = autotune("explain", str(tick), "--journal", str(journal))
    assert code == 0
    assert "measured: unknown: its row is damaged" in out


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("wall_s", 1e300),
        ("wall_s", -5.0),
        ("wall_s", "x"),
        ("run", b"\0"),
        ("stamp_ns", "x"),
        ("body", "5"),
        ("body", "[]"),
    ],
)
def test_a_row_that_is_no_tick_is_said_to_be_damaged(
    journal: Path, autotune: Autotune, column: str, value: object
) -> None:
    tick = change(journal, column, value)
    code, out, err = autotune("explain", str(tick), "--journal", str(journal))
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "damaged" in err
    code, _, err = autotune("decisions", "--journal", str(journal))
    assert (code, err) == (0, "")
    assert sum(bool(one.damaged) for one in read_ticks(journal, limit=1000)) == 1


@pytest.mark.parametrize(
    "body", ['{"decision": 5}', '{"decision": {"verdict": "applied"}}', '{"observation": [1], "decision": 1}']
)
def test_a_row_of_another_version_is_passed_over(journal: Path, autotune: Autotune, body: str) -> None:
    """Its check sum is right: somebody has meant to write it so."""
    tick = change(journal, "body", body)
    code, _, err = autotune("decisions", "--journal", str(journal))
    assert code == 0
    assert err.splitlines() == [line for line in err.splitlines() if f"tick {tick} cannot be read" in line]
    assert len(err.splitlines()) == 1
    for verb in ("explain", "undo"):
        code, out, err = autotune(verb, str(tick), "--journal", str(journal))
        assert (code, out) == (1, "")
        assert len(err.splitlines()) == 1


def test_a_database_of_somebody_else_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE ticks (id INTEGER PRIMARY KEY, acted)")
        connection.execute("INSERT INTO ticks VALUES (1, 1)")
    connection.close()
    with pytest.raises(JournalError, match="not a journal of this program"):
        read_ticks(path, limit=5)
