"""Threshold rules in time: delays, latches, overlays, turns, and what is said about them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.tunables import TunableValue, default_values
from envs.features import FEATURES
from envs.spaces import Observation
from policies.base import Change, Decision, PolicyState
from policies.rules import parse_rules
from policies.threshold import ThresholdPolicy

RULES = """
version: 1
name: test
otherwise: {kv_format: native}
rules:
  - {name: high, priority: 1, when: kv_usage > 0.8, for: 3, release: kv_usage < 0.5, release_for: 5,
     set: {kv_format: int8}, because: memory is short}
  - {name: top, priority: 2, when: kv_usage > 0.95, set: {kv_format: int4, eviction: window}}
"""


class Driver:
    """Feeds a policy once per second and applies what it decides, unless told not to."""

    def __init__(self, text: str = RULES) -> None:
        self.policy = ThresholdPolicy(parse_rules(text))
        self.state: PolicyState = self.policy.initial_state()
        self.knobs = default_values()
        self.second = 0

    def tick(
        self, *, apply: bool = True, held: frozenset[str] = frozenset(), after_s: float = 1.0, **figures: float | None
    ) -> Decision:
        self.second += after_s  # type: ignore[assignment]
        values: dict[str, float | None] = dict.fromkeys((f.name for f in FEATURES), None)
        observation = Observation(
            round(self.second * 1e9), values | figures, dict(self.knobs), held, observed_s=99, instance="a"
        )
        decision, self.state = self.policy.decide(observation, json.loads(json.dumps(self.state)))
        if decision.change is not None and apply:
            self.knobs[decision.change.knob] = decision.change.value
        return decision

    def ticks(self, count: int, **figures: Any) -> list[TunableValue]:
        return [d.change.value for d in (self.tick(**figures) for _ in range(count)) if d.change is not None]


def test_a_condition_must_hold_for_its_time() -> None:
    driver = Driver()
    assert driver.ticks(3, kv_usage=0.9) == []  # 0, 1 and 2 seconds
    driver.tick(kv_usage=0.7)
    assert driver.ticks(3, kv_usage=0.9) == []
    assert driver.tick(kv_usage=0.9).change == Change("kv_format", "int8")


def test_it_stays_until_the_release_has_held_for_its_time() -> None:
    driver = Driver()
    driver.ticks(4, kv_usage=0.9)
    assert driver.ticks(20, kv_usage=0.6) == []
    assert driver.ticks(5, kv_usage=0.4) == []
    driver.tick(kv_usage=0.6)
    assert driver.ticks(5, kv_usage=0.4) == []
    decision = driver.tick(kv_usage=0.4)
    assert decision.change == Change("kv_format", "native")
    assert decision.scenario == "high"
    assert decision.reason == "high is over: kv_usage 0.4; kv_format int8 -> native"


def test_the_more_important_rule_wins_and_gives_way_again() -> None:
    driver = Driver()
    driver.ticks(4, kv_usage=0.9)
    decision = driver.tick(kv_usage=0.99)
    assert (decision.change, decision.scenario) == (Change("kv_format", "int4"), "top")
    # Without a release of its own it ends with its condition; the other rule is still in force.
    decision = driver.tick(kv_usage=0.6)
    assert (decision.change, decision.scenario) == (Change("kv_format", "int8"), "high")
    wait = "in force until kv_usage < 0.5 has held for 5 s"
    assert decision.reason == f"memory is short: kv_usage 0.6 ({wait}); kv_format int4 -> int8"


def test_a_rule_whose_release_holds_says_for_how_long_it_has_and_must() -> None:
    driver = Driver()
    driver.ticks(4, kv_usage=0.9)
    driver.tick(kv_usage=0.4)
    driver.tick(kv_usage=0.4, after_s=1.5)
    driver.knobs["kv_format"] = "native"
    wait = "in force until kv_usage < 0.5 has held for 5 s, 2.5 s so far"
    decision = driver.tick(kv_usage=0.4, apply=False)
    assert decision.reason == f"memory is short: kv_usage 0.4 ({wait}); kv_format native -> int8"
    assert driver.tick(kv_usage=0.6).reason.startswith("memory is short: kv_usage 0.6 (in force until kv_usage < 0.5")


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("release: waiting < 1", "kv_usage 0.4, waiting 3 requests (in force until waiting < 1)"),
        ("release: waiting < 1, release_for: 9", "3 requests (in force until waiting < 1 has held for 9 s)"),
        ("release_for: 9", "kv_usage 0.4 (in force until kv_usage > 0.8 has not held for 9 s, 0 s so far)"),
    ],
)
def test_every_way_of_ending_is_said_with_its_figures(ending: str, said: str) -> None:
    driver = Driver(
        f"version: 1\nname: t\nrules:\n- {{name: high, when: kv_usage > 0.8, {ending}, set: {{kv_format: int8}}}}\n"
    )
    driver.tick(kv_usage=0.9, waiting=3.0, apply=False)
    assert said in driver.tick(kv_usage=0.4, waiting=3.0).reason


def test_one_knob_per_tick_in_the_rules_order() -> None:
    driver = Driver()
    assert driver.tick(kv_usage=0.99).change == Change("kv_format", "int4")
    assert driver.tick(kv_usage=0.99).change == Change("eviction", "window")
    steady = driver.tick(kv_usage=0.99)
    assert (steady.change, steady.scenario) == (None, "steady")
    assert "top" in steady.reason


def test_a_refused_knob_does_not_keep_the_others_from_moving() -> None:
    driver = Driver()
    proposed = [driver.tick(apply=False, kv_usage=0.99).change for _ in range(4)]
    assert proposed == [Change("kv_format", "int4"), Change("eviction", "window")] * 2


def test_held_knobs_are_not_proposed() -> None:
    driver = Driver()
    assert driver.tick(held=frozenset({"kv_format"}), kv_usage=0.99).change == Change("eviction", "window")
    assert driver.tick(held=frozenset({"kv_format"}), kv_usage=0.99).change is None


def test_unknown_figures_neither_start_nor_end_a_rule() -> None:
    driver = Driver()
    driver.ticks(3, kv_usage=0.9)
    assert driver.ticks(9) == []
    assert driver.ticks(3, kv_usage=0.9) == []
    assert driver.ticks(1, kv_usage=0.9) == ["int8"]
    assert driver.ticks(60) == []


def test_a_gap_or_a_clock_that_went_back_is_no_evidence() -> None:
    for jump_s in (600.0, -1.5):
        driver = Driver()
        driver.ticks(3, kv_usage=0.9)
        assert driver.tick(after_s=jump_s, kv_usage=0.9).change is None
        assert driver.ticks(2, kv_usage=0.9) == []
        assert driver.ticks(1, kv_usage=0.9) == ["int8"]


def test_a_lost_engine_decides_nothing_and_stops_the_timers() -> None:
    driver = Driver()
    driver.ticks(3, kv_usage=0.9)
    values: dict[str, float | None] = dict.fromkeys((f.name for f in FEATURES), None)
    decision, driver.state = driver.policy.decide(Observation(4 * 10**9, values, {}), driver.state)
    assert decision.change is None
    assert "cannot be reached" in decision.reason
    driver.second = 4
    assert driver.ticks(3, kv_usage=0.9) == []
    assert driver.ticks(1, kv_usage=0.9) == ["int8"]


def test_a_knob_rests_after_it_moved() -> None:
    driver = Driver(RULES.replace("rules:", "dwell: 10\nrules:", 1))
    assert driver.ticks(1, kv_usage=0.99) == ["int4"]
    assert driver.ticks(1, kv_usage=0.99) == ["window"]
    assert driver.ticks(9, kv_usage=0.1) == []
    assert driver.ticks(1, kv_usage=0.1) == ["native"]


def test_what_nobody_asks_for_is_left_alone() -> None:
    driver = Driver()
    driver.knobs |= {"block_size": 256, "kv_format": "int8"}
    decision = driver.tick(kv_usage=0.1)
    assert decision.change == Change("kv_format", "native")
    assert decision.scenario == "otherwise"
    assert driver.ticks(50, kv_usage=0.1) == []
    assert driver.knobs["block_size"] == 256


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"stamp_ns": "x"},
        {"stamp_ns": 1, "rules": {"high": 3}, "knobs": {}, "proposed": None},
        {"stamp_ns": 1, "rules": {}, "knobs": {"kv_format": {"value": "int8"}}, "proposed": None},
        {"stamp_ns": 1, "rules": [], "knobs": {}, "proposed": None},
        {"stamp_ns": None, "rules": {"gone": {"active": True, "held_ns": None}}, "knobs": {}, "proposed": "gone"},
    ],
)
def test_a_state_of_another_kind_is_a_fresh_one(state: PolicyState) -> None:
    driver = Driver()
    driver.state = state
    assert driver.ticks(3, kv_usage=0.9) == []
    assert driver.ticks(1, kv_usage=0.9) == ["int8"]
