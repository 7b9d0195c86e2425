"""The decision journal: bounded, owned by one process, readable by others."""

from __future__ import annotations

import math
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.journal import Journal
from autotune.journal_file import JournalError, Tick, default_journal, read_ticks


def tick(number: int, *, acted: bool = False, **body: object) -> Tick:
    return Tick(number, "run", 1.7e9 + number, number * 10**9, acted, body)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    made = Journal(path, wall_s=lambda: 1.7e9)
    yield made
    made.close()


def test_what_is_written_can_be_read_with_its_later_effect(journal: Journal, path: Path) -> None:
    journal.append(tick(1, reason="why"), "loop", {"n": 1})
    journal.append(tick(2, acted=True), "loop", {"n": 2})
    journal.set_effect(2, {"before": {"load": 1.0}, "after": {"load": 0.5}})
    assert [t.id for t in read_ticks(path, limit=10)] == [1, 2]
    assert read_ticks(path, limit=10)[0].body == {"reason": "why"}
    (acted,) = read_ticks(path, limit=10, acted_only=True)
    assert acted.effect == {"before": {"load": 1.0}, "after": {"load": 0.5}}
    assert read_ticks(path, limit=1)[0].id == 2
    assert read_ticks(path, limit=10, after_id=1)[0].id == 2


def test_the_next_run_goes_on_counting_and_remembers(journal: Journal, path: Path) -> None:
    journal.append(tick(41), "loop", {"state": [1, 2]})
    journal.close()
    again = Journal(path, wall_s=lambda: 1.7e9)
    assert again.next_id == 42
    assert again.recall("loop") == {"state": [1, 2]}
    assert again.recall("other") is None
    again.close()


def test_unknown_figures_are_null(journal: Journal, path: Path) -> None:
    journal.append(tick(1, values={"a": math.nan, "b": [math.inf, 1.5]}), "loop", {})
    assert read_ticks(path, limit=1)[0].body == {"values": {"a": None, "b": [None, 1.5]}}


def test_floats_survive_exactly(journal: Journal, path: Path) -> None:
    value = 0.1 + 0.2
    journal.append(tick(1, value=value), "loop", {})
    assert read_ticks(path, limit=1)[0].body["value"] == value


def test_pruning_keeps_the_newest_and_prefers_decisions(journal: Journal, path: Path) -> None:
    for number in range(1, 1001):
        journal.append(tick(number, acted=number % 100 == 0), "loop", {})
    assert journal.prune(max_rows=100, max_bytes=2**30) == 900
    kept = read_ticks(path, limit=1000)
    assert len(kept) <= 100
    assert [t.id for t in kept if t.acted] == list(range(100, 1001, 100))
    assert {t.id for t in kept} >= set(range(911, 1001))
    assert journal.prune(max_rows=100, max_bytes=2**30) == 0


def test_pruning_when_everything_is_a_decision(journal: Journal, path: Path) -> None:
    for number in range(1, 301):
        journal.append(tick(number, acted=True), "loop", {})
    journal.prune(max_rows=100, max_bytes=2**30)
    assert [t.id for t in read_ticks(path, limit=1000)] == list(range(201, 301))


def test_bytes_are_bounded_and_given_back(journal: Journal, path: Path) -> None:
    for number in range(1, 2001):
        journal.append(tick(number, padding="x" * 2000), "loop", {})
    journal.prune(max_rows=10**6, max_bytes=2**20)
    kept = read_ticks(path, limit=10_000)
    assert 100 < len(kept) < 600
    assert kept[-1].id == 2000
    journal.close()
    assert path.stat().st_size < 2 * 2**20


@pytest.mark.usefixtures("journal")
def test_a_second_daemon_is_refused(path: Path) -> None:
    with pytest.raises(JournalError, match="another daemon"):
        Journal(path, wall_s=lambda: 0.0)


def test_it_is_readable_by_its_owner_only(journal: Journal, path: Path) -> None:
    journal.append(tick(1), "loop", {})
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("trick", ["symlink", "folder", "fifo", "dangling", "lock_symlink"])
def test_unsafe_places_are_refused(tmp_path: Path, trick: str) -> None:
    path, victim = tmp_path / "journal.db", tmp_path / "victim"
    victim.write_text("precious")
    if trick == "symlink":
        path.symlink_to(victim)
    elif trick == "dangling":
        path.symlink_to(tmp_path / "made-by-us")
    elif trick == "folder":
        path.mkdir()
    elif trick == "fifo":
        os.mkfifo(path)
    else:
        Path(f"{path}.lock").symlink_to(victim)
    with pytest.raises(JournalError) as caught:
        Journal(path, wall_s=lambda: 0.0)
    assert "\n" not in str(caught.value)
    assert victim.read_text() == "precious"
    assert not (tmp_path / "made-by-us").exists()
    with pytest.raises(JournalError, match="null byte"):
        Journal(Path(f"{path}\0"), wall_s=lambda: 0.0)


def test_a_newer_version_is_left_untouched(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(JournalError, match="newer version"):
        Journal(path, wall_s=lambda: 0.0)


def test_reading_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(JournalError) as caught:
        read_ticks(tmp_path / "none.db", limit=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "uid", "place"),
    [
        ({"STATE_DIRECTORY": "/var/lib/x:/var/lib/y"}, 5, "/var/lib/x/journal.db"),
        ({"HOME": "/root"}, 0, "/var/lib/kv-autotune/journal.db"),
        ({"XDG_STATE_HOME": "/root/.state"}, 0, "/root/.state/kv-autotune/journal.db"),
        ({"STATE_DIRECTORY": "/var/lib/x", "XDG_STATE_HOME": "/root/.state"}, 0, "/var/lib/x/journal.db"),
        ({"XDG_STATE_HOME": "state", "HOME": "/home/a"}, 5, "/home/a/.local/state/kv-autotune/journal.db"),
        ({"XDG_STATE_HOME": "/home/a/.state"}, 5, "/home/a/.state/kv-autotune/journal.db"),
        ({"HOME": "/home/a"}, 5, "/home/a/.local/state/kv-autotune/journal.db"),
    ],
)
def test_default_place(environment: Any, uid: Any, place: Any) -> None:
    assert default_journal(environment, uid) == Path(place)
