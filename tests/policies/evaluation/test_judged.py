"""What an evaluation tells ``auto``: who is a candidate, and in which figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from policy_cards import card, tensors_of

from autotune.cli._simulated import YEAR_S
from envs.profile import read_profile
from envs.simulated import DEFAULT_PROFILE
from policies.card import PolicyFileError, read_card
from policies.evaluation.cells import Score, Setup
from policies.evaluation.experiment import Plan, Results
from policies.evaluation.figures import _is_rules, overall
from policies.evaluation.judged import judged
from policies.evaluation.scenarios import Scenario, Span
from policies.evaluation.table import BEST_STATIC, NATIVE, Table
from policies.export import export_policy
from policies.profile_verdict import MOST_CANDIDATES, ProfileVerdict

SETUP = Setup(read_profile(DEFAULT_PROFILE), {}, Span(60.0))


def score(attainment: float, quality: float, tokens: int = 1000) -> Score:
    return Score(
        offered=100, completed=100, good=round(100 * attainment), refused=0, goodput_rps=attainment,
        attainment=attainment, window_tokens=100, tokens=tokens, prompt_tokens=1000, quality=quality, ttft_p95_s=1.0,
        tbt_p95_s=0.1, preemptions=0, full_share=0.0, changes=0, reversals=0, segments=(),
    )  # fmt: skip


def verdict(figures: dict[str, list[list[Score]]], scenarios: list[str]) -> ProfileVerdict | None:
    """``figures``: scores [workload][seed] by contender, beside a native that meets half."""
    seeds = len(next(iter(figures.values()))[0])
    native = {NATIVE: [[score(0.5, 0.0)] * seeds] * len(scenarios)}
    places = tuple(Scenario.parse(text) for text in scenarios)
    table = Table(places, {**native, **figures}, (NATIVE,), 0.005)
    plan = Plan(places, tuple(figures), (), seeds=seeds, quality_budget=0.005)
    rows = overall(table, [NATIVE, BEST_STATIC, *figures], "interactive")
    results = Results(table, None, {}, None, {}, {})
    return judged(SETUP, plan, results, rows, created="2026-12-01T00:00:00Z", program="0.1.0")


def test_figures_are_those_of_the_evaluation() -> None:
    rules = [[score(0.6, 0.001), score(0.7, 0.002)], [score(0.8, 0.001, 3000), score(0.9, 0.005, 1000)]]
    lossy = [[score(0.9, 0.001)] * 2, [score(0.9, 0.02, 100), score(0.9, 0.0, 200)]]
    found = verdict({"default": rules, "predictor": lossy}, ["chat-steady@0.5", "flash-crowd@1.2"])
    assert found is not None
    first, second = found.candidates
    assert (first.kind, first.name, second.kind) == ("rules", "default", "predictor")
    assert first.iqm.value == pytest.approx(0.75)
    assert first.iqm.low < 0.75 < first.iqm.high
    assert first.worst_loss == pytest.approx(0.002)  # by tokens: 0.0015 and 0.002, not the worst seed
    assert (first.inside_budget, second.inside_budget) == (True, False)
    assert second.worst_loss == pytest.approx(0.02 / 3)
    assert found.native.value == found.best_static.value == 0.5
    assert (found.workloads, found.seeds, found.duration_s) == (["chat-steady@0.5", "flash-crowd@1.2"], 2, 60.0)
    assert found.profile.digest == SETUP.profile.digest
    assert found.profile.estimated
    assert [one.kind for one in found.ranked()] == ["predictor", "rules"]


def test_only_who_may_be_taken_is_judged(tmp_path: Path) -> None:
    made = card(name="taught")
    export_policy(tmp_path / "a", made, tensors_of(made.network))
    rows = [[score(0.6, 0.0)]]
    others = [
        "auto", "literature", "unbudgeted:default", "static:kv_format=int8", "none", "rules.yaml",
        "unbudgeted:predictor",
    ]  # fmt: skip
    assert verdict(dict.fromkeys(others, rows), ["chat-steady"]) is None
    learned = [f"learned:{tmp_path / 'a'}", f"learned:{tmp_path}/./a/."]
    found = verdict(dict.fromkeys([*others, *learned], rows), ["chat-steady"])
    assert found is not None
    (one,) = found.candidates
    assert one.identity == ("learned", "taught", read_card(tmp_path / "a").sha256)
    assert str(tmp_path) not in found.model_dump_json()
    with pytest.raises(PolicyFileError):
        verdict({"learned:nowhere": rows}, ["chat-steady"])


def test_a_trace_is_told_without_where_it_lay(tmp_path: Path) -> None:
    trace = tmp_path / "own.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    found = verdict({"default": [[score(0.6, 0.0)]]}, [f"{trace}@0.5"])
    assert found is not None
    assert found.workloads == ["own.csv@0.5"]


def test_what_auto_took_does_not_count_as_rules() -> None:
    assert _is_rules("default")
    assert not _is_rules("auto")


def test_where_too_many_were_played_rules_and_predictor_are_judged(tmp_path: Path) -> None:
    rows, names = [[score(0.6, 0.0)]], []
    for number in range(MOST_CANDIDATES):
        made = card(name=f"taught-{number}")
        export_policy(tmp_path / str(number), made, tensors_of(made.network))
        names.append(f"learned:{tmp_path / str(number)}")
    found = verdict(dict.fromkeys([*names, "predictor", "default"], rows), ["chat-steady"])
    assert found is not None
    assert len(found.candidates) == MOST_CANDIDATES
    assert {one.kind for one in found.candidates[:2]} == {"rules", "predictor"}


def test_whatever_may_be_asked_of_an_evaluation_can_be_told() -> None:
    """It would be found out when all has been played."""
    rows, places = {"default": [[score(0.6, 0.02)]]}, (Scenario.parse("chat-steady"),)
    table = Table(places, {NATIVE: [[score(0.5, 0.0)]], **rows}, (NATIVE,), 2.0)
    plan = Plan(places, ("default",), (), seeds=1, quality_budget=2.0)
    setup = replace(SETUP, span=Span(YEAR_S, 1e6), pool_bytes=1 << 50)
    shown = overall(table, [NATIVE, BEST_STATIC, "default"], "interactive")
    found = judged(setup, plan, Results(table, None, {}, None, {}, {}), shown, created="2026-12-01", program="0.1.0")
    assert found is not None
    assert (found.duration_s, found.quality_budget) == (YEAR_S, 2.0)
