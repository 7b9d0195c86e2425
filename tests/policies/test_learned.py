"""An exported policy at work: masks, time between decisions, and giving way to rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from policy_cards import card, observation, tensors_of

from engine.tunables import TUNABLES
from envs.features import FEATURES
from envs.spaces import Observation, encode_action
from policies.base import Change, Decision, PolicyState
from policies.card import Card, GuardLimits, Range, Tensors
from policies.export import export_policy
from policies.guard import Guard, GuardConfig, GuardContext, native_fits
from policies.guarded import guarded_mask
from policies.learned import HOLD_S, LearnedPolicy, load_learned
from policies.training_range import RangeRecorder, TrainingRange

RULE = Change("block_size", 128)


class Rules:
    """Wants one thing, always."""

    name = "rules"

    def initial_state(self) -> PolicyState:
        return {"asked": 0}

    def decide(self, _: Observation, state: PolicyState) -> tuple[Decision, PolicyState]:
        return Decision(RULE, "large-blocks", "because"), {"asked": state["asked"] + 1}


class SlowClock:
    """Each look at it takes ``each_ns``."""

    def __init__(self, each_ns: int) -> None:
        self.each_ns, self.at_ns = each_ns, 0

    def now_ns(self) -> int:
        self.at_ns += self.each_ns
        return self.at_ns

    def wall_s(self) -> float:
        return 0.0


def wanting(made: Card, *changes: Change | None) -> Tensors:
    """Weights whose logits are largest for ``changes``, the first most of all, whatever is observed."""
    tensors = {name: np.zeros_like(value) for name, value in tensors_of(made.network).items()}
    last = tensors[f"{len(made.network.widths) - 2}.bias"]
    for rank, change in enumerate(changes):
        last[encode_action(change)] = 10 - rank
    return tensors


def policy(*changes: Change | None, clock: SlowClock | None = None, **fields: Any) -> LearnedPolicy:
    made = card(**fields)
    return LearnedPolicy(made, wanting(made, *changes), fallback=Rules(), clock=clock)


def at(stamp_s: float, **values: Any) -> Observation:
    seen = observation(1, stamp_s=stamp_s, **values)
    knobs = {name: tunable.default for name, tunable in TUNABLES.items()}
    return Observation(seen.stamp_ns, seen.values, knobs, seen.held, 99.0, "a")


INT8, INT4 = Change("kv_format", "int8"), Change("kv_format", "int4")


def test_it_decides_once_per_interval_of_its_training() -> None:
    window = Change("eviction", "window")
    learned = policy(INT8, window, None)
    state = learned.initial_state()
    made = []
    for second in range(5):
        decision, state = learned.decide(at(100.0 + second), state)
        made.append(decision.change)
    # No knob ever moves here, so the guard inside keeps a wish back that it has had.
    assert made == [INT8, None, window, None, None]
    decision, _ = learned.decide(at(100.0), learned.initial_state())
    assert "kv_format native -> int8" in decision.reason
    assert "probability" in decision.reason
    assert decision.scenario == "learned"


def test_masked_actions_give_way_to_the_next_best_with_masks_and_to_nothing_without() -> None:
    seen = at(100.0)
    held = Observation(seen.stamp_ns, seen.values, seen.tunables, frozenset({"kv_format"}), 99.0, "a")
    masked, plain = (
        policy(INT4, Change("eviction", "window")),
        policy(INT4, Change("eviction", "window"), algorithm="ppo"),
    )
    assert masked.decide(held, {})[0].change == Change("eviction", "window")
    assert plain.decide(held, {})[0].change is None
    assert plain.decide(seen, {})[0].change == INT4


def test_knobs_that_it_was_not_trained_to_move_stay() -> None:
    limits = GuardLimits.of(GuardConfig(allowed={"kv_format": ()}))
    assert policy(INT4, Change("eviction", "window"), guard=limits).decide(at(100.0), {})[0].change == Change(
        "eviction", "window"
    )


def test_the_mask_is_what_the_guard_would_let_through() -> None:
    rng = np.random.default_rng(0)
    guard = Guard(GuardConfig(allowed={"host_offload": ()}), native_fits())
    state, seen = guard.initial_state(), 0
    from envs.spaces import all_changes

    for number in range(200):
        looked = observation(number, stamp_s=100 + 1.5 * number, kv_demand=float(2 * rng.random()))
        context = GuardContext(looked)
        mask = guarded_mask(guard, context, state)
        expected = [guard.check(change, context, state)[0].allowed for change in all_changes()]
        assert mask.tolist() == [1, *map(int, expected)]
        seen += int(mask.sum())
        chosen = rng.choice(np.flatnonzero(mask))
        change = None if chosen == 0 else all_changes()[chosen - 1]
        _, state = guard.check(change, context, state)
    assert 200 < seen < 200 * len(mask)


def test_out_of_range_rules_decide_for_a_while() -> None:
    ranges = [Range(low=0.0, high=1.0, unknown=True)] * len(FEATURES)
    ranges[0] = Range(low=0.2, high=0.5, unknown=True)
    learned = policy(INT8, ranges=ranges)
    inside, outside = {"load": 0.55}, {"load": 0.75}
    decision, state = learned.decide(at(100.0, **inside), {})
    assert decision.change == INT8
    decision, state = learned.decide(at(101.0, **outside), state)
    assert decision.change == RULE
    assert decision.scenario == "out-of-range"
    assert "load is 25 % of its scale outside" in decision.reason
    assert "because" in decision.reason
    decision, state = learned.decide(at(102.0, **inside), state)
    assert decision.change == RULE
    decision, state = learned.decide(at(102.0 + HOLD_S, **inside), state)
    assert decision.change != RULE
    assert state["fallback"] == {"asked": 4}


def test_the_hold_does_not_outlive_a_clock_that_went_back() -> None:
    ranges = [Range(low=0.0, high=0.1, unknown=True), *[Range(low=0.0, high=1.0, unknown=True)] * (len(FEATURES) - 1)]
    learned = policy(INT8, ranges=ranges)
    _, state = learned.decide(at(5000.0, load=0.9), {})
    assert learned.decide(at(50.0, load=0.1), state)[0].change == INT8


def test_a_late_decision_is_thrown_away_for_that_of_the_rules() -> None:
    late, quick = (policy(INT8, clock=SlowClock(each)) for each in (60_000_000, 40_000_000))
    decision, state = late.decide(at(100.0), {})
    assert (decision.change, decision.scenario) == (RULE, "too-late")
    assert "60.0 ms" in decision.reason
    assert quick.decide(at(100.0), {})[0].change == INT8
    assert late.decide(at(100.5), state)[0].change is None  # not asked, so not late


def test_unknown_in_training_is_ignored_and_newly_unknown_is_out_of_range() -> None:
    rows = [Range(low=None, high=None, unknown=True), *[Range(low=0.0, high=1.0, unknown=False)] * (len(FEATURES) - 1)]
    judge = TrainingRange(rows)
    known = at(100.0, load=0.9).vector()
    assert judge.objection(known) is None
    as_trained = judge.as_trained(known)
    assert as_trained[0] == 0.0
    assert as_trained[-len(FEATURES)] == 1.0
    assert known[0] > 0.5
    assert judge.objection(at(100.0, waiting=None).vector()) == "waiting is unknown, which it never was in training"


def test_recorded_ranges_are_those_of_what_was_known() -> None:
    recorder = RangeRecorder()
    recorder.add(np.stack([at(1.0, load=0.3, waiting=None).vector(), at(1.0, load=0.7, waiting=None).vector()]))
    rows = dict(zip((f.name for f in FEATURES), recorder.ranges(), strict=True))
    assert (rows["load"].low, rows["load"].high, rows["load"].unknown) == (
        pytest.approx(0.3),
        pytest.approx(0.7),
        False,
    )
    assert rows["waiting"] == Range(low=None, high=None, unknown=True)


def test_a_lost_engine_is_left_alone() -> None:
    seen = at(100.0)
    lost = Observation(seen.stamp_ns, {}, {}, instance=None)
    assert policy(INT8).decide(lost, {})[0].change is None


def test_loading_and_deciding_imports_no_torch_and_no_pickle_of_others(tmp_path: Path) -> None:
    made = card()
    export_policy(tmp_path / "policy", made, tensors_of(made.network))
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from pathlib import Path
from policy_cards import observation
from policies.learned import load_learned
from policies.rules import load_rules
from policies.threshold import ThresholdPolicy
policy = load_learned(Path({str(tmp_path / "policy")!r}), fallback=ThresholdPolicy(load_rules("default")))
decision, _ = policy.decide(observation(3), policy.initial_state())
assert decision.change is not None
heavy = {{"torch", "stable_baselines3", "sb3_contrib", "cloudpickle"}}
bad = [name for name in sys.modules if name.split(".")[0] in heavy]
assert not bad, bad
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)


def test_a_loaded_policy_is_the_exported_one(tmp_path: Path) -> None:
    made = card()
    export_policy(tmp_path / "policy", made, wanting(made, INT4))
    assert load_learned(tmp_path / "policy", fallback=Rules()).decide(at(100.0), {})[0].change == INT4
