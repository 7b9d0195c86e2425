"""Measured gaps correct a profile's step times: slowly, within bounds, and so that the predictor decides better."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.tunables import default_values
from envs.profile import read_profile
from envs.reward import literature_quality
from envs.signals import Targets
from envs.simulated import DEFAULT_PROFILE, SimulatedEngine
from envs.spaces import Observation
from envs.workload.catalogue import CATALOGUE
from policies.correction import learnt, time_scale
from policies.effects import EffectModel
from policies.play import Contender, play
from policies.predictor import PredictorPolicy
from policies.predictor_choice import PredictorConfig

TARGETS = Targets(2.0, 0.25)
PROFILE = read_profile(DEFAULT_PROFILE)


def predictor(factor: float, **config: Any) -> PredictorPolicy:
    """One whose profile says that every step takes ``factor`` times what it takes."""
    model = EffectModel(
        PROFILE.groups(), PROFILE.pool_bytes, PROFILE.latency_model().scaled(factor), literature_quality(), TARGETS
    )
    return PredictorPolicy(model, PredictorConfig(**config))


@pytest.mark.parametrize("true", [0.6, 1.0, 1.7])
def test_it_goes_to_the_true_factor_and_stays(true: float) -> None:
    log = 0.0
    for _ in range(2000):
        log = learnt(log, true * 0.1, time_scale(log) * 0.1, 1 / 120)
    assert time_scale(log) == pytest.approx(true, rel=1e-3)


def test_it_is_slow_and_bounded_and_survives_anything() -> None:
    one_look = learnt(0.0, 1e9, 0.1, 1 / 120)
    assert one_look == pytest.approx(1 / 120)
    for measured in (1e9, 1e-9):
        log = 0.0
        for _ in range(2000):
            log = learnt(log, measured, 0.1, 0.1)
        assert time_scale(log) == pytest.approx(2.0 if measured > 1 else 0.5)
    for state in (None, "x", math.nan, math.inf, [], True):
        assert time_scale(state) == 1.0
        assert learnt(state, None, 0.1, 0.5) == 0.0
    assert learnt(0.3, 0.0, 0.1, 0.5) == learnt(0.3, 0.1, 0.0, 0.5) == 0.3
    assert time_scale(1e300) == 2.0


def seen(second: int, tbt_tail_s: float | None) -> Observation:
    values = {
        "offered_rps": 0.2, "offered_rps_long": 0.2, "prompt_tokens_p50": 810.0, "prompt_tokens_p95": 4000.0,
        "output_tokens_p50": 143.0, "output_tokens_p95": 600.0, "running": 2.0, "waiting": 0.0, "decode_tps": 40.0,
        "tokens_per_sequence": 1400.0, "hit_rate": 0.0, "bytes_share_native": 1.0, "tbt_tail_s": tbt_tail_s,
    }  # fmt: skip
    return Observation(second * 10**9, values, default_values(), observed_s=99.0, instance="a")


def test_it_learns_only_where_the_knobs_have_been_still() -> None:
    policy = predictor(1.0)
    state = policy.initial_state()
    for second in range(60):
        _, state = policy.decide(seen(second, None), state)
    assert state["time_scale_log"] == 0.0
    moved = {**state, "moved": {"block_size": 3.0}}
    assert policy.decide(seen(60, 1.0), moved)[1]["time_scale_log"] == 0.0
    assert policy.decide(seen(60, 1.0), {**state, "moved": {"block_size": 20.0}})[1]["time_scale_log"] > 0.0
    assert predictor(1.0, learn_s=0.0).decide(seen(60, 1.0), state)[1]["time_scale_log"] == 0.0
    for second in range(60, 400):
        decision, state = policy.decide(seen(second, 0.5), state)
    assert "times the profile's" in decision.reason


def test_a_state_of_before_keeps_what_it_had() -> None:
    policy = predictor(1.0)
    _, state = policy.decide(seen(0, None), policy.initial_state())
    old = {key: value for key, value in state.items() if key != "time_scale_log"}
    _, new = policy.decide(seen(1, 1.0), {**old, "peak_rps": 5.0})
    assert new["peak_rps"] > 4.0
    assert new["time_scale_log"] > 0.0


def test_a_profile_that_is_too_slow_is_seen_through() -> None:
    """On a training workload that asks for more than is served: with twice the time for every step, the predictor gives
    up what could be.
    """

    def good(seed: int, **config: Any) -> int:
        env = SimulatedEngine(
            PROFILE, CATALOGUE["chat-bursty"], rate_scale=0.3, interval_s=2.0, warm_up_s=0.0, episode_s=120.0,
            targets=TARGETS, repeats=False,
        )  # fmt: skip
        played = play(env, Contender("p", predictor(2.0, **config)), duration_s=120.0, interval_s=2.0, seed=seed)
        return played.good

    seeds = (11, 12)
    assert sum(good(seed, learn_s=30.0) for seed in seeds) > 1.2 * sum(good(seed, learn_s=0.0) for seed in seeds)
