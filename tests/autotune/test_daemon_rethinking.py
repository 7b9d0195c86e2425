"""Recorded ticks decided again: bit for bit the same, or told which are not, and why."""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import pytest

from autotune.config import parse_config
from autotune.journal_file import read_runs, read_ticks_between
from autotune.rethinking import Replayed, Rethinker
from autotune.run_document import RunError, digest_of, read_run, rules_document, run_document
from autotune.wiring import check_rules, minds_of
from envs.simulated import DEFAULT_PROFILE
from policies.rules import presets

PRESSURE = "policy: {rules: literature, quality_budget: null}\n"


def swinging(rig: Any) -> Callable[[], None]:
    seconds = iter(range(10_000))

    def each_s() -> None:
        share = 0.5 + 0.45 * math.sin(next(seconds) / 7)
        rig.engine.set_usage(share, running=int(60 * share))
        rig.engine.serve_requests(3)

    return each_s


def replayed(rig: Any) -> Replayed:
    path = rig.parts.journal.path
    return Rethinker(read_runs(path), minds_of).replay(read_ticks_between(path, 1))


@pytest.fixture
def ran(make_rig: Any) -> Any:
    """A daemon that has changed things, held while the engine was away, and been reloaded to other rules."""
    rig = make_rig(PRESSURE)
    rig.parts.journal.start_run(rig.loop.run_id, run_document(rig.config, check_rules(rig.config)))
    load = swinging(rig)
    rig.run_s(60, load)
    rig.engine.alive = False
    rig.run_s(5)
    rig.engine.alive = True
    rig.write_config("guard: {dwell_s: {background: 30}}\n")
    rig.daemon.request_reload()
    rig.run_s(60, load)
    return rig


def test_every_tick_comes_out_the_same_over_a_reload(ran: Any) -> None:
    result = replayed(ran)
    assert (result.ticks, result.held, result.differ, result.damaged, result.impossible) == (125, 5, 0, 0, 0)
    assert result.lines == []
    runs = {tick.run for tick in ran.ticks()}
    assert len(runs) == 2, "a reload decides differently and must be told apart"
    assert sum(tick.body.get("proposal") is not None for tick in ran.ticks()) > 3


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (["reason"], "because", "reason was 'because'"),
        (["proposal"], ["kv_format", "int4"], "proposal was ['kv_format', 'int4']"),
        (["after"], "0" * 16, "after was '0000000000000000'"),
        (["guard_state", "moves"], {"step": [1]}, "after was"),
        (["policy_state", "stamp_ns"], 1, "after was"),
    ],
)
def test_a_tick_that_was_tampered_with_differs(ran: Any, path: list[str], value: Any, told: str) -> None:
    ticks = list(read_ticks_between(ran.parts.journal.path, 20, 40))
    runs = read_runs(ran.parts.journal.path)
    changed = json.loads(json.dumps(ticks[3].body))
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    ticks[3] = type(ticks[3])(**{**vars(ticks[3]), "body": changed})
    result = Rethinker(runs, minds_of).replay(ticks)
    assert (result.differ, result.same) == (1, len(ticks) - 1)
    assert told in result.lines[0]


def test_command_answers_with_counts_and_code(ran: Any, autotune: Any) -> None:
    path = str(ran.parts.journal.path)
    code, out, _ = autotune("replay-decisions", "--journal", path)
    assert (code, out) == (0, "125 ticks: 120 decided the same, 5 held without deciding, 0 differ\n")
    assert autotune("replay-decisions", "12", "--journal", path)[1].startswith("1 ticks: 1 decided")
    assert autotune("replay-decisions", "10-19", "--journal", path)[1].startswith("10 ticks: 10 decided")
    for wrong in ("x", "1-", "-3x", "9" * 50):
        code, _, err = autotune("replay-decisions", "--journal", path, "--", wrong)
        assert (code, len(err.splitlines())) == (2, 1)
    code, _, err = autotune("replay-decisions", "900-1000", "--journal", path)
    assert (code, "no such ticks" in err) == (1, True)
    assert autotune("replay-decisions", "--journal", path + "no")[0] == 1


def test_bytes_that_changed_inside_a_page_are_found(ran: Any, autotune: Any) -> None:
    path = ran.parts.journal.path
    with sqlite3.connect(path) as other:
        other.execute("UPDATE ticks SET body = replace(body, 'steady', 'staedy') WHERE id = 30")
        other.execute("UPDATE ticks SET body = substr(body, 1, 100) WHERE id = 31")
    code, out, _ = autotune("replay-decisions", "29-32", "--journal", str(path))
    assert code == 1
    assert out.splitlines()[-1] == "4 ticks: 2 decided the same, 0 held without deciding, 0 differ, 2 damaged"
    assert autotune("decisions", "--journal", str(path))[0] == 0


def test_what_cannot_be_decided_again_is_told_apart(make_rig: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(12, lambda: rig.engine.serve_requests(1))  # without a run's document
    result = replayed(rig)
    assert (result.impossible, result.same) == (12, 0)
    assert "does not hold its configuration" in result.lines[0]


def test_a_policy_that_raises_is_replayed_as_such(make_rig: Any) -> None:
    class Broken:
        name = "broken"

        def initial_state(self) -> dict[str, Any]:
            return {}

        def decide(self, _observation: Any, _state: Any) -> Never:
            raise ZeroDivisionError("by nothing")

    rig = make_rig()
    rig.parts.minds = replace(rig.parts.minds, policy=Broken())
    rig.parts.journal.start_run(rig.loop.run_id, run_document(rig.config, check_rules(rig.config)))
    rig.run_s(5, lambda: rig.engine.serve_requests(1))
    path = rig.parts.journal.path
    again = Rethinker(read_runs(path), lambda config, rules: replace(minds_of(config, rules), policy=Broken())).replay(
        read_ticks_between(path, 1)
    )
    assert (again.same, again.ticks) == (5, 5)
    assert replayed(rig).differ == 5  # the rules do not raise


def test_documents_hold_every_preset_and_notice_other_files(tmp_path: Path) -> None:
    for name in presets():
        config = parse_config(f"policy: {{rules: {name}}}\n")
        rules = check_rules(config)
        again, same = read_run(json.loads(run_document(config, rules)))
        assert again == config
        assert rules_document(same) == rules_document(rules)
    profile = tmp_path / "profile.yaml"
    profile.write_text("one")
    config = parse_config(f"policy: {{use: predictor, profile: {profile}}}\n")
    document = json.loads(run_document(config, rules))
    read_run(document)
    profile.write_text("two")
    with pytest.raises(RunError, match=r"profile\.yaml is not what it was then"):
        read_run(document)
    with pytest.raises(RunError, match="another version"):
        read_run({"config": {}})
    with pytest.raises(RunError, match="another version"):
        read_run({**document, "config": {"nosuch": 1}})
    assert digest_of(tmp_path / "none").startswith("unreadable")
    before = digest_of(tmp_path)
    (tmp_path / "weights").write_text("w")
    assert digest_of(tmp_path) != before
    before = digest_of(tmp_path)
    (tmp_path / os.fsdecode(b"\xff")).write_text("a name that is no UTF-8")
    os.mkfifo(tmp_path / "pipe")  # not read: nobody would write
    assert len(digest_of(tmp_path)) == len(before)
    assert digest_of(tmp_path) != before


@pytest.mark.parametrize("use", ["rules", "predictor", "auto"])
def test_with_a_profile_predictions_and_the_quality_budget_replay_too(make_rig: Any, use: str) -> None:
    rig = make_rig(f"policy: {{use: {use}, rules: literature, profile: {DEFAULT_PROFILE}}}\n")
    rig.parts.journal.start_run(rig.loop.run_id, run_document(rig.config, check_rules(rig.config)))
    load = swinging(rig)
    rig.run_s(40, load)
    rig.engine.state.desired["kv_format"] = rig.engine.state.effective["kv_format"] = "int4"
    rig.run_s(40, load)
    result = replayed(rig)
    assert (result.same, result.ticks, result.lines) == (80, 80, [])
    if use == "rules":
        assert {"over_budget", "handed_back"} & {tick.body["verdict"][0] for tick in rig.ticks()}


def test_without_a_profile_what_the_budget_bears_of_a_proposal_replays_too(make_rig: Any) -> None:
    rig = make_rig("policy: {rules: literature}\n")
    rig.parts.journal.start_run(rig.loop.run_id, run_document(rig.config, check_rules(rig.config)))
    rig.run_s(60, swinging(rig))
    result = replayed(rig)
    assert (result.same, result.ticks, result.lines) == (60, 60, [])
    texts = [tick.body["verdict"][1] for tick in rig.ticks()]
    assert any(
        "kv_format native -> int8, as far as the quality budget bears, in place of int4" in text for text in texts
    )
    assert any("int4 is more than the quality budget bears" in text for text in texts)
