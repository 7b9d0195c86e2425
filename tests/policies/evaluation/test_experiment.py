"""A small evaluation from end to end: the same in any process, resumable, and honest about what it was asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envs.profile import read_profile
from envs.simulated import DEFAULT_PROFILE, SimulatedEngine
from envs.workload.trace import TraceRequest, from_requests
from policies.evaluation.calibration import Calibration, calibrate
from policies.evaluation.cells import Cell, Setup, run_cell
from policies.evaluation.document import document
from policies.evaluation.experiment import Plan, run
from policies.evaluation.figures import Terms
from policies.evaluation.offered import Offered
from policies.evaluation.oracle import ORACLE, OraclePlan, play_oracle
from policies.evaluation.scenarios import Scenario, Span, own_rate_rps, traffic
from policies.evaluation.statics import few, grid, random_settings
from policies.evaluation.store import Store, StoreError
from policies.executors import Serial, workers
from policies.split import HELD_OUT, TRAINING

SPAN = Span(40.0)
SCENARIO = Scenario.parse("reasoning-bursty@2")


class Silent:
    def __init__(self) -> None:
        self.stages: dict[str, int] = {}
        self.cells = 0

    def stage(self, name: str, cells: int) -> None:
        self.stages[name] = cells

    def done(self) -> None:
        self.cells += 1


@pytest.fixture(scope="module")
def setup() -> Setup:
    profile = read_profile(DEFAULT_PROFILE)
    calibrations = calibrate(profile, [SCENARIO], SPAN, pool_bytes=2 * 10**9)
    return Setup(profile, calibrations, SPAN, drain_s=20.0, pool_bytes=2 * 10**9, oracle=OraclePlan(10.0, 10.0))


def figures(score: object) -> dict:  # type: ignore[type-arg]
    return {k: v for k, v in vars(score).items() if k not in {"wall_s", "decision_p99_ms"}}


def test_targets_and_rates_are_set_before_anybody_plays(setup: Setup) -> None:
    found: Calibration = setup.calibrations["reasoning-bursty"]
    assert 0.05 < found.targets.tbt_s < 1
    assert found.targets.ttft_s > found.targets.tbt_s
    assert found.rate_scale(SCENARIO) * found.own_rps == pytest.approx(2 * found.capacity_rps)


def test_all_contenders_meet_the_same_requests_and_seeds_differ(setup: Setup) -> None:
    cells = [Cell(SCENARIO, seed, name) for seed in (0, 1) for name in ("none", "static:kv_format=int8", "default")]
    scores = [run_cell(setup, cell) for cell in cells]
    assert len({score.offered for score in scores[:3]}) == 1
    assert len({score.prompt_tokens for score in scores[:3]}) == 1
    assert scores[0].prompt_tokens != scores[3].prompt_tokens
    assert scores[1].quality > scores[0].quality == 0.0
    assert scores[0].changes == 0 < scores[2].changes
    assert sum(part.good for part in scores[2].segments) == scores[2].good


@pytest.mark.parametrize("ray", [None, "local"], ids=["processes", "ray"])
def test_the_same_cell_gives_the_same_score_in_another_process(ray: str | None, setup: Setup, tmp_path: Path) -> None:
    if ray is not None:
        pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    cells = [Cell(SCENARIO, 0, name) for name in ("default", "none")]
    here = [figures(run_cell(setup, cell)) for cell in cells]
    store = Store(tmp_path, setup)
    with workers(2, ray) as executor:
        store.run(cells, executor)
    assert [figures(store.get(cell)) for cell in cells] == here


def test_an_evaluation_goes_on_where_it_stopped(setup: Setup, tmp_path: Path) -> None:
    plan = Plan(
        (SCENARIO,), ("default",), ({"kv_format": "int8"},), seeds=2, random=({"kv_format": "int4"},), search_seeds=1,
        oracle_seeds=1, cost_seeds=1, rates=(0.5, 1.0), quality_budget=0.05,
    )  # fmt: skip
    progress = Silent()
    results = run(plan, Store(tmp_path, setup), Serial(), progress)
    whole = document(setup, plan, results, Terms())
    json.dumps(whole, allow_nan=False)
    assert progress.stages["contenders"] == 6
    assert progress.stages["oracle"] == 1
    assert whole["headline"]["best_policy"] == "default"
    assert whole["headline"]["learned_minus_rules"] is None
    assert whole["headline"]["decision_p99_ms"] > 0
    pressed = whole["workloads"][0]["pressured"]
    assert (whole["headline"]["goodput_ratio_pressure"] is not None) is pressed
    assert ORACLE in {row["contender"] for row in whole["oracle"]}

    # Half a line, as a killed process leaves it, costs that cell and nothing else.
    lines = (tmp_path / "cells.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cells.jsonl").write_text("".join(lines[:-1]) + lines[-1][:40])
    again = Silent()
    assert (
        document(setup, plan, run(plan, Store(tmp_path, setup), Serial(), again), Terms())["overall"]
        == whole["overall"]
    )
    assert again.cells == 1


def test_a_folder_belongs_to_one_setup(setup: Setup, tmp_path: Path) -> None:
    Store(tmp_path, setup)
    other = Setup(setup.profile, setup.calibrations, Span(41.0), pool_bytes=setup.pool_bytes)
    with pytest.raises(StoreError, match="another"):
        Store(tmp_path, other)
    (tmp_path / "cells.jsonl").write_text('{"key": "x"}\n')
    with pytest.raises(StoreError, match="line 1"):
        Store(tmp_path, setup)


def test_a_changed_rules_file_is_another_contender(tmp_path: Path) -> None:
    rules = tmp_path / "r.yaml"
    rules.write_text("a")
    before = Cell(SCENARIO, 0, str(rules)).key
    rules.write_text("b")
    assert Cell(SCENARIO, 0, str(rules)).key != before
    assert Cell(SCENARIO, 0, "none").key != Cell(SCENARIO, 0, "none", ("kv_format",)).key


def test_a_frozen_knob_does_not_move(setup: Setup) -> None:
    free, frozen = (run_cell(setup, Cell(SCENARIO, 0, "default", knobs)) for knobs in ((), ("kv_format",)))
    assert free.quality > 0
    assert free.changes > frozen.changes or frozen.quality != free.quality


def test_looking_ahead_changes_nothing_but_the_choice(setup: Setup) -> None:
    """An oracle without anything to try is native, to the last token: every look ahead was taken back."""
    blind = Setup(
        setup.profile, setup.calibrations, SPAN, drain_s=20.0, pool_bytes=setup.pool_bytes,
        oracle=OraclePlan(10.0, 10.0, knobs=()),
    )  # fmt: skip
    assert figures(run_cell(blind, Cell(SCENARIO, 0, ORACLE))) == figures(run_cell(blind, Cell(SCENARIO, 0, "none")))


def test_the_oracle_uses_what_it_sees() -> None:
    """A rush that native cannot hold: foresight finds a smaller format, and does not without a budget for its loss."""
    trace = from_requests("rush", [TraceRequest(0.1 * i, 600, 60) for i in range(150)])
    good, quality = {}, {}
    for budget in (0.0, 0.05):
        env = SimulatedEngine(workload=trace, rate_scale=1.0, interval_s=2.0, warm_up_s=0.0, repeats=False)
        plan = OraclePlan(12.0, 12.0, ("kv_format",))
        played = play_oracle(env, plan, duration_s=32.0, interval_s=2.0, seed=0, quality_budget=budget)
        good[budget], quality[budget] = played.good, played.quality_per_token
    assert good[0.05] > good[0.0]
    assert quality[0.05] > quality[0.0] == 0.0


def test_traces_are_cut_anywhere_and_stretched_to_the_rate(tmp_path: Path) -> None:
    rows = "".join(f"{i * 1.0},{10 + i},{5}\n" for i in range(600))
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    scenario = Scenario.parse(f"{path}@x2")
    assert own_rate_rps(scenario, SPAN) == pytest.approx(1.0, rel=0.01)
    starts = set()
    for seed in range(4):
        trace = traffic(scenario, SPAN, seed=seed, rate_scale=2.0)
        assert len(trace.requests) == pytest.approx(80, abs=1)
        assert trace.duration_s <= SPAN.duration_s
        starts.add(trace.requests[0].prompt_tokens)
    assert len(starts) > 1


@pytest.mark.parametrize("text", ["nowhere@1", "chat-steady@0", "chat-steady@x", "chat-steady@-1", "chat-steady@nan"])
def test_mistakes_in_workloads_are_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        Scenario.parse(text)


def test_training_and_judging_share_no_workload() -> None:
    assert not set(TRAINING) & set(HELD_OUT)


def test_static_settings_are_what_the_engine_offers() -> None:
    offered = Offered(read_profile(DEFAULT_PROFILE))
    everything, drawn = grid(offered), random_settings(5, 0, offered)
    assert {} in everything
    beside = {"keep_tokens", "max_num_batched_tokens"}
    assert all(values in everything or beside & set(values) for values in few(offered))
    assert len(everything) == len({tuple(values.items()) for values in everything})
    assert drawn == random_settings(5, 0, offered) != random_settings(5, 1, offered)
    assert len(drawn) == 5
    assert offered({"host_offload": "on"}) is any("host_offload" in values for values in everything)


@pytest.mark.parametrize("line", [b"[" * 100_000 + b"\n", b"\xff\xfe\n", b"[]\n"], ids=["deep", "bytes", "list"])
def test_damaged_cells_are_named(line: bytes, tmp_path: Path) -> None:
    setup = Setup(read_profile(DEFAULT_PROFILE), {})
    Store(tmp_path, setup)
    (tmp_path / "cells.jsonl").write_bytes(line)
    with pytest.raises(StoreError, match=r"cells\.jsonl: line 1"):
        Store(tmp_path, setup)
