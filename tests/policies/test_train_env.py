"""What policies are trained in: planned traffic, the guard inside, the reward, and traffic shared as a baseline."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("stable_baselines3", reason="the extra 'train' is not installed")

from stable_baselines3.common.vec_env import DummyVecEnv

from engine.tunables import TUNABLES
from envs.profile import Profile, read_profile
from envs.simulated import DEFAULT_PROFILE
from envs.spaces import encode_action
from envs.workload.catalogue import CATALOGUE
from envs.workload.generators import generate
from envs.workload.trace import Trace
from envs.workload.writer import write_trace
from policies.base import Change
from policies.train import rates
from policies.train.env import TrainingEnv
from policies.train.recipe import Recipe, Source
from policies.train.tally import REWARD_SCALE
from policies.train.traffic import Traffic, resolve
from policies.train.vector import GroupBaseline

PROFILE = read_profile(DEFAULT_PROFILE)
SOURCES = [Source(workload="chat-bursty", rate_scale=0.1), Source(workload="code-bursty", rate_scale=0.3)]


def recipe(**changes: Any) -> Recipe:
    return Recipe(**{"steps": 1, "sources": SOURCES, "episode_steps": 8, **changes})


def env(made: Recipe, stream: int = 0) -> TrainingEnv:
    return TrainingEnv(made, PROFILE, Traffic(made), stream)


def test_episodes_depend_on_seed_stream_and_number_alone() -> None:
    first, again = Traffic(recipe()), pickle.loads(pickle.dumps(Traffic(recipe())))
    plans = [first.training(stream, number) for stream in range(3) for number in range(3)]
    assert plans == [again.training(stream, number) for stream in range(3) for number in range(3)]
    assert len({plan.world_seed for plan in plans}) == len(plans)
    other = Traffic(recipe(seed=1))
    assert other.training(0, 0) != first.training(0, 0)
    assert [other.held_out(n) for n in range(4)] == [first.held_out(n) for n in range(4)]


def test_held_out_episodes_are_none_of_training_and_take_sources_in_turn() -> None:
    traffic = Traffic(recipe())
    training = {traffic.training(stream, number).world_seed for stream in range(4) for number in range(10)}
    held_out = [traffic.held_out(number) for number in range(10)]
    assert not training & {plan.world_seed for plan in held_out}
    assert [plan.source for plan in held_out[:4]] == ["chat-bursty", "code-bursty"] * 2
    assert not any(plan.values for plan in held_out)


def test_targets_are_those_of_requests_that_are_alone_unless_given() -> None:
    chat, code = resolve(recipe(), PROFILE)
    assert chat.tbt_target_s is not None
    assert 0.05 < chat.tbt_target_s < 0.25  # 2.5 steps of an 8 B model on an L4
    assert chat.ttft_target_s != code.ttft_target_s
    given = resolve(recipe(ttft_target_s=1.5), PROFILE)
    assert [source.ttft_target_s for source in given] == [1.5, 1.5]
    assert given[0].tbt_target_s == chat.tbt_target_s
    made = recipe(sources=[chat, code])
    by_source = {plan.source: plan.targets for plan in map(Traffic(made).held_out, range(2))}
    assert by_source == {source.name: made.targets_of(source) for source in (chat, code)}


def test_every_workload_that_training_begins_with_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come at every rate that would be tried, and the slowest of them are served."""
    usual, played, real = Recipe(steps=1).sources, list[int](), rates.inside_share

    def inside_share(profile: Profile, trace: Trace, *rest: Any) -> float:
        played.append(len(trace.requests))
        return real(profile, trace, *rest) if len(played) % rates._STEPS == 1 else 0.0

    monkeypatch.setattr(rates, "inside_share", inside_share)
    for source in resolve(recipe(sources=usual), PROFILE):
        assert source.rate_scale is not None, source.name
        assert source.rate_scale > 0, source.name
    assert len(played) == rates._STEPS * len(usual)
    assert min(played) >= 100


def test_lengths_are_divided_before_rates_and_targets_are_measured() -> None:
    long, short = (resolve(recipe(length_scale=by), PROFILE)[0] for by in (1.0, 4.0))
    assert short.ttft_target_s < 0.7 * long.ttft_target_s  # a short prompt is bound by reading the weights
    plain, scaled = (Traffic(recipe(length_scale=by)).training(0, 0).trace.requests for by in (1.0, 4.0))
    assert len(plain) == len(scaled)
    assert sum(r.prompt_tokens for r in scaled) == pytest.approx(sum(r.prompt_tokens for r in plain) / 4, rel=0.02)


def test_a_trace_without_a_rate_is_refused(tmp_path: Any) -> None:
    whole = generate(CATALOGUE["chat-poisson"], duration_s=200, seed=0, rate_scale=0.2)
    write_trace(tmp_path / "once.csv", [replace(request, arrival_s=0.0) for request in whole.requests])
    with pytest.raises(ValueError, match="one time"):
        resolve(recipe(sources=[Source(trace=str(tmp_path / "once.csv"))]), PROFILE)


def test_of_a_trace_the_end_is_held_out(tmp_path: Any) -> None:
    whole = generate(CATALOGUE["chat-poisson"], duration_s=2000, seed=0, rate_scale=0.2)
    write_trace(tmp_path / "own.csv", whole.requests)
    sources = resolve(recipe(sources=[Source(trace=str(tmp_path / "own.csv"))]), PROFILE)
    assert 0 < (sources[0].rate_scale or 0) < 2
    assert sources[0].sha256
    made = recipe(sources=[sources[0].model_copy(update={"rate_scale": 1.0})])
    traffic = Traffic(made)
    lengths = [(request.prompt_tokens, request.output_tokens) for request in whole.requests]
    cut = sum(request.arrival_s < 0.7 * whole.duration_s for request in whole.requests)
    for number in range(10):
        for plan, part in ((traffic.training(0, number), lengths[:cut]), (traffic.held_out(number), lengths[cut:])):
            own = [(request.prompt_tokens, request.output_tokens) for request in plan.trace.requests]
            assert any(part[i : i + len(own)] == own for i in range(len(part)))
    write_trace(tmp_path / "own.csv", whole.requests[:-1], force=True)
    with pytest.raises(ValueError, match="not the trace"):
        resolve(recipe(sources=sources), PROFILE)


def test_the_same_episode_is_the_same_in_another_environment_and_order() -> None:
    made = recipe()
    one, other = env(made), env(made)
    first, _ = one.reset()
    second = [one.step(0)[0] for _ in range(8)]
    other.play(1)
    other.reset()
    other.play(0)
    again, _ = other.reset()
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(second, [other.step(0)[0] for _ in range(8)])


def test_the_guard_is_inside_and_the_mask_knows_it() -> None:
    one = env(recipe(knobs=["kv_format", "eviction"]))
    one.play_held_out(0, 1)
    one.reset()
    assert one.action_masks().sum() == 1  # not one full window has been seen
    one.step(0)
    int8, window = (encode_action(Change(*pair)) for pair in (("kv_format", "int8"), ("eviction", "window")))
    allowed = [f"{TUNABLES[knob].name}" for knob in ("kv_format", "eviction")]
    assert one.action_masks()[int8] == 1
    assert one.action_masks().sum() == 1 + sum(len(TUNABLES[knob].values) - 1 for knob in allowed)
    *_, told = one.step(int8)
    assert told["applied"] == Change("kv_format", "int8")
    back = encode_action(Change("kv_format", "int4"))
    assert one.action_masks()[back] == 0  # it stays for five seconds
    assert one.action_masks()[window] == 1
    *_, told = one.step(back)
    assert told["applied"] is None
    one.step(0)
    assert one.action_masks()[back] == 1


def test_an_episode_ends_and_says_what_came_of_it() -> None:
    one = env(recipe(episode_steps=5))
    one.play_held_out(0, 1)
    one.reset()
    steps = [one.step(0) for _ in range(5)]
    assert [step[3] for step in steps] == [False] * 4 + [True]
    outcome = steps[-1][4]["outcome"]
    assert outcome["source"] == "chat-bursty"
    assert outcome["default_knobs"]
    assert outcome["loss_per_token"] == 0.0
    # Nothing was lost in quality, nothing was clipped: what was rewarded is the service.
    assert sum(float(step[1]) for step in steps) / 5 == pytest.approx(REWARD_SCALE * outcome["reward"])
    good = sum(step[4]["true"]["good"] for step in steps)
    assert outcome["goodput_rps"] == pytest.approx(good / 10)


def test_quality_costs_its_price() -> None:
    def total(price: float) -> tuple[float, float]:
        one = env(recipe(episode_steps=30, sources=SOURCES[:1]))
        one.play_held_out(0, 1)
        one.set_price(price)
        one.reset()
        one.step(0)
        one.step(encode_action(Change("kv_format", "int8")))
        steps = [one.step(0) for _ in range(28)]
        return sum(float(step[1]) for step in steps), steps[-1][4]["outcome"]["loss"]

    (free, loss), (dear, same) = total(0.0), total(0.2)
    assert loss == same > 0
    assert dear < free


def test_the_reward_of_a_group_is_less_the_mean_of_the_others() -> None:
    made = recipe(episode_steps=4)
    venv = GroupBaseline(DummyVecEnv([lambda index=index: env(made, index // 2) for index in range(4)]), 2)
    plain = DummyVecEnv([lambda index=index: env(made, index // 2) for index in range(4)])
    venv.reset()
    plain.reset()
    for both in (venv, plain):
        both.step(np.zeros(4, dtype=int))
    told = []
    for _ in range(3):
        masks = plain.env_method("action_masks")
        actions = np.array([int(np.flatnonzero(mask)[-1]) * (index % 2) for index, mask in enumerate(masks)])
        _, rewards, _, _ = venv.step(actions)
        _, own, _, _ = plain.step(actions)
        np.testing.assert_allclose(rewards, own - own[[1, 0, 3, 2]], atol=1e-6)
        told += rewards.tolist()
    assert any(told)
