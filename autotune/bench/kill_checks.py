"""What must hold after something was killed, as functions of what was seen: each returns violations, one line each."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from autotune.bench.tap import Write
from autotune.bench.traffic import Failed
from autotune.journal_file import Tick, read_runs
from autotune.rethinking import Rethinker
from autotune.wiring import minds_of
from engine.control_client import TunablesView
from policies.rollback import ROLLBACK

_SLACK_NS = 10_000_000


@dataclass(frozen=True)
class Timing:
    """Of the daemon that is being killed; seconds."""

    tick_s: float
    poll_s: float
    window_s: float

    @property
    def calm_ns(self) -> int:
        """How long after the first tick that knows the engine nothing may be written: a window, less the tick by which
        the first reading may be older than that tick.
        """
        return round((self.window_s - self.tick_s) * 1e9) - _SLACK_NS


def knows(tick: Tick, instance: str) -> bool:
    """Whether a tick saw this instance of the engine, well."""
    body = tick.body
    return body.get("health") == "ok" and body.get("observation", {}).get("instance") == instance


def state_seen(tick: Tick, view: TunablesView) -> list[str]:
    """Whether a tick saw the engine as the engine itself says it is."""
    body, problems = tick.body, []
    if body.get("health") != "ok":
        return [f"tick {tick.id}, the first after the return, found the engine {body.get('health')}: {_why(body)}"]
    seen = body["observation"]["tunables"]
    if seen != view["effective"]:
        problems.append(f"tick {tick.id} saw {seen}, the engine has {view['effective']}")
    writers = {knob: entry[:2] for knob, entry in body["writers"].items()}
    there = {
        knob: [record["writer"], record["revision"]]
        for knob, record in view["writers"].items()
        if record["writer"] != "startup"
    }
    if writers != there:
        problems.append(f"tick {tick.id} took {writers} for the writers, the engine has {there}")
    if body.get("scenario") == "other_daemon":
        problems.append(f"tick {tick.id} took its own earlier write for another daemon's: {_why(body)}")
    return problems


def calm(writes: Sequence[Write], from_ns: int, until_ns: int) -> list[str]:
    """Nothing may reach the engine in between."""
    return [
        f"a write after {(write.stamp_ns - from_ns) / 1e9:.2f} s, {(until_ns - write.stamp_ns) / 1e9:.2f} s before the "
        f"end of the first window: {write.changes}"
        for write in writes
        if from_ns < write.stamp_ns < until_ns and write.status is not None
    ]


def again_too_soon(writes: Sequence[Write], dwell_s: float) -> list[str]:
    """No knob may be written twice within its dwell, whatever died in between; a rollback need not wait, nor what
    did not arrive.
    """
    problems, last = [], dict[str, Write]()
    for write in writes:
        if not write.reached or (write.status or 200) != 200:
            continue
        for knob in write.changes:
            before = last.get(knob)
            passed_s = dwell_s if before is None else (write.stamp_ns - before.stamp_ns + _SLACK_NS) / 1e9
            if passed_s < dwell_s and not write.reason.startswith(ROLLBACK):
                problems.append(f"{write.changes} {passed_s:.2f} s after the same knob was written")
            last[knob] = write
    return problems


def unbroken(ticks: Sequence[Tick], after_id: int) -> list[str]:
    """Ids without a gap, rows as they were written, no tick that failed."""
    ids = [after_id, *(tick.id for tick in ticks)]
    problems = [f"tick {after} follows {before}" for before, after in pairwise(ids) if after != before + 1]
    problems += [f"tick {tick.id} is damaged: {tick.damaged}" for tick in ticks if tick.damaged]
    failed = [tick for tick in ticks if tick.body.get("scenario") == "tick_error"]
    return problems + [f"tick {tick.id}: {_why(tick.body)}" for tick in failed]


def file_intact(journal: Path) -> list[str]:
    """SQLite's own check, from another connection, and whether anything was moved aside."""
    aside = sorted(path.name for path in journal.parent.glob(f"{journal.name}.damaged-*"))
    problems = [f"the journal was found damaged: {', '.join(aside)}"] if aside else []
    try:
        connection = sqlite3.connect(f"{journal.as_uri()}?mode=ro", uri=True, timeout=5)
        try:
            rows = connection.execute("PRAGMA integrity_check").fetchall()
        finally:
            connection.close()
    except sqlite3.Error as error:
        return [*problems, f"integrity_check: {error}"]
    return problems + [f"integrity_check: {row[0]}" for row in rows if row[0] != "ok"]


def replays(journal: Path, ticks: Sequence[Tick]) -> list[str]:
    """Whether policy and guard decide every tick again as it was recorded."""
    found = Rethinker(read_runs(journal), minds_of).replay(ticks)
    if found.same + found.held == found.ticks:
        return []
    return [f"replay: {found.summary()}: {line}" for line in found.lines[:3]]


def lost(failed: Sequence[Failed], outages: Sequence[tuple[int, int]]) -> tuple[int, list[str]]:
    """How many requests went with an engine that was killed, and those that had no such reason."""
    with_engine, others = 0, []
    for one in failed:
        if any(one.sent_ns <= end and begin <= one.ended_ns for begin, end in outages):
            with_engine += 1
        else:
            others.append(f"a request was lost while the engine lived: {one.kind} {one.message}")
    return with_engine, others


def _why(body: Mapping[str, Any]) -> str:
    return str(body.get("reason", ""))[:200]
