"""What the demonstration says in words: decisions in time, the guard's refusals, the verdict, where to look further."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autotune.decisions import DecisionRecord
from autotune.demo.afterwards import how_to_look, program_words
from autotune.demo.decision_lines import DecisionLines
from autotune.demo.quality_note import quality_note
from autotune.demo.report import Arm
from autotune.demo.run_folder import RunFolderError, run_folder
from autotune.demo.sides import NATIVE, side
from autotune.demo.verdict import verdict
from autotune.demo.watch import Seen
from autotune.replay.summary import Percentiles, Summary, Targets, summarise
from envs.profile import read_profile
from envs.simulated import DEFAULT_PROFILE

REASON = "demand grows: kv_demand 0.85; kv_format native -> int4"


def record(tick: int = 21, wall_s: float = 100.0, **fields: object) -> DecisionRecord:
    base = DecisionRecord(tick, wall_s, "kv_format", "native", "int4", "scarce", REASON, "autotune", "converging", "")
    return dataclasses.replace(base, **fields)  # type: ignore[arg-type]


def test_decisions_have_their_time_since_the_load_began_and_the_change_once() -> None:
    told: list[str] = []
    lines = DecisionLines(told.append)
    lines.show(record(11))
    lines.began_wall_s = 97.5
    lines.show(record(12, 97.0))
    lines.show(record())
    lines.end()
    text = "kv_format native -> int4 converging (tick {}, scarce): demand grows: kv_demand 0.85"
    assert told == [
        f"  before the load: {text.format(11)}", f"  before the load: {text.format(12)}",
        f"   2.5 s: {text.format(21)}",
    ]  # fmt: skip


def test_what_the_guard_held_back_is_shown_with_its_reason_and_counted() -> None:
    told: list[str] = []
    lines = DecisionLines(told.append)
    lines.began_wall_s = 90.0
    for tick in (1, 2, 3):
        lines.show(record(tick, verdict="dwell", why=f"moved {tick} s ago"))
    lines.show(record(4, verdict="over_budget", why="too much"))
    lines.show(record(5, verdict="conflict", why="revision 3 by now", writer="operator:anna;until=99"))
    lines.end()
    wanted = "demand grows: kv_demand 0.85"
    assert told == [
        f"  10.0 s: kv_format native -> int4 held back by the guard (dwell: moved 1 s ago) (tick 1, scarce): {wanted}",
        f"  10.0 s: kv_format native -> int4 held back by the guard (over_budget: too much) (tick 4, scarce): {wanted}",
        f"  10.0 s: kv_format native -> int4 conflict: revision 3 by now (tick 5, scarce, by operator:anna): {wanted}",
        "  kv_format -> int4 was held back by the guard 3 times in all (dwell)",
    ]


def p95(seconds: float) -> Percentiles:
    return Percentiles(seconds, seconds, seconds, seconds, seconds)


def summary(goodput: float, ttft: float = 1.0, tbt: float = 0.01, tokens: float = 1000.0, lost: int = 0) -> Summary:
    return dataclasses.replace(
        summarise([], Targets()), offered=10, completed=10 - lost, goodput_rps=goodput, ttft=p95(ttft), tbt=p95(tbt),
        output_tokens_per_s=tokens,
    )  # fmt: skip


def said(ours: Summary, theirs: Summary, formats: tuple[str, ...] = ("native",)) -> str:
    two = (side("default", None, None), side(NATIVE, None, None))
    seen = Seen(values={"kv_format": list(formats)})
    (line,) = verdict([Arm(two[0], ours, seen), Arm(two[1], theirs, Seen())], two)
    return line


def test_the_verdict_says_what_was_won_and_what_got_worse() -> None:
    line = said(summary(1.9, 1.68, 0.0042, 1738), summary(0.24, 32.2, 0.0031, 1370), ("native", "int4"))
    assert line == (
        "the daemon with default had 7.92 times the goodput of static native (1.90 against 0.24 requests/s inside the "
        "targets); TTFT p95 1.68 s against 32.20 s; worse: TBT p95 4.2 ms against 3.1 ms, part of the KV stored in "
        "int4, which is not exact (one round; --pairs N tells chance from effect)"
    )
    assert "; nothing got worse" in said(summary(2.0), summary(1.0))


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (summary(1.0), summary(2.0), ["the daemon with default lost: 0.50 times", "nothing else got worse"]),
        (summary(0.0), summary(2.0), ["lost: it kept no request inside the targets, static native 2.00"]),
        (summary(2.0), summary(0.0), ["kept 2.00 requests/s inside the targets, static native none"]),
        (summary(0.0), summary(0.0), ["neither the daemon with default nor static native kept any request"]),
        (summary(1.02), summary(1.0), ["no difference: ", "(1.02 against 1.00", "; nothing got worse"]),
        (summary(2.0, tokens=900.0, lost=3), summary(1.0), ["900 output tokens/s against 1000, 3 requests lost"]),
        (summary(2.0, ttft=2.0), summary(1.0), ["inside the targets); worse: TTFT p95 2.00 s against 1.00 s ("]),
    ],
)
def test_the_verdict_is_honest(ours: Summary, theirs: Summary, words: list[str]) -> None:
    line = said(ours, theirs)
    for one in words:
        assert one in line


def test_every_other_side_has_its_verdict_and_rounds_are_means() -> None:
    three = (side("default", None, None), side("static:kv_format=int4", None, None), side(NATIVE, None, None))
    figures = (3.0, 2.0, 1.0, 5.0, 2.0, 1.0)
    arms = [Arm(one, summary(rps), Seen()) for one, rps in zip((*three, *three), figures, strict=True)]
    against_int4, against_native = verdict(arms, three)
    assert "2 times the goodput of static:kv_format=int4 (4.00 against 2.00" in against_int4
    assert "4 times the goodput of static native" in against_native
    assert "one round" not in against_native


def test_where_to_look_further_is_a_command(tmp_path: Path) -> None:
    tuned, native = side("default", None, None), side(NATIVE, None, None)
    seen = Seen(decisions=[record(11), record(12, knob="block_size", verdict="applied")])
    journal = tmp_path / "a b" / "journal.sqlite"
    arms = [Arm(tuned, summary(1.0), seen, journal), Arm(native, summary(1.0), Seen())]
    assert how_to_look(arms, [".venv/bin/autotune"]) == [
        f"more about a decision: .venv/bin/autotune explain 11 --journal '{journal}'",
        f"all of them: .venv/bin/autotune decisions --journal '{journal}'",
    ]
    gone = [dataclasses.replace(one, journal=None) for one in arms]
    (line,) = how_to_look(gone, ["autotune"])
    assert "--run-dir FOLDER keeps them" in line
    assert how_to_look([Arm(native, summary(1.0), Seen())], ["autotune"]) == []
    assert how_to_look([Arm(tuned, summary(1.0), Seen(), journal)], ["autotune"]) == []


def test_the_program_is_called_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program_words(".venv/bin/autotune", "py") == [".venv/bin/autotune"]
    assert program_words("/x/autotune/demo/__main__.py", "py") == ["py", "-m", "autotune"]
    (tmp_path / "autotune").write_text("#!/bin/sh\n")
    (tmp_path / "autotune").chmod(0o755)
    assert program_words(str(tmp_path / "autotune"), "py") == ["autotune"]


def test_a_named_folder_holds_the_last_demonstration_and_what_others_put_there(tmp_path: Path) -> None:
    named = tmp_path / "demo"
    for name in (
        "1/engine.log",
        "2/journal.sqlite",
        "2/journal.sqlite-wal",
        "2/admin.token",
        "3/mine.txt",
        "x/engine.log",
    ):
        (named / name).parent.mkdir(parents=True, exist_ok=True)
        (named / name).write_text("old")
    with run_folder(named) as folder:
        assert (folder.path, folder.keep) == (named, True)
        left = sorted(str(one.relative_to(named)) for one in named.rglob("*") if one.is_file())
        assert left == ["3/mine.txt", "in-use.lock", "x/engine.log"]
        assert not (named / "1").exists()
        with pytest.raises(RunFolderError, match="another demonstration is using it"), run_folder(named):
            pass
    with run_folder(named):
        pass


def test_a_link_in_the_folders_place_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "engine.log").write_text("mine")
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "1").symlink_to(tmp_path / "elsewhere")
    with run_folder(tmp_path / "demo"):
        assert (tmp_path / "elsewhere" / "engine.log").read_text() == "mine"


def test_a_temporary_folder_goes_unless_it_is_needed() -> None:
    with run_folder(None) as folder:
        assert folder.path.is_dir()
        assert not folder.keep
    assert not folder.path.exists()
    with run_folder(None) as folder:
        folder.keep = True
    assert folder.path.is_dir()
    folder.path.rmdir()


def test_by_which_figures_formats_are_judged_is_said() -> None:
    told = quality_note(None, "nothing")
    assert told.startswith(
        "loss per token by published figures of other models (--profile FILE has this one's): int8 0"
    )
    assert "the guard's budget is 0.5%, beyond it for long: " in told
    assert "int4" in told.rpartition("beyond it")[2]
    profile = read_profile(Path(DEFAULT_PROFILE).with_name("bundled_cpu.yaml"))
    told = quality_note(profile, "the profile that comes with this model")
    assert "by the profile that comes with this model: int8 0.00%" in told
    assert told.endswith("the guard's budget is 0.5%, all of them inside it")
