"""Calm under constant load, fuzzed ticks, sweeps and the search: short here, long with ``-m slow``."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from envs.port import Change
from envs.profile import read_profile
from envs.simulated import DEFAULT_PROFILE
from envs.spaces import Observation
from policies.base import Decision, PolicyState
from policies.constant_load import constant_load, hold, levels
from policies.evaluation.calibration import calibrate
from policies.evaluation.cells import Setup
from policies.evaluation.scenarios import Scenario, Span
from policies.evaluation.store import Store
from policies.executors import Processes, Serial
from policies.fuzz import RandomPolicy, fuzz_decisions, fuzz_engine
from policies.lint import lint
from policies.named import contender
from policies.rules import load_rules, parse_rules, preset_text
from policies.search import SearchPlan, search
from policies.steady import Bench, SteadyLoad
from policies.sweep import differences, sweep

PROFILE = read_profile(DEFAULT_PROFILE)
FLAPPING = """
version: 1
name: flapping
otherwise: {kv_format: native}
rules:
  - {name: r, when: kv_usage > 0.2, set: {kv_format: int8}}
"""


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench.of(PROFILE, SteadyLoad())


def test_the_default_rules_hold_still(bench: Bench) -> None:
    for held in constant_load(bench, "default", Serial(), shares=[0.4], hours=0.12):
        assert held.is_still, held


def test_rules_that_flap_are_caught(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "flapping.yaml"
    path.write_text(FLAPPING)
    held = hold(bench, str(path), 0.12, 2.0, 0, 0.4)
    assert held.reversals > 0
    assert not held.is_still
    assert held.knobs == {"kv_format": held.changes}


def test_nothing_forbidden_gets_through() -> None:
    policy = contender("default").policy
    assert policy is not None
    for who in (RandomPolicy(random.Random(0)), policy):
        fuzzed = fuzz_decisions(who, 600, 1, PROFILE)
        assert fuzzed.is_clean, fuzzed
        assert fuzzed.ticks == 600
        assert fuzzed.actions > 0


def test_nothing_exhausts_the_engine() -> None:
    fuzzed = fuzz_engine(RandomPolicy(random.Random(0)), 40, 1, PROFILE)
    assert fuzzed.is_clean, fuzzed
    assert fuzzed.actions > 0


class Raising(RandomPolicy):
    def decide(self, observation: object, state: PolicyState) -> tuple[Decision, PolicyState]:
        assert isinstance(observation, Observation)
        if observation.instance is not None and observation.observed_s > 20:
            raise RuntimeError("broken")
        return super().decide(observation, state)


def test_a_fuzz_that_finds_something_says_so() -> None:
    fuzzed = fuzz_decisions(Raising(random.Random(0)), 300, 1, PROFILE)
    assert not fuzzed.is_clean
    assert fuzzed.exceptions > 0
    assert fuzzed.first_problem == "RuntimeError: broken"


def test_a_policy_may_propose_a_number_beyond_any_float() -> None:
    from policies.guard import Guard, GuardContext

    guard = Guard()
    observation = Observation(10**12, {}, {"block_size": 16}, observed_s=99.0, instance="a")
    verdict, _ = guard.check(Change("block_size", 10**400), GuardContext(observation), guard.initial_state())
    assert verdict.change == Change("block_size", 256)


def test_a_sweep_shows_rules_settings_and_hysteresis(bench: Bench) -> None:
    found = sweep(bench, load_rules("default"), [0.3, 0.6, 1.2], hold_s=45.0)
    assert [(level.direction, level.load) for level in found] == [
        ("up", 0.3), ("up", 0.6), ("up", 1.2), ("down", 0.6), ("down", 0.3),
    ]  # fmt: skip
    assert found[0].settings["kv_format"] == "native"
    assert found[2].settings["kv_format"] == "int8"
    assert "memory-tight" in found[2].active
    assert found[0].kv_demand is not None
    assert found[2].kv_demand is not None
    assert found[0].kv_demand < found[2].kv_demand
    for load, knobs in differences(found):
        up, down = (next(x for x in found if (x.direction, x.load) == (way, load)) for way in ("up", "down"))
        assert all(up.settings[knob] != down.settings[knob] for knob in knobs)
    with pytest.raises(ValueError, match="increase"):
        sweep(bench, load_rules("default"), [1.0, 0.5])


def test_the_search_finds_no_worse_rules_and_resumes(tmp_path: Path) -> None:
    scenarios, span = (Scenario.parse("chat-bursty@1.2"),), Span(40.0)
    setup = Setup(PROFILE, calibrate(PROFILE, scenarios, span), span, drain_s=10.0)
    plan = SearchPlan(scenarios, seeds=1, candidates=3, best=2, rounds=2)
    first = search(preset_text("default"), plan, Store(tmp_path, setup), Serial())
    rules = parse_rules(first.text)
    assert rules.name == "tuned"
    assert lint(rules) == []
    assert "# profile: llama-3-8b" in first.text
    assert first.score >= first.base_score
    assert first.tried > 1
    before = (tmp_path / "cells.jsonl").read_text()
    assert search(preset_text("default"), plan, Store(tmp_path, setup), Serial()) == first
    assert (tmp_path / "cells.jsonl").read_text() == before
    stopped = search(preset_text("default"), plan, Store(tmp_path, setup), Serial(), out_of_time=lambda: True)
    assert (stopped.rounds, stopped.score) == (0, stopped.base_score)


def test_held_out_workloads_are_not_searched_on() -> None:
    with pytest.raises(ValueError, match="held out"):
        SearchPlan((Scenario.parse("flash-crowd"),))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default"])
def test_a_day_at_twenty_levels(bench: Bench, name: str) -> None:
    for held in constant_load(bench, name, Processes(2), shares=levels(20), hours=24.0):
        print(held)
        assert held.is_still, held


@pytest.mark.slow
def test_a_million_fuzzed_ticks() -> None:
    for seed, ticks in ((0, 500_000), (1, 500_000)):
        fuzzed = fuzz_decisions(RandomPolicy(random.Random(seed)), ticks, seed, PROFILE)
        assert fuzzed.is_clean, fuzzed
    assert fuzz_engine(RandomPolicy(random.Random(2)), 10_000, 2, PROFILE).is_clean
