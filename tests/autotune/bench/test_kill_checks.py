"""What the benchmark of kills takes for a violation: each check must see what it is for, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.bench.kill_checks import (
    Timing,
    again_too_soon,
    calm,
    file_intact,
    knows,
    lost,
    replays,
    state_seen,
    unbroken,
)
from autotune.bench.tap import Write
from autotune.bench.traffic import Failed
from autotune.journal import Journal
from autotune.journal_file import Tick, read_ticks
from autotune.run_document import run_document
from autotune.wiring import check_rules

TIMING = Timing(tick_s=0.2, poll_s=0.1, window_s=1.0)
S = 10**9
VIEW: Any = {
    "effective": {"kv_format": "int4", "block_size": 16},
    "writers": {
        "kv_format": {"writer": "autotune", "revision": 3, "reason": "", "stamp_ns": 1},
        "block_size": {"writer": "startup", "revision": 0, "reason": "", "stamp_ns": 1},
    },
}
BODY = {
    "health": "ok",
    "scenario": "steady",
    "reason": "",
    "observation": {"tunables": VIEW["effective"], "instance": "a"},
    "writers": {"kv_format": ["autotune", 3, "because"]},
}


def tick(number: int, **body: Any) -> Tick:
    return Tick(number, "run", 0.0, number * S, False, {**BODY, **body})


def test_a_state_that_is_known_is_no_violation() -> None:
    assert state_seen(tick(1), VIEW) == []
    assert knows(tick(1), "a")
    assert not knows(tick(1), "b")
    assert not knows(tick(1, health="gone"), "a")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"health": "starting"}, "found the engine starting"),
        ({"observation": {"tunables": {"kv_format": "int8", "block_size": 16}}}, "int8"),
        ({"writers": {}}, "for the writers"),
        ({"writers": {"kv_format": ["autotune", 2, ""]}}, "for the writers"),
        ({"writers": {"kv_format": ["operator:anna", 3, ""]}}, "for the writers"),
        ({"scenario": "other_daemon"}, "another daemon's"),
    ],
)
def test_a_state_that_is_not_known_is_one(change: dict[str, Any], word: str) -> None:
    (problem,) = state_seen(tick(1, **change), VIEW)
    assert word in problem


def test_writes_in_the_first_window_are_a_burst() -> None:
    def write(stamp_s: float, status: int | None) -> Write:
        return Write(round(stamp_s * S), {"kv_format": "int8"}, reached=True, status=status)

    # Killed at 10 s; the first tick that knew the engine came at 12 s.
    until_ns = 12 * S + TIMING.calm_ns
    assert until_ns == 12.79 * S, "a window, less a tick and a little"
    assert calm([write(9.9, 200), write(12.8, 200), write(12.5, None)], 10 * S, until_ns) == []
    assert len(calm([write(12.5, 200), write(10.1, 200), write(12.7, 409)], 10 * S, until_ns)) == 3


def test_a_knob_that_is_written_again_before_its_time_is_a_burst() -> None:
    def write(stamp_s: float, knob: str = "kv_format", reason: str = "", **more: Any) -> Write:
        return Write(round(stamp_s * S), {knob: "int8"}, reason, **{"reached": True, "status": 200, **more})

    good = [write(1.0), write(1.1, "block_size"), write(1.4), write(1.5, reached=False), write(1.6, status=409)]
    assert again_too_soon(good, 0.4) == []
    assert again_too_soon([write(1.0), write(1.2, reason="rollback: it was worse")], 0.4) == []
    assert len(again_too_soon([write(1.0), write(1.2)], 0.4)) == 1
    assert len(again_too_soon([write(1.0, status=None), write(1.2)], 0.4)) == 1, "it arrived, though no answer came"


def test_gaps_damage_and_failed_ticks_are_seen() -> None:
    good = [tick(5), tick(6), tick(7)]
    assert unbroken(good, 4) == []
    assert unbroken(good, 3) == ["tick 5 follows 3"]
    assert unbroken([good[0], good[2]], 4) == ["tick 7 follows 5"]
    assert unbroken([good[0], good[0]], 4) == ["tick 5 follows 5"]
    assert unbroken([replace(good[0], damaged="check sum differs")], 4) == ["tick 5 is damaged: check sum differs"]
    assert unbroken([tick(5, scenario="tick_error", reason="KeyError")], 4) == ["tick 5: KeyError"]


def test_requests_are_lost_with_an_engine_or_for_no_reason() -> None:
    outages = [(10 * S, 15 * S)]
    before = Failed(8 * S, 9 * S, "timeout", "")
    running, refused = Failed(9 * S, 11 * S, "disconnected", ""), Failed(14 * S, 14 * S, "connect", "")
    over, after = Failed(9 * S, 16 * S, "disconnected", ""), Failed(16 * S, 17 * S, "http_500", "oops")
    with_engine, others = lost([before, running, refused, over, after], outages)
    assert with_engine == 3
    assert others == [
        "a request was lost while the engine lived: timeout ",
        "a request was lost while the engine lived: http_500 oops",
    ]


def test_a_journal_that_was_altered_or_moved_aside_is_seen(make_rig: Any, tmp_path: Path) -> None:
    rig = make_rig("policy: {rules: literature, quality_budget: null}\n")
    rig.parts.journal.start_run(rig.loop.run_id, run_document(rig.config, check_rules(rig.config)))
    rig.run_s(15, lambda: (rig.engine.set_usage(0.95, running=60, waiting=30), rig.engine.serve_requests(5)))
    path = rig.parts.journal.path
    ticks = read_ticks(path, limit=99)
    assert (file_intact(path), replays(path, ticks)) == ([], [])
    number, one = next((n, t) for n, t in enumerate(ticks) if t.body.get("proposal"))
    ticks[number] = replace(one, body={**one.body, "proposal": None})
    (problem,) = replays(path, ticks)
    assert "1 differ" in problem
    (tmp_path / f"{path.name}.damaged-1-1").write_bytes(b"")
    assert file_intact(path) == [f"the journal was found damaged: {path.name}.damaged-1-1"]


def test_a_broken_file_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path, wall_s=lambda: 0.0)
    for number in range(1, 300):
        journal.append(Tick(number, "run", 0.0, 0, True, {"padding": "x" * 900}), "loop", {})
    journal.close()
    assert file_intact(path) == []
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        stream.write(b"\xa5" * 20_000)
    assert file_intact(path)
