"""The verbs about policies as a user calls them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from policy_cards import card, tensors_of
from typer.testing import CliRunner

from autotune.cli import app
from autotune.cli._shared import CliError
from autotune.cli.evaluate import _names
from autotune.simulation.bars import Bar, bar_chart
from envs.profile import read_profile
from envs.simulated import DEFAULT_PROFILE
from policies import auto
from policies.card import ProfileOf, read_card
from policies.choice import choice_of
from policies.export import export_policy
from policies.named import World, contender
from policies.profile_verdict import read_verdict
from policies.usual_budget import USUAL_BUDGET

KEYS = {
    "goodput_ratio_pressure", "goodput_ratio_idle", "regret_pct_upper_steady", "shift_headroom_pct", "shift_gain_pct",
    "cost_reduction_pct", "learned_minus_rules", "learned_minus_predictor", "ablation", "best_policy",
    "decision_p99_ms", "reversals_24h",
}  # fmt: skip


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_an_evaluation_ends_with_a_line_of_json_and_a_report(tmp_path: Path) -> None:
    result = run(
        "evaluate", "--policies", "default", "--workloads", "reasoning-bursty@1.5", "--seeds", 2, "--duration", 30,
        "--kv-pool-bytes", "2G", "--statics", "none;static:kv_format=int8,block_size=32", "--cost-seeds", 1, "-j", 1,
        "--no-ablation", "--json-line", "-o", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.strip().splitlines()[-1])
    assert set(line) >= KEYS
    assert line["best_policy"] == "default"
    assert line["reversals_24h"] is line["learned_minus_rules"] is None
    report = (tmp_path / "report.html").read_text()
    assert "<script" not in report
    assert "A device costs 1 per hour" in report
    assert "attainment over its rate" in report
    for figure in report.split("<svg")[1:]:
        ET.fromstring("<svg" + figure.split("</svg>")[0] + "</svg>")
        assert "nan" not in figure
    assert json.loads((tmp_path / "evaluation.json").read_text())["headline"] == line


def test_linting_says_what_it_found_and_exits_so() -> None:
    assert run("lint-rules", "default").exit_code == 0
    result = run("lint-rules", "literature")
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 7
    assert isinstance(run("lint-rules", "nowhere.yaml").exception, CliError)


def test_rules_are_explained_as_a_table_and_a_page(tmp_path: Path) -> None:
    result = run("explain-rules", "default", "--loads", "0.3,0.5", "--hold", 20, "--plot", tmp_path / "p.html")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("kv_format=") == 3
    assert (tmp_path / "p.html").read_text().count("<svg") == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "-o", "DIR", "--policies", "nix"], "nor a policy; known: none"),
        (["evaluate", "-o", "DIR", "--workloads", "nix@1"], "nor a built-in workload"),
        (["evaluate", "-o", "DIR", "--workloads", "chat-steady@1e308"], "SOURCE@LOAD"),
        (["tune-rules", "-o", "DIR", "--workloads", "chat-steady@x1e-300"], "SOURCE@LOAD"),
        (["evaluate", "-o", "DIR", "--duration", "0"], "--duration"),
        (["evaluate", "-o", "DIR", "--duration", "inf"], "--duration must be from"),
        (["evaluate", "-o", "DIR", "--price", "nan"], "--price must be from"),
        (["evaluate", "-o", "DIR", "--constant-hours", "1e308"], "--constant-hours must be from"),
        (["tune-rules", "-o", "DIR", "--duration", "nan"], "--duration must be from"),
        (["tune-rules", "-o", "DIR", "--interval", "0"], "--interval must be from"),
        (["tune-rules", "-o", "DIR", "--minutes", "nan"], "--minutes must be from"),
        (["check-policy", "--hours", "1e308"], "--hours must be from"),
        (["check-policy", "--interval", "1e-300"], "--interval must be from"),
        (["evaluate", "-o", "DIR", "--statics", "static:kv_format=int3"], "int3"),
        (["tune-rules", "-o", "DIR", "--workloads", "flash-crowd"], "held out"),
        (["explain-rules", "default", "--loads", "a"], "--loads"),
        (["explain-rules", "default", "--loads", "nan"], "--loads"),
        (["explain-rules", "default", "--loads", "1,0.5"], "--loads"),
        (["explain-rules", "default", "--hold", "0"], "--hold"),
        (["explain-rules", "default", "--hold", "inf"], "--hold"),
        (["explain-rules", "default", "--output-tokens", str(10**20)], "1000000 tokens"),
        (["explain-rules", "default", "--plot", "DIR"], "cannot be written"),
        (["explain-rules", "default", "--json", "DIR/no/such.json"], "cannot be written"),
        (["check-policy", "none"], "needs no check"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = run(*[argument.replace("DIR", str(tmp_path)) for argument in arguments])
    assert isinstance(result.exception, CliError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_commas_of_a_static_setting_stay_with_it() -> None:
    assert _names("a, static:x=1,y=2,b,learned:p") == ["a", "static:x=1,y=2", "b", "learned:p"]


def test_bars_go_both_ways_and_survive_what_is_unknown() -> None:
    text = bar_chart([Bar("a<b", 1.0, 0.5, 1.5), Bar("c", -2.0), Bar("d", None), Bar("e", float("nan"))], mark=0.5)
    ET.fromstring(text)
    assert text.count("<rect") == 2
    assert text.count("not known") == 2


def test_an_evaluation_writes_the_verdict_that_auto_goes_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled, out = tmp_path / "bundled", tmp_path / "results"
    monkeypatch.setattr(auto, "BUNDLED", bundled)
    profile = read_profile(DEFAULT_PROFILE)
    of = ProfileOf(digest=profile.digest, description="this one", estimated=True)
    made = card(name="taught", profile=of)
    export_policy(bundled / "one", made, tensors_of(made.network))
    common = (
        "evaluate", "--workloads", "reasoning-bursty@1.5", "--seeds", 1, "--duration", 20, "--kv-pool-bytes", "2G",
        "--statics", "none", "--cost-seeds", 0, "-j", 1, "--no-ablation", "-o", out,
    )  # fmt: skip
    result = run(*common, "--policies", f"default,auto,literature,learned:{bundled / 'one'}")
    assert result.exit_code == 0, result.output
    written = read_verdict(out / "verdict.json")
    assert [one.identity for one in written.candidates] == [
        ("rules", "default", ""), ("learned", "taught", read_card(bundled / "one").sha256),
    ]  # fmt: skip
    shown = {
        row["contender"]: row for row in json.loads((out / "evaluation.json").read_text())["overall"]["interactive"]
    }
    assert written.candidates[0].iqm.model_dump() == shown["default"]["iqm"]
    assert (written.seeds, written.duration_s, written.pool_bytes) == (1, 20.0, 2 << 30)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", written.created)
    assert str(tmp_path) not in (out / "verdict.json").read_text()

    choice = choice_of(contender("auto", World(profile)).policy)
    assert choice is not None
    assert (choice.kind, {one.reason for one in choice.refused}) == ("rules", {"unscored", "unjudged"})
    (bundled / "verdicts").mkdir()
    (bundled / "verdicts" / "here.json").write_bytes((out / "verdict.json").read_bytes())
    choice = choice_of(contender("auto", World(profile)).policy)
    assert choice is not None
    best = next(one for one in written.ranked() if one.worst_loss <= USUAL_BUDGET)
    assert choice.kind == best.kind
    assert f"{best.iqm} of requests inside their targets" in choice.why

    # One of an earlier run does not outlive another that judged nobody.
    result = run(*common, "--policies", "auto")
    assert result.exit_code == 0, result.output
    assert not (out / "verdict.json").exists()
