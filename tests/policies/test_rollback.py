"""What follows a change: judged once, taken back if it missed, not tried again under the same load."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from engine.tunables import TUNABLES, default_values
from envs.features import FEATURES
from envs.port import Change
from envs.signals import Targets
from envs.spaces import Observation
from policies.canary import first_step
from policies.guard import Guard, GuardConfig, GuardContext, VerdictCode, Writer
from policies.judgement import JudgeConfig, Outcome, judge
from policies.rollback import EffectWatch, Judgement, WatchConfig

JUDGE = JudgeConfig(Targets(1.0, 0.1, 0.95))
INT8, NATIVE = Change("kv_format", "int8"), Change("kv_format", "native")
GOOD = {"ttft_tail_s": 0.5, "tbt_tail_s": 0.05, "offered_rps": 2.0, "offered_rps_long": 2.0, "kv_demand": 0.8}


@pytest.mark.parametrize(
    ("before", "predicted", "after", "outcome"),
    [
        ({"tbt_tail_s": 0.05}, None, {"tbt_tail_s": 0.2}, Outcome.MISSED),
        ({"tbt_tail_s": 0.05}, None, {"tbt_tail_s": 0.09}, Outcome.MET),  # worse, and inside the target
        ({"tbt_tail_s": 0.19}, None, {"tbt_tail_s": 0.2}, Outcome.MET),  # hardly worse
        ({"tbt_tail_s": 0.05}, {"tbt_tail_s": 0.19}, {"tbt_tail_s": 0.2}, Outcome.MET),  # as predicted
        ({"tbt_tail_s": 0.05}, {"tbt_tail_s": 0.12}, {"tbt_tail_s": 0.2}, Outcome.MISSED),
        ({"tbt_tail_s": 0.05, "kv_demand": 0.8}, None, {"tbt_tail_s": 0.2, "kv_demand": 1.2}, Outcome.UNCLEAR),
        ({"tbt_tail_s": 0.05, "kv_demand": 0.2}, None, {"tbt_tail_s": 0.2, "kv_demand": 0.6}, Outcome.MISSED),
        ({"tbt_tail_s": 0.05, "offered_rps": 2.0}, None, {"tbt_tail_s": 0.2, "offered_rps": 3.0}, Outcome.UNCLEAR),
        ({"tbt_tail_s": 0.05, "offered_rps": 2.0}, None, {"tbt_tail_s": 0.2, "offered_rps": 1.0}, Outcome.MISSED),
        ({"ttft_tail_s": 4.0}, {"ttft_tail_s": 0.5}, {"ttft_tail_s": 3.5}, Outcome.SHORT),
        ({"ttft_tail_s": 4.0}, {"ttft_tail_s": 0.5}, {"ttft_tail_s": 0.9}, Outcome.MET),
        ({"ttft_tail_s": 4.0}, {"ttft_tail_s": 0.5}, {"ttft_tail_s": None}, Outcome.UNCLEAR),
        ({}, None, {}, Outcome.UNCLEAR),
    ],
)
def test_the_rule(before: Any, predicted: Any, after: Any, outcome: Outcome) -> None:
    told, why = judge(before, predicted, after, JUDGE)
    assert told is outcome
    assert why


class Driver:
    """One observation a second; the engine takes what is made."""

    def __init__(self, *, predict: Any = None, **config: Any) -> None:
        self.watch = EffectWatch(WatchConfig(JUDGE, **config), predict)
        self.state = self.watch.initial_state()
        self.knobs = default_values()
        self.figures: dict[str, float | None] = {**dict.fromkeys((f.name for f in FEATURES), None), **GOOD}
        self.writers: dict[str, Writer] = {}
        self.second, self.instance, self.tick = 100.0, "a", 0
        self.judged: list[Judgement] = []

    @property
    def observation(self) -> Observation:
        stamp_ns = round(self.second * 1e9)
        return Observation(stamp_ns, dict(self.figures), dict(self.knobs), frozenset(), 100.0, self.instance)

    def look(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.second += 1.0
            self.tick += 1
            state = json.loads(json.dumps(self.state))  # it is journalled
            self.state, judged = self.watch.look(self.observation, self.writers, state, "autotune")
            self.judged += judged

    def make(self, change: Change, *, rollback: bool = False, canary: bool = False) -> None:
        seen = self.observation
        self.state = self.watch.made(self.tick, change, seen, self.state, rollback=rollback, canary=canary)
        self.knobs[change.knob] = change.value
        self.writers[change.knob] = Writer("autotune", self.tick)

    def miss(self) -> None:
        """A change that makes things worse, and its judgement."""
        self.look(20)
        self.make(INT8)
        self.figures["tbt_tail_s"] = 0.3
        self.look(10)

    @property
    def barred(self) -> dict[str, VerdictCode]:
        return {what: code for what, (code, _) in self.watch.barred(self.state).items()}


def test_a_miss_is_taken_back_once_and_not_tried_again_under_the_same_load() -> None:
    driver = Driver()
    driver.miss()
    (judgement,) = driver.judged
    assert judgement.outcome is Outcome.MISSED
    assert "tbt_tail_s 0.05 -> 0.3 s; the target is 0.1 s" in judgement.why
    wish = driver.watch.wish(driver.state)
    assert wish is not None
    assert (wish.change, wish.scenario) == (NATIVE, "rollback")
    driver.make(NATIVE, rollback=True)
    assert driver.watch.wish(driver.state) is None
    assert driver.barred == {"kv_format=int8": VerdictCode.FAILED_BEFORE, "kv_format": VerdictCode.COOL_DOWN}
    driver.look(61)
    assert driver.barred == {"kv_format=int8": VerdictCode.FAILED_BEFORE}
    driver.look(3600)
    assert driver.barred == {"kv_format=int8": VerdictCode.FAILED_BEFORE}, "no time ends it, only another load"
    assert len(driver.judged) == 1, "a rollback is not judged"


@pytest.mark.parametrize(
    ("name", "factor"), [("offered_rps_long", 1.4), ("offered_rps_long", 0.6), ("kv_demand", 1.4), ("kv_demand", 0.5)]
)
def test_another_load_lifts_the_bar(name: str, factor: float) -> None:
    driver = Driver()
    driver.miss()
    driver.make(NATIVE, rollback=True)
    driver.look(61)
    before = GOOD[name]
    driver.figures[name] = before * 1.2
    driver.look()
    assert driver.barred
    driver.figures[name] = None  # unknown is no other load
    driver.look()
    assert driver.barred
    driver.figures[name] = before * factor
    driver.look()
    assert not driver.barred


def test_a_restarted_engine_owes_nothing() -> None:
    driver = Driver()
    driver.miss()
    driver.make(NATIVE, rollback=True)
    driver.look(61)
    driver.make(Change("block_size", 64))
    driver.instance = "b"
    driver.look()
    assert driver.judged[-1].outcome is Outcome.UNCLEAR
    assert "restarted" in driver.judged[-1].why
    assert driver.barred == {}


def test_what_somebody_else_has_moved_is_not_taken_back() -> None:
    driver = Driver()
    driver.miss()
    driver.writers["kv_format"] = Writer("operator:anna", 99)
    driver.look()
    assert driver.watch.wish(driver.state) is None
    driver = Driver()
    driver.miss()
    driver.knobs["kv_format"] = "int4"
    driver.look()
    assert driver.watch.wish(driver.state) is None


def test_a_rollback_that_cannot_be_written_is_given_up() -> None:
    driver = Driver()
    driver.miss()
    driver.look(29)
    assert driver.watch.wish(driver.state) is not None
    driver.look()
    assert driver.watch.wish(driver.state) is None


def test_changes_within_a_window_are_judged_and_taken_back_together() -> None:
    driver = Driver()
    driver.look(20)
    driver.make(INT8)
    driver.look(5)
    driver.make(Change("block_size", 64))
    driver.figures["tbt_tail_s"] = 0.3
    driver.look(9)
    assert driver.judged == [], "one window after the last"
    driver.look()
    assert [judgement.outcome for judgement in driver.judged] == [Outcome.MISSED] * 2
    assert driver.judged[0].why.startswith("ticks 20, 25 together: tbt_tail_s 0.05 -> 0.3 s")
    taken = set()
    for _ in range(2):
        wish = driver.watch.wish(driver.state)
        assert wish is not None
        assert wish.change is not None
        taken.add(str(wish.change))
        driver.make(wish.change, rollback=True)
        driver.look()
    assert taken == {"kv_format=native", "block_size=16"}
    assert driver.watch.wish(driver.state) is None
    assert {"kv_format=int8", "block_size=64"} <= set(driver.barred)


def test_a_rollback_that_is_refused_does_not_keep_the_others() -> None:
    driver = Driver()
    driver.look(20)
    driver.make(INT8)
    driver.make(Change("block_size", 64))
    driver.figures["tbt_tail_s"] = 0.3
    driver.look(10)
    wishes = set()
    for _ in range(4):
        wish = driver.watch.wish(driver.state)
        assert wish is not None
        wishes.add(str(wish.change))
        driver.look()
    assert wishes == {"kv_format=native", "block_size=16"}


def test_a_knob_that_went_and_came_back_is_not_taken_back() -> None:
    driver = Driver()
    driver.look(20)
    driver.make(INT8)
    driver.look(3)
    driver.make(NATIVE)
    driver.figures["tbt_tail_s"] = 0.3
    driver.look(10)
    assert len(driver.judged) == 2
    assert driver.watch.wish(driver.state) is None


def test_changes_that_go_on_and_on_are_judged_all_the_same() -> None:
    driver = Driver()
    driver.look(20)
    for turn in range(12):
        driver.make(INT8 if turn % 2 == 0 else NATIVE)
        driver.look(6)
    assert 10 <= len(driver.judged) <= 12


@pytest.mark.parametrize("seconds", [-5, 5])
def test_what_somebody_else_moves_within_a_window_makes_it_unclear(seconds: int) -> None:
    driver = Driver()
    driver.look(20)
    if seconds < 0:
        driver.knobs["block_size"] = 64
        driver.look(-seconds)
    driver.make(INT8)
    if seconds > 0:
        driver.look(seconds)
        driver.knobs["block_size"] = 64
    driver.figures["tbt_tail_s"] = 0.3
    driver.look(30)
    assert [judgement.outcome for judgement in driver.judged] == [Outcome.UNCLEAR]
    assert driver.watch.wish(driver.state) is None


def test_misses_are_only_told_where_that_is_wanted() -> None:
    driver = Driver(rolls_back=False)
    driver.miss()
    assert driver.judged[0].outcome is Outcome.MISSED
    assert driver.watch.wish(driver.state) is None


def test_a_prediction_says_what_is_expected_and_when() -> None:
    driver = Driver(predict=lambda _change, _observation: ({"tbt_tail_s": 0.28}, 25.0))
    driver.look(20)
    driver.make(INT8)
    driver.figures["tbt_tail_s"] = 0.3
    driver.look(24)
    assert driver.judged == []
    driver.look()
    assert driver.judged[0].outcome is Outcome.MET
    slow = Driver(predict=lambda _change, _observation: ({"tbt_tail_s": 0.28}, 1e9))
    slow.look(20)
    slow.make(INT8)
    slow.look(60)
    assert len(slow.judged) == 1, "a judgement comes however long recoding was predicted to take"


def test_first_steps_of_coarse_changes() -> None:
    driver = Driver(canary=("kv_format",))
    driver.look(20)
    knobs = driver.watch.config.canary
    assert first_step(Change("kv_format", "int4"), driver.observation, knobs) == INT8
    assert first_step(INT8, driver.observation, knobs) is None
    assert first_step(Change("block_size", 256), driver.observation, knobs) is None
    assert first_step(Change("kv_format", "fp8"), driver.observation, knobs) is None
    driver.make(INT8, canary=True)
    driver.look(9)
    assert driver.barred == {"kv_format": VerdictCode.CANARY}
    driver.look(1)
    assert driver.barred == {}
    driver.knobs["kv_format"] = "int4"
    assert first_step(NATIVE, driver.observation, knobs) == Change("kv_format", "k8v4")


def test_the_guard_enforces_what_is_barred_and_lets_a_rollback_pass_the_dwell() -> None:
    driver = Driver()
    driver.look(20)
    guard = Guard(GuardConfig(knob_dwell_s={"kv_format": 600.0}))
    barred = {"kv_format=int8": (VerdictCode.FAILED_BEFORE, "failed"), "block_size": (VerdictCode.COOL_DOWN, "cools")}
    context = GuardContext(driver.observation, barred=barred)
    state = guard.initial_state()
    assert guard.check(INT8, context, state)[0].code is VerdictCode.FAILED_BEFORE
    assert guard.check(Change("block_size", 64), context, state)[0].code is VerdictCode.COOL_DOWN
    possible = guard.possible(context, state)
    assert INT8 not in possible
    assert Change("kv_format", "int4") in possible
    assert not [change for change in possible if change.knob == "block_size"]
    verdict, state = guard.check(Change("kv_format", "int4"), context, state)
    assert verdict.allowed
    driver.knobs["kv_format"] = "int4"
    assert guard.check(NATIVE, GuardContext(driver.observation), state)[0].code is VerdictCode.DWELL
    assert guard.check(NATIVE, GuardContext(driver.observation, is_rollback=True), state)[0].allowed
    taken = GuardContext(driver.observation, {"kv_format": Writer("operator:anna", 3)}, is_rollback=True)
    assert guard.check(NATIVE, taken, state)[0].code is VerdictCode.OVERRIDE


@pytest.mark.parametrize("state", [{}, {"instance": "a"}, {"instance": 1, "back": [], "moved_ns": None, "open": [1]}])
def test_a_state_of_another_kind_is_a_fresh_one(state: Any) -> None:
    driver = Driver()
    driver.state = state
    driver.look()
    assert driver.state["open"] == []


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_every_change_is_judged_once_and_taken_back_at_most_once(seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver(canary=("kv_format",), predict=lambda *_: rng.choice([None, ({"tbt_tail_s": 0.1}, 20.0)]))
    knobs = [Change(knob, value) for knob in ("kv_format", "block_size") for value in TUNABLES[knob].values]
    made = rollbacks = 0
    for _ in range(600):
        driver.figures["tbt_tail_s"] = rng.choice([None, 0.05, 0.3])
        driver.figures["kv_demand"] = rng.choice([None, 0.8, 3.0])
        event = rng.random()
        if event < 0.02:
            driver.instance, driver.writers, driver.knobs = f"i{driver.tick}", {}, default_values()
        elif event < 0.04:
            driver.knobs[rng.choice(["kv_format", "block_size"])] = "int4" if rng.random() < 0.5 else 64
            driver.knobs = {**default_values(), **{k: v for k, v in driver.knobs.items() if v in TUNABLES[k].values}}
            driver.writers["kv_format"] = Writer("operator:anna", driver.tick)
        driver.look()
        wish = driver.watch.wish(driver.state)
        if wish is not None and wish.change is not None and rng.random() < 0.7:
            driver.make(wish.change, rollback=True)
            rollbacks += 1
        elif wish is None and rng.random() < 0.1:
            change = rng.choice(knobs)
            allowed = str(change) not in driver.barred and change.knob not in driver.barred
            if allowed and driver.knobs[change.knob] != change.value:
                driver.make(change)
                made += 1
    driver.look(100)
    assert [judgement.tick for judgement in driver.judged] == sorted({j.tick for j in driver.judged})
    assert len(driver.judged) == made
    assert rollbacks <= made
    assert driver.state["open"] == driver.state["back"] == []
    assert len(driver.state["failed"]) <= 32


WAITED = {"ttft_tail_s": 3.0, "waiting": 40.0}


def backlog(**after: float | None) -> Driver:
    """A change while 40 requests wait, whose TTFT rises as the longest waiting get their first tokens."""
    driver = Driver()
    driver.figures |= WAITED
    driver.look(20)
    driver.make(INT8)
    driver.figures |= {"ttft_tail_s": 15.0, "waiting": 20.0, **after}
    return driver


def outcomes(driver: Driver) -> list[Outcome]:
    return [judgement.outcome for judgement in driver.judged]


def test_a_queue_from_before_that_drains_is_waited_for() -> None:
    driver = backlog()
    driver.look(24)
    assert driver.judged == [], (
        "a tail of 15 s, read 24 s after the change over a window of 10 s, may be from before it"
    )
    driver.figures |= {"ttft_tail_s": 0.5, "waiting": 0.0}
    driver.look()
    assert outcomes(driver) == [Outcome.MET]
    assert driver.watch.wish(driver.state) is None


def test_what_came_after_the_change_and_waits_too_long_is_a_miss_all_the_same() -> None:
    driver = backlog()
    driver.look(24)
    assert driver.judged == []
    driver.look()
    assert outcomes(driver) == [Outcome.MISSED], "nobody from before waits for 15 s any more"
    assert driver.watch.wish(driver.state) is not None


def test_the_wait_is_bounded_and_ends_unclear() -> None:
    driver = backlog()
    for second in range(60):
        driver.figures["ttft_tail_s"] = 15.0 + second
        driver.look()
        assert bool(driver.judged) == (second == 59)
    assert outcomes(driver) == [Outcome.UNCLEAR]
    assert "before" in driver.judged[0].why
    assert driver.watch.wish(driver.state) is None


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ({"waiting": 40.0}, "the queue stays as it was"),
        ({"waiting": 41.0}, "it grows"),
        ({"waiting": None}, "nobody knows"),
        ({"tbt_tail_s": 0.3}, "tokens come late as well, which no queue explains"),
    ],
)
def test_a_miss_that_no_draining_queue_explains_is_told_at_once(after: dict[str, Any], why: str) -> None:
    driver = backlog(**after)
    driver.look(10)
    assert outcomes(driver) == [Outcome.MISSED], why


def test_without_a_queue_before_nothing_is_waited_for() -> None:
    driver = Driver()
    driver.figures |= {"ttft_tail_s": 0.5, "waiting": 0.0}
    driver.look(20)
    driver.make(INT8)
    driver.figures |= {"ttft_tail_s": 15.0, "waiting": 0.0}
    driver.look(10)
    assert outcomes(driver) == [Outcome.MISSED]


def test_what_is_moved_while_a_queue_drains_makes_it_unclear() -> None:
    driver = backlog()
    driver.look(12)
    driver.knobs["block_size"] = 64
    driver.look()
    assert outcomes(driver) == [Outcome.UNCLEAR]
