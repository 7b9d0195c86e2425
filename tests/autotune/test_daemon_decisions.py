"""``autotune decisions --follow``: every decision once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import decisions
from autotune.decisions import DecisionRecord, outcome_words
from autotune.journal_file import Tick
from policies.judgement import Outcome


def tick(number: int, verdict: str = "refused") -> Tick:
    row = {
        "wall_s": 0.0, "tick": number, "knob": "kv_format", "old": "native", "new": "int8", "verdict": verdict,
        "scenario": "s", "writer": "autotune", "reason": "because", "why": "",
    }  # fmt: skip
    return Tick(number, "run", 0.0, 0, acted=True, body={"decision": row})


def test_following_shows_nothing_twice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    journal = [tick(1), tick(2), tick(3)]
    polls = 0

    def read(_path: Path, limit: int, after_id: int) -> list[Tick]:
        return [row for row in journal if row.id > after_id][-limit:]

    def pause(_seconds: float) -> None:
        nonlocal polls
        polls += 1
        if polls == 2:
            journal.append(tick(4))
        if polls == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(decisions, "_read", read)
    monkeypatch.setattr(decisions.time, "sleep", pause)
    with pytest.raises(KeyboardInterrupt):
        decisions.decisions(number=2, follow=True, journal=Path("journal.db"), config=None, as_json=False)
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["[2]", "[3]", "[4]"]


def test_following_shows_an_effect_once_with_its_outcome(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {"before": {"ttft_tail_s": 2.0}, "after": {"ttft_tail_s": 0.5}, "together_with": []}
    effects: list[dict[str, Any] | None] = [None, measured, measured, {**measured, "outcome": "met", "why": ""}]
    polls = iter([*effects, effects[-1], effects[-1]])

    def read(_path: Path, limit: int, after_id: int) -> list[Tick]:
        row = replace(tick(1, "applied"), effect=next(polls))
        return [row][-limit:] if after_id < 1 else []

    def pause(_seconds: float) -> None:
        if next(ended):
            raise KeyboardInterrupt

    ended = iter([False] * 4 + [True])
    monkeypatch.setattr(decisions, "_read", read)
    monkeypatch.setattr(decisions.time, "sleep", pause)
    with pytest.raises(KeyboardInterrupt):
        decisions.decisions(number=2, follow=True, journal=Path("journal.db"), config=None, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1] == "[1] effect: TTFT tail 2 -> 0.5 s; kept: no tail counts against it"


def test_an_outcome_is_told_in_words_wherever_people_read_it() -> None:
    """A bare "met" stood beside figures that were worse than before."""
    page = (Path(decisions.__file__).parents[1] / "dashboard/static/decisions.js").read_text(encoding="utf-8")
    for outcome in Outcome:
        assert outcome_words(outcome).split()[0].strip(":,") in {"kept", "missed", "unclear"}
        assert f"{outcome}: " in page
    assert outcome_words("of a later version") == "of a later version"


def test_a_line_has_the_change_once() -> None:
    head = DecisionRecord(7, 0.0, "kv_format", "native", "int4", "scarce", "", "autotune", "applied", "")
    for reason in ("demand grows: kv_demand 0.9; kv_format native -> int4", "kv_format native -> int4: demand grows"):
        assert replace(head, reason=reason).line().count("kv_format native -> int4") == 1
        row = {**head.to_json(), "reason": reason}
        assert decisions._line(row).count("kv_format native -> int4") == 1
    # What was done is not what was wanted: both are told.
    clamped = replace(head, new="int8", reason="demand grows; kv_format native -> int4")
    assert "kv_format native -> int8 applied" in clamped.line()
    assert clamped.line().endswith("demand grows; kv_format native -> int4")
