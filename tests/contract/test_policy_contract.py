"""What holds for every policy: pure, deterministic, JSON state, never raises, proposes only what exists."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable

import pytest
from policy_cards import card, tensors_of

from engine.tunables import TUNABLES, default_values
from envs.features import FEATURES
from envs.profile import read_profile
from envs.signals import Targets
from envs.simulated import DEFAULT_PROFILE
from envs.spaces import Observation, all_changes
from policies.base import Decision, Policy, PolicyState
from policies.card import Range
from policies.learned import LearnedPolicy
from policies.predictor_of import predictor_of
from policies.rules import load_rules, presets
from policies.threshold import ThresholdPolicy

POLICIES: dict[str, Callable[[], Policy]] = {
    name: (lambda name=name: ThresholdPolicy(load_rules(name)))  # type: ignore[misc]
    for name in presets()
}
POLICIES["predictor"] = lambda: predictor_of(read_profile(DEFAULT_PROFILE), Targets(2.0, 0.25))


def learned(algorithm: str) -> Policy:
    """Trained where everything was known: unknown figures are the rules' business."""
    made = card(algorithm=algorithm, ranges=[Range(low=0.0, high=1.0, unknown=False)] * len(FEATURES))
    return LearnedPolicy(made, tensors_of(made.network), fallback=ThresholdPolicy(load_rules("default")))


POLICIES |= {f"learned-{name}": (lambda name=name: learned(name)) for name in ("maskable-ppo", "ppo", "dqn")}  # type: ignore[misc]


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return POLICIES[request.param]()


def observations(seed: int, count: int) -> list[Observation]:
    """Wild ones: unknown figures, missing knobs, lost engines, gaps and clocks that go back."""
    rng, stamp_ns, result = random.Random(seed), 0, []
    for number in range(count):
        gaps = 0.2 if number % 4 else 0.0
        stamp_ns += rng.choice([10**9] * 20 + [0, 90 * 10**9, -(5 * 10**8)])
        values = {f.name: None if rng.random() < gaps else f.low + rng.random() * (f.high - f.low) for f in FEATURES}
        values |= {name: rng.random() * 2 for name in ("kv_demand", "kv_demand_int8", "kv_demand_k8v4")}
        knobs = {name: rng.choice(t.values) for name, t in TUNABLES.items() if rng.random() < 0.95}
        held = frozenset(name for name in TUNABLES if rng.random() < 0.1)
        lost = rng.random() < 0.05
        result.append(Observation(stamp_ns, values, {} if lost else knobs, held, 99.0, None if lost else "a"))
    return result


def run(policy: Policy, seen: list[Observation], state: PolicyState) -> tuple[list[Decision], PolicyState]:
    decisions = []
    for observation in seen:
        decision, state = policy.decide(observation, state)
        decisions.append(decision)
    return decisions, state


def test_same_observations_same_decisions(policy: Policy) -> None:
    seen = observations(1, 300)
    first, state = run(policy, seen, policy.initial_state())
    again, other = run(policy, seen, policy.initial_state())
    assert first == again
    assert state == other
    assert any(decision.change for decision in first)


def test_state_survives_json_and_a_new_object(policy: Policy, request: pytest.FixtureRequest) -> None:
    """Restored from the journal by another process, it goes on as if nothing had happened."""
    seen = observations(2, 300)
    whole, _ = run(policy, seen, policy.initial_state())
    head, state = run(policy, seen[:150], policy.initial_state())
    other = POLICIES[request.node.callspec.params["policy"]]()
    tail, _ = run(other, seen[150:], json.loads(json.dumps(state, allow_nan=False)))
    assert head + tail == whole


def test_observations_restored_from_json_decide_the_same(policy: Policy) -> None:
    seen = observations(3, 200)
    restored = [Observation.from_json(json.loads(json.dumps(observation.to_json()))) for observation in seen]
    assert run(policy, restored, policy.initial_state()) == run(policy, seen, policy.initial_state())


def test_arguments_are_not_mutated(policy: Policy) -> None:
    state = policy.initial_state()
    for observation in observations(4, 100):
        before, seen = copy.deepcopy(state), copy.deepcopy(observation)
        _, after = policy.decide(observation, state)
        assert state == before
        assert observation == seen
        state = after


def test_proposals_exist_move_something_and_leave_held_knobs_alone(policy: Policy) -> None:
    state, changes = policy.initial_state(), set(all_changes())
    for observation in observations(5, 500):
        decision, state = policy.decide(observation, state)
        assert decision.scenario
        assert "\n" not in decision.reason
        if decision.change is not None:
            assert decision.change in changes
            assert decision.change.knob in observation.tunables
            assert decision.change.knob not in observation.held
            assert observation.tunables[decision.change.knob] != decision.change.value
            assert len(decision.reason) > 10


def test_scenarios_are_few(policy: Policy) -> None:
    decisions, _ = run(policy, observations(6, 2000), policy.initial_state())
    assert len({decision.scenario for decision in decisions}) <= 66


def test_nothing_known_changes_nothing(policy: Policy) -> None:
    values: dict[str, float | None] = dict.fromkeys((f.name for f in FEATURES), None)
    state = policy.initial_state()
    for second in range(100):
        observation = Observation(second * 10**9, values, default_values(), instance="a")
        decision, state = policy.decide(observation, state)
        assert decision.change is None


def test_any_state_is_survived(policy: Policy) -> None:
    observation = observations(7, 1)[0]
    for state in ({}, {"x": 1}, {"stamp_ns": None}, {"rules": None, "knobs": None, "proposed": 3, "stamp_ns": 0}):
        decision, after = policy.decide(observation, state)
        assert isinstance(decision, Decision)
        json.dumps(after)


def test_a_state_does_not_grow(policy: Policy) -> None:
    seen = observations(8, 1500)
    _, early = run(policy, seen[:500], policy.initial_state())
    _, late = run(policy, seen, policy.initial_state())
    assert len(json.dumps(late)) < 2 * len(json.dumps(early))
