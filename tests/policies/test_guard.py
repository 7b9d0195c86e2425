"""The guard: bounds, dwell, rates, warm-up, overrides; cases J.37, J.39 and J.40."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.tunables import TUNABLES, CostClass, default_values
from envs.features import FEATURES
from envs.port import Change
from envs.spaces import Observation
from policies.guard import (
    Guard,
    GuardConfig,
    GuardContext,
    GuardState,
    RateLimit,
    Verdict,
    VerdictCode,
    Writer,
    native_fits,
)


class Driver:
    """One proposal per second against a guard; what is allowed is done, unless the engine does not take it."""

    def __init__(self, config: GuardConfig | None = None, **guard: Any) -> None:
        self.guard = Guard(config, **guard)
        self.state: GuardState = self.guard.initial_state()
        self.knobs = default_values()
        self.writers: dict[str, Writer] = {}
        self.released: dict[str, int] = {}
        self.figures: dict[str, float | None] = dict.fromkeys((f.name for f in FEATURES), None)
        self.second = 100.0
        self.observed_s = 100.0
        self.instance: str | None = "a"
        self.takes = True

    @property
    def context(self) -> GuardContext:
        observation = Observation(
            round(self.second * 1e9), self.figures, dict(self.knobs), frozenset(), self.observed_s, self.instance
        )
        return GuardContext(observation, self.writers, self.released)

    def propose(self, knob: str, value: Any, *, after_s: float = 1.0) -> Verdict:
        self.second += after_s
        state = json.loads(json.dumps(self.state))  # it is journalled
        verdict, self.state = self.guard.check(Change(knob, value), self.context, state)
        assert (verdict.change is not None) == verdict.allowed
        assert verdict.text
        if verdict.change is not None and self.takes:
            self.knobs[verdict.change.knob] = verdict.change.value
        return verdict


def free() -> GuardConfig:
    """No dwell and no rate limit."""
    return GuardConfig(dwell_s={}, rates={})


def test_a_sound_proposal_goes_through_and_says_what_moves() -> None:
    verdict = Driver().propose("kv_format", "int8")
    assert verdict.code is VerdictCode.ALLOWED
    assert verdict.change == Change("kv_format", "int8")
    assert verdict.text == "kv_format native -> int8"


def test_no_proposal_and_no_change_are_no_decisions() -> None:
    driver = Driver()
    verdict, state = driver.guard.check(None, driver.context, driver.state)
    assert (verdict.code, verdict.is_decision) == (VerdictCode.NOTHING, False)
    assert state["moves"] == {}
    same = driver.propose("kv_format", "native")
    assert (same.code, same.is_decision) == (VerdictCode.NO_CHANGE, False)
    assert driver.state["moves"] == {}


@pytest.mark.parametrize(
    ("knob", "value", "code"),
    [
        ("kv_fromat", "int8", VerdictCode.UNKNOWN_KNOB),
        ("kv_format", "fp8", VerdictCode.NOT_ALLOWED),
        ("kv_format", 3, VerdictCode.NOT_ALLOWED),
        ("kv_format", None, VerdictCode.NOT_ALLOWED),
        ("block_size", True, VerdictCode.NOT_ALLOWED),
        ("block_size", 48, VerdictCode.NOT_ALLOWED),
        ("block_size", float("nan"), VerdictCode.NOT_ALLOWED),
        ("block_size", [16], VerdictCode.NOT_ALLOWED),
        ("x" * 10_000, "int8", VerdictCode.UNKNOWN_KNOB),
    ],
)
def test_what_no_knob_has_is_refused_with_the_allowed_list(knob: str, value: object, code: VerdictCode) -> None:
    verdict = Driver().propose(knob, value)
    assert verdict.code is code
    assert len(verdict.text) < 300


def test_configured_values_narrow_the_declared_ones() -> None:
    driver = Driver(GuardConfig(allowed={"kv_format": ("native", "int8"), "eviction": ()}))
    assert driver.propose("kv_format", "int4").code is VerdictCode.NOT_ALLOWED
    assert driver.propose("kv_format", "int8").allowed
    assert driver.propose("eviction", "window").code is VerdictCode.NOT_ALLOWED


@pytest.mark.parametrize(
    "config", [{"allowed": {"kv_format": ("fp8",)}}, {"allowed": {"x": ()}}, {"knob_dwell_s": {"x": 1}}]
)
def test_bad_configuration_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"kv_format|unknown tunable"):
        GuardConfig(**config)


def test_always_increasing_stops_at_the_bound() -> None:
    """Case J.37: 200 steps up; the value clamps at the bound, stays positive, and at the bound nothing is counted."""
    allowed = tuple(value for value in TUNABLES["max_num_seqs"].values if isinstance(value, int) and value <= 128)
    driver = Driver(GuardConfig(allowed={"max_num_seqs": allowed}, dwell_s={}, rates={}))
    value, decisions = 64, []
    for _ in range(200):
        value = value * 5 // 4  # runs far beyond any integer that fits a register
        verdict = driver.propose("max_num_seqs", max(value, 128))
        if verdict.is_decision:
            decisions.append(verdict)
        assert driver.knobs["max_num_seqs"] in allowed
    assert [verdict.change for verdict in decisions] == [Change("max_num_seqs", 128)]
    for absurd in (2**31, -(2**63), 0, -1):
        driver.propose("max_num_seqs", absurd)
        assert driver.knobs["max_num_seqs"] in allowed


def test_an_outer_limit_is_not_a_change_however_often_it_is_asked_for() -> None:
    driver = Driver(free())
    driver.takes = False  # bpftune#93: the value read back stays where it is
    codes = [driver.propose("max_num_seqs", 256).code for _ in range(130)]
    assert [index for index, code in enumerate(codes) if code is VerdictCode.ALLOWED] == [0, 60, 120]
    assert {code for index, code in enumerate(codes) if index % 60} == {VerdictCode.NOT_TAKEN}
    assert driver.propose("max_num_seqs", 128).allowed


def test_what_never_got_there_may_be_tried_again_at_once() -> None:
    driver = Driver()
    driver.takes = False
    assert driver.propose("kv_format", "int8").allowed
    driver.state = driver.guard.forget(Change("kv_format", "int8"), driver.state)
    assert driver.propose("kv_format", "int8").allowed


def test_a_knob_dwells_by_its_cost_class() -> None:
    driver = Driver(GuardConfig(dwell_s={CostClass.BACKGROUND: 5.0, CostClass.STEP: 2.0}, rates={}))
    assert driver.propose("kv_format", "int8").allowed
    assert driver.propose("max_num_seqs", 32).allowed  # another knob
    verdict = driver.propose("kv_format", "int4")
    assert verdict.code is VerdictCode.DWELL
    assert "2.0 s ago" in verdict.text
    assert driver.propose("max_num_seqs", 64).allowed
    assert driver.propose("kv_format", "int4").code is VerdictCode.DWELL
    assert driver.propose("kv_format", "int4").allowed
    own = Driver(GuardConfig(knob_dwell_s={"kv_format": 60.0}))
    assert own.propose("kv_format", "int8").allowed
    assert own.propose("kv_format", "int4", after_s=59).code is VerdictCode.DWELL
    assert own.propose("kv_format", "int4").allowed


def test_flapping_is_bounded_by_the_rate_of_its_class() -> None:
    """Case J.39's last resort: whatever a policy proposes, a class moves so often and no more."""
    limit = RateLimit(4, 60.0)
    driver = Driver(GuardConfig(dwell_s={}, rates={CostClass.BACKGROUND: limit}))
    moved = [
        second
        for second in range(600)
        if driver.propose("kv_format", "int8" if driver.knobs["kv_format"] == "native" else "native").allowed
    ]
    for start in range(600):
        assert len([second for second in moved if start <= second < start + 60]) <= 4
    assert len(moved) == 40


def test_knobs_of_one_class_share_its_rate() -> None:
    driver = Driver(GuardConfig(dwell_s={}, rates={CostClass.BACKGROUND: RateLimit(2, 60.0)}))
    assert driver.propose("kv_format", "int8").allowed
    assert driver.propose("eviction", "window").allowed
    verdict = driver.propose("block_size", 64)
    assert verdict.code is VerdictCode.RATE_LIMIT
    assert "2 background changes within 60 s" in verdict.text
    assert driver.propose("max_num_seqs", 32).allowed
    assert driver.propose("block_size", 64, after_s=57).allowed


def test_no_action_before_one_full_window() -> None:
    """Case J.40: restarted under heavy load, first samples zero or missing; nothing moves, nothing is reset."""
    driver = Driver(GuardConfig(window_s=10.0))
    driver.knobs["kv_format"] = "int4"  # what the daemon before this one had set
    driver.writers["kv_format"] = Writer("autotune", 7)
    for observed_s in (0.0, 1.0, 2.0, 9.9):
        driver.observed_s = observed_s
        verdict = driver.propose("kv_format", "native")
        assert verdict.code is VerdictCode.WARMING_UP
        assert "10 s seen" in verdict.text
        assert driver.knobs["kv_format"] == "int4"
    driver.observed_s = 10.0
    assert driver.propose("kv_format", "native").allowed
    driver.instance = None
    assert driver.propose("block_size", 64).code is VerdictCode.WARMING_UP


def test_a_restarted_engine_owes_nothing_to_the_one_before() -> None:
    driver = Driver()
    assert driver.propose("kv_format", "int8").allowed
    driver.knobs, driver.instance = default_values(), "b"
    assert driver.propose("kv_format", "int8").allowed


def test_an_operators_change_wins_until_it_is_released() -> None:
    driver = Driver()
    driver.writers["kv_format"] = Writer("cli:anna", 12, "incident 7")
    driver.writers["block_size"] = Writer("startup", 0)
    verdict = driver.propose("kv_format", "int8")
    assert verdict.code is VerdictCode.OVERRIDE
    assert verdict.text == "kv_format: set by cli:anna (incident 7) at revision 12; left alone until released"
    assert set(driver.guard.overrides(driver.context)) == {"kv_format"}
    assert driver.propose("block_size", 64).allowed
    driver.released["kv_format"] = 12
    assert driver.propose("kv_format", "int8").allowed
    driver.writers["kv_format"] = Writer("cli:anna", 15)  # and took it again
    assert driver.propose("kv_format", "int4", after_s=60).code is VerdictCode.OVERRIDE
    driver.writers["kv_format"] = Writer("autotune", 16)
    assert driver.propose("kv_format", "int4").allowed


def test_what_ends_by_itself_is_left_alone_for_so_long() -> None:
    driver = Driver()
    driver.writers["kv_format"] = Writer("operator:anna", 12, "incident 7", until_ns=1_000 * 10**9)
    known = "kv_format: set by operator:anna (incident 7) at revision 12; left alone for another"
    assert driver.propose("kv_format", "int8").text == f"{known} 14 min, or until released"
    assert driver.propose("kv_format", "int8", after_s=880).text == f"{known} 19 s, or until released"
    assert driver.propose("kv_format", "int8", after_s=880).text == f"{known} 0 s, or until released"


def test_a_released_knob_may_move_at_once_to_what_the_daemon_had_asked_for() -> None:
    driver = Driver()
    assert driver.propose("kv_format", "int8").allowed
    driver.knobs["kv_format"] = "native"
    driver.writers["kv_format"] = Writer("cli:anna", 12)
    assert driver.propose("kv_format", "int8", after_s=10).code is VerdictCode.OVERRIDE
    driver.released["kv_format"] = 12
    assert driver.propose("kv_format", "int8").allowed


def test_held_names_every_knob_that_cannot_move_and_why() -> None:
    driver = Driver()
    assert driver.guard.held(driver.context, driver.state) == {}
    driver.propose("max_num_seqs", 32)
    driver.writers["kv_format"] = Writer("cli:anna", 12)
    del driver.knobs["eviction"]
    held = driver.guard.held(driver.context, driver.state)
    assert {knob: verdict.code for knob, verdict in held.items()} == {
        "max_num_seqs": VerdictCode.DWELL,
        "kv_format": VerdictCode.OVERRIDE,
        "eviction": VerdictCode.UNKNOWN_KNOB,
    }
    assert driver.propose("eviction", "window").code is VerdictCode.UNKNOWN_KNOB
    driver.observed_s = 1.0
    assert len(driver.guard.held(driver.context, driver.state)) == len(TUNABLES)


def test_infeasible_states_are_refused_with_the_numbers() -> None:
    driver = Driver(free(), feasible=native_fits(0.9))
    driver.knobs["kv_format"] = "int4"
    driver.figures["kv_demand"] = 1.7
    verdict = driver.propose("kv_format", "native")
    assert verdict.code is VerdictCode.INFEASIBLE
    assert "1.70 of the pool" in verdict.text
    assert driver.propose("kv_format", "int8").allowed
    driver.figures["kv_demand"] = 0.4
    assert driver.propose("kv_format", "native").allowed
    driver.figures["kv_demand"] = None
    assert driver.propose("kv_format", "int8").allowed
    assert driver.propose("kv_format", "native").allowed


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"instance": 1},
        {"instance": "a", "asked": [], "moves": {}},
        {"instance": "a", "asked": {"x": 1}, "moves": {}},
        {"instance": "a", "asked": {}, "moves": {"step": ["x"]}},
    ],
)
def test_a_state_of_another_kind_is_a_fresh_one(state: GuardState) -> None:
    driver = Driver()
    driver.state = state
    assert driver.propose("kv_format", "int8").allowed


def test_stamps_of_the_future_are_forgotten() -> None:
    """A state saved before the machine restarted has stamps of a clock that has begun again."""
    driver = Driver()
    driver.second = 1e6
    assert driver.propose("kv_format", "int8").allowed
    driver.second = 50.0
    assert driver.propose("kv_format", "int4").allowed


def test_it_mutates_nothing() -> None:
    driver = Driver()
    driver.propose("kv_format", "int8")
    before = json.dumps(driver.state)
    driver.guard.check(Change("block_size", 64), driver.context, driver.state)
    driver.guard.held(driver.context, driver.state)
    assert json.dumps(driver.state) == before
