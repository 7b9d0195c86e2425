"""The rule files that come with the package, in a closed loop with a toy engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from policies.base import Decision, PolicyState
from policies.rules import load_rules, presets
from policies.threshold import ThresholdPolicy

POOL_TOKENS = 4000


class Off:
    """Leaves everything as it is."""

    name = "off"

    def initial_state(self) -> PolicyState:
        return {}

    def decide(self, _: Any, state: PolicyState) -> tuple[Decision, PolicyState]:
        return Decision(None, "steady", ""), state


def preset(name: str) -> ThresholdPolicy:
    return ThresholdPolicy(load_rules(name))


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads_and_tells_what_it_is(name: str) -> None:
    rules = load_rules(name)
    assert rules.name == name
    assert rules.description


def test_the_literatures_rule_is_the_literatures_rule() -> None:
    rules = load_rules("literature")
    assert [(rule.when.text, dict(rule.sets)) for rule in rules.rules] == [
        ("load > 0.8", {"kv_format": "int4", "eviction": "none"}),
        ("0.3 <= load <= 0.8", {"keep_tokens": 512, "eviction": "window", "kv_format": "native"}),
        ("load < 0.3", {"kv_format": "native", "eviction": "none"}),
    ]


def test_default_moves_every_knob_for_a_stated_reason_where_native_saturates(
    toy: Callable[..., Any], loop: Callable[..., Any], burst: Callable[..., Any]
) -> None:
    load = burst(105, calm_rps=1.5, peak_rps=8, seed=0)
    off = loop(toy(load, POOL_TOKENS), Off(), 125)
    assert off.engine.good < 0.8 * len(load)  # the load is one under which a native cache saturates
    run = loop(toy(load, POOL_TOKENS), preset("default"), 150)
    assert run.knobs == {"kv_format", "block_size"}
    assert run.engine.good > 1.2 * off.engine.good
    names = {rule.name for rule in load_rules("default").rules}
    for _, change, scenario, reason in run.changes:
        assert scenario in names
        assert "kv_demand" in reason
        assert f"{change.knob} " in reason
        assert reason.endswith(f"-> {change.value}")
    # Calm again at the end: precision is given back.
    assert run.engine.values["kv_format"] == "native"


@pytest.mark.parametrize(("name", "is_inside"), [("default", True), ("literature", False)])
def test_default_is_inside_the_quality_budget_and_the_literature_is_run_as_published(
    name: str, is_inside: bool
) -> None:
    """Under a load that fills the pool, by the simulator's exact charge."""
    from envs.simulated import SimulatedEngine
    from policies.named import contender
    from policies.play import play
    from policies.usual_budget import USUAL_BUDGET

    env = SimulatedEngine(None, "reasoning-bursty", rate_scale=0.1, interval_s=2.0, warm_up_s=0.0, episode_s=90.0)
    played = play(env, contender(name), duration_s=90.0, interval_s=2.0, seed=3)
    changes = {move.change for move in played.moves}
    assert ("kv_format=int8" if is_inside else "eviction=window") in changes
    assert not is_inside or not changes & {"kv_format=int4", "eviction=window"}
    assert (played.quality_per_token <= USUAL_BUDGET) is is_inside


def test_default_goes_to_int4_where_the_model_is_measured_to_lose_nothing_by_it() -> None:
    from engine.tunables import TUNABLES
    from envs.profile import Quality, read_profile
    from envs.simulated import DEFAULT_PROFILE, SimulatedEngine
    from policies.named import contender
    from policies.play import play

    measured = Quality(by_format=dict.fromkeys(TUNABLES["kv_format"].values, 0.0))
    profile = read_profile(DEFAULT_PROFILE).model_copy(update={"quality": measured})
    env = SimulatedEngine(profile, "reasoning-bursty", rate_scale=0.1, interval_s=2.0, warm_up_s=0.0, episode_s=90.0)
    played = play(env, contender("default"), duration_s=90.0, interval_s=2.0, seed=3)
    assert "kv_format=int4" in {move.change for move in played.moves}
    assert played.quality_per_token == 0.0


def test_defaults_goodput_is_no_lower_than_the_literatures(
    toy: Callable[..., Any], loop: Callable[..., Any], burst: Callable[..., Any]
) -> None:
    good = {"default": 0, "literature": 0}
    for seed in range(5):
        load = burst(105, calm_rps=1.5, peak_rps=8, seed=seed)
        for name in good:
            good[name] += loop(toy(load, 3500), preset(name), 110).engine.good
    assert good["default"] >= good["literature"]


@pytest.mark.parametrize("gap_s", [0.8, 0.4])
def test_constant_load_with_noise_does_not_make_default_flap(
    gap_s: float, toy: Callable[..., Any], loop: Callable[..., Any]
) -> None:
    """Case J.39: 30 simulated minutes, 5 % noise, demand between the thresholds: at most one change after settling."""
    rng, now_s, load = random.Random(1), 0.0, []
    while now_s < 1800:
        now_s += gap_s * rng.uniform(0.95, 1.05)
        load.append((now_s, round(300 * rng.uniform(0.95, 1.05)), round(80 * rng.uniform(0.95, 1.05))))
    run = loop(toy(load, POOL_TOKENS, step_s=0.05), preset("default"), 1800)
    assert len([second for second, _, _, _ in run.changes if second > 120]) <= 1
    assert run.engine.good > 0.98 * len(load)


@pytest.mark.parametrize("level", [0.2, 0.3, 0.4, 0.43, 0.45, 0.52, 0.55, 0.7, 1.15])
def test_noise_around_any_threshold_is_damped(level: float) -> None:
    """The same from outside: every figure of memory sways by 5 % around one level for 30 minutes."""
    from engine.tunables import default_values
    from envs.features import FEATURES
    from envs.spaces import Observation

    rng, policy, knobs, changes = random.Random(2), preset("default"), default_values(), []
    state = policy.initial_state()
    share = {"kv_demand": 1.0, "kv_demand_int8": 0.55, "kv_demand_k8v4": 0.43, "kv_demand_int4": 0.3}
    for second in range(1800):
        demand = level * rng.uniform(0.95, 1.05)
        values: dict[str, float | None] = dict.fromkeys((f.name for f in FEATURES), None)
        values |= {name: demand * part for name, part in share.items()}
        values |= {"running": 8.0, "waiting": 0.0, "kv_usage": min(1.0, demand), "preemptions_per_s": 0.0}
        observation = Observation(second * 10**9, values, dict(knobs), observed_s=99, instance="a")
        decision, state = policy.decide(observation, state)
        if decision.change is not None:
            knobs[decision.change.knob] = decision.change.value
            changes.append(second)
    assert len([second for second in changes if second > 120]) <= 1
