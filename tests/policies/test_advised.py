"""Policies that see what another would do: they begin as that one, learn to overrule it, and run as trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sb3_contrib", reason="the extra 'train' is not installed")
pytest.importorskip("torch", reason="the extra 'train' is not installed")

import torch
from policy_cards import advised_card, tensors_of
from pydantic import ValidationError

from envs.profile import read_profile
from envs.reward import RewardWeights
from envs.simulated import DEFAULT_PROFILE
from envs.spaces import NOTHING, encode_action, legal_action, vector_names
from policies.advice_input import ADVICE_ENTRIES, advised_actions, advised_names, with_advice
from policies.advisor import advisors
from policies.base import Change
from policies.card import GuardLimits, Network, Normaliser, PolicyFileError, read_policy
from policies.export import export_policy
from policies.learned import LearnedPolicy, load_learned
from policies.named import World, contender
from policies.network import Mlp
from policies.predictor_of import predictor_of
from policies.train.advised import AdviceAsItIs
from policies.train.algorithms import Algorithm, build, network_of
from policies.train.archive import actor_tensors
from policies.train.env import TrainingEnv
from policies.train.recipe import Lookahead, Recipe, Source, WarmStart, checked
from policies.train.tally import REWARD_SCALE
from policies.train.traffic import Traffic
from policies.train.vector import CLIP, EPSILON, stack, training_envs
from policies.train.worth import Trials

PROFILE = read_profile(DEFAULT_PROFILE)
ALGOS = ("maskable-ppo", "ppo")


def recipe(algo: str = "maskable-ppo", **changes: Any) -> Recipe:
    source = Source(workload="chat-bursty", rate_scale=0.2, ttft_target_s=2.0, tbt_target_s=0.15)
    fields: dict[str, Any] = {
        "algo": algo, "steps": 1, "sources": [source], "envs": 1, "group": 1, "processes": False, "episode_steps": 40,
        "advised": True, "warm_start": WarmStart(teacher="predictor"),
    }  # fmt: skip
    return Recipe(**{**fields, **changes})


def model_of(made: Recipe) -> tuple[Algorithm, Any]:
    normalised = stack(training_envs(made, PROFILE), made)
    return build(made, normalised), normalised


def test_advice_stands_behind_the_observation() -> None:
    vector, mask = np.zeros(len(vector_names()), dtype=np.float32), np.ones(1 + ADVICE_ENTRIES, dtype=np.int8)
    int8 = Change("kv_format", "int8")
    seen = with_advice(vector, int8, mask)
    assert seen.shape == (len(advised_names()),)
    assert [name for name, entry in zip(advised_names(), seen, strict=True) if entry] == ["advised:kv_format=int8"]
    assert not with_advice(vector, None, mask).any()
    mask[encode_action(int8)] = 0
    assert not with_advice(vector, int8, mask).any(), "what may not be done is no advice"


@pytest.mark.parametrize("algo", ALGOS)
def test_before_anything_is_learnt_it_is_the_teacher(algo: str) -> None:
    made = recipe(algo)
    model, normalised = model_of(made)
    env = TrainingEnv(made, PROFILE, Traffic(made), 0)
    assert env.observation_space.shape == (len(advised_names()),)
    teacher, changes = predictor_of(PROFILE, made.targets_of(made.sources[0])), 0
    vector, _ = env.reset()
    state = teacher.initial_state()
    for _ in range(made.episode_steps):
        observation, mask, _ = env.look()
        assert observation is not None
        decision, state = teacher.decide(observation, state)
        wanted = legal_action(encode_action(decision.change), mask)
        assert env.observation_space.contains(vector)
        more = {"action_masks": mask} if algo == "maskable-ppo" else {}
        action = int(model.predict(normalised.normalize_obs(vector), deterministic=True, **more)[0])
        assert action == wanted
        changes += wanted != NOTHING
        vector, *_ = env.step(action)
    assert changes


def shaken(made: Recipe, folder: Path) -> tuple[Algorithm, Any]:
    """A model with weights and statistics as after training, and its export in ``folder``/policy."""
    model, normalised = model_of(made)
    rng = np.random.default_rng(1)
    normalised.obs_rms.update(rng.random((500, len(advised_names()))).astype(np.float32))
    with torch.no_grad():
        for tensor in model.policy.parameters():
            tensor.add_(0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7)))
        outputs: Any = model.policy.action_net  # advice and nothing no longer lead by so much
        outputs.weight[:, -ADVICE_ENTRIES:] *= 0.1
        outputs.bias[NOTHING] = -1.0
    statistics = normalised.obs_rms
    normaliser = Normaliser(mean=statistics.mean.tolist(), var=statistics.var.tolist(), epsilon=EPSILON, clip=CLIP)
    entries, actions = len(advised_names()), int(model.action_space.n)  # type: ignore[attr-defined]
    exported = advised_card(
        algorithm=made.algo, network=network_of(made, entries, actions), normaliser=normaliser, advisor="predictor",
        guard=GuardLimits.of(made.guard_config()),
    )  # fmt: skip
    export_policy(folder / "policy", exported, actor_tensors(made.algo, model.policy.state_dict()))
    return model, normalised


@pytest.mark.parametrize("algo", ALGOS)
def test_exported_it_does_what_the_model_does(algo: str, tmp_path: Path) -> None:
    made = recipe(algo)
    model, normalised = shaken(made, tmp_path)
    targets = made.targets_of(made.sources[0])
    make = advisors(lambda: predictor_of(PROFILE, targets))
    policy = load_learned(tmp_path / "policy", fallback=contender("default").policy, advisor=make)  # type: ignore[arg-type]
    assert policy.fallback.name.startswith("predictor")
    read, weights = read_policy(tmp_path / "policy")
    mlp = Mlp(read.network, read.normaliser, weights)
    env = TrainingEnv(made, PROFILE, Traffic(made), 0)
    vector, _ = env.reset()
    state, changes, overruled = policy.initial_state(), 0, 0
    for _ in range(made.episode_steps):
        observation, mask, _ = env.look()
        assert observation is not None
        seen = normalised.normalize_obs(vector)
        with torch.no_grad():
            hidden = model.policy.mlp_extractor.forward_actor(torch.as_tensor(seen)[None])  # type: ignore[operator, union-attr]
            theirs = model.policy.action_net(hidden)[0].numpy()  # type: ignore[operator, union-attr]
        assert np.abs(mlp(vector) - theirs).max() <= 1e-4
        more = {"action_masks": mask} if algo == "maskable-ppo" else {}
        action = legal_action(int(model.predict(seen, deterministic=True, **more)[0]), mask)
        decision, state = policy.decide(observation, state)
        assert encode_action(decision.change) == action
        changes += action != NOTHING
        overruled += action != int(np.argmax([0.5, *vector[-ADVICE_ENTRIES:]]))
        vector, *_ = env.step(action)
    assert algo == "ppo" or (changes and overruled)  # without masks it may want what it cannot have


def test_statistics_leave_advice_as_it_is() -> None:
    statistics = AdviceAsItIs(len(advised_names()), EPSILON)
    statistics.update(np.random.default_rng(0).random((50, len(advised_names()))))
    scaled = (1.0 - statistics.mean) / np.sqrt(statistics.var + EPSILON)
    np.testing.assert_allclose(scaled[-ADVICE_ENTRIES:], 1.0)
    assert np.abs(scaled[:-ADVICE_ENTRIES] - 1.0).min() > 0.1


def test_an_advisor_that_is_not_to_be_had_is_one_line(tmp_path: Path) -> None:
    rules = contender("default").policy
    assert rules is not None
    for name, advisor, said in (
        ("predictor", None, "not to be had here"),
        ("predictor", advisors(None), "engine's profile"),
        ("nobody", advisors(None), "comes with the program"),
    ):
        made = advised_card(advisor=name)
        folder = tmp_path / f"{name}-{advisor is None}"
        export_policy(folder, made, tensors_of(made.network))
        with pytest.raises(PolicyFileError, match=said) as raised:
            load_learned(folder, fallback=rules, advisor=advisor)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="engine's profile"):
        contender(f"learned:{tmp_path / 'predictor-False'}")
    made = advised_card(profile={"digest": PROFILE.digest, "description": "a profile", "estimated": True})
    export_policy(tmp_path / "fits", made, tensors_of(made.network))
    learned = contender(f"learned:{tmp_path / 'fits'}", World(PROFILE)).policy
    assert isinstance(learned, LearnedPolicy)
    assert learned.fallback.name == "rules:default"


@pytest.mark.parametrize(
    "changes",
    [
        {"advisor": None},  # a network for advice, and nobody who gives it
        {"advisor": "../../rules.yaml"},  # no paths
        {"network": Network(activation="tanh", widths=[len(advised_names()), 8, 1 + ADVICE_ENTRIES])},
        {"network": Network(activation="tanh", widths=[len(advised_names()), 8, 1 + ADVICE_ENTRIES], skip=3)},
    ],
)
def test_a_card_that_does_not_hang_together_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        advised_card(**changes)


def test_an_advised_network_needs_whom_it_can_learn_from() -> None:
    for changes in ({"warm_start": None}, {"algo": "dqn"}, {"hidden": []}):
        with pytest.raises(ValueError, match="an advised network needs"):
            checked(recipe(**changes))
    for teacher in ("own.yaml", "rules/default.yaml"):  # no card could name it
        with pytest.raises(ValueError, match="takes its teacher along by name"):
            checked(recipe(warm_start=WarmStart(teacher=teacher)))
    assert checked(recipe(warm_start=WarmStart(teacher="default")))


def _pressed(made: Recipe) -> TrainingEnv:
    env = TrainingEnv(made, PROFILE, Traffic(made), 0)
    env.play_apart(0)
    env.reset()
    return env


def test_what_follows_a_tried_action_is_the_advice_and_leaves_no_trace() -> None:
    made = recipe(randomise=False, episode_steps=30)
    plan = Lookahead(then="advice", least=6, longest=6)
    tried, untouched = _pressed(made), _pressed(made)
    for _ in range(4):
        tried.step(tried.advice())
        untouched.step(untouched.advice())
    int8, large = (encode_action(Change(*change)) for change in (("kv_format", "int8"), ("block_size", 128)))
    worths = tried.worths([NOTHING, int8, large], plan)
    np.testing.assert_array_equal(worths[::-1], tried.worths([large, int8, NOTHING], plan))
    changes = 0
    for _ in range(20):
        advised = untouched.advice()
        ours, theirs = tried.step(advised), untouched.step(advised)
        np.testing.assert_array_equal(ours[0], theirs[0])
        assert ours[1:4] == theirs[1:4]
        changes += theirs[4]["applied"] is not None
    assert changes, "something to follow"
    assert tried.outcome() == untouched.outcome()


def test_trying_tells_what_following_the_advice_brings() -> None:
    """The advised action, and then the advice: what comes if nobody overrules it, less what waits in the end."""
    made = recipe(randomise=False, episode_steps=30)
    plan = Lookahead(then="advice", least=6, longest=6)
    env = _pressed(made)
    for _ in range(8):
        env.step(env.advice())
    foretold = env.worths([env.advice()], plan)[0]
    came = sum(float(env.step(env.advice())[1]) / REWARD_SCALE for _ in range(6))
    engine, episode = env._engine, env._episode
    assert engine is not None
    assert episode is not None
    late = engine.simulator.stats().gauges.waiting * RewardWeights().violation / episode.mean_rps / made.interval_s
    assert foretold == pytest.approx((came - late) / 6)
    assert came != 0


def test_to_leave_the_advice_costs_the_margin() -> None:
    int8, int4 = (encode_action(Change("kv_format", value)) for value in ("int8", "int4"))
    base, mask = np.zeros(len(vector_names()), dtype=np.float32), np.ones(1 + ADVICE_ENTRIES, dtype=np.int8)
    vectors = np.stack([with_advice(base, None, mask), with_advice(base, Change("kv_format", "int8"), mask)])
    np.testing.assert_array_equal(advised_actions(vectors), [NOTHING, int8])
    actions = np.array([[NOTHING, int8, int4]] * 2)
    trials = Trials(vectors, actions, np.zeros((2, 3)), np.zeros(2, dtype=bool))
    found = trials.advantages(Lookahead(then="advice", margin=0.5))
    np.testing.assert_allclose(found, [[-0.5, -0.5], [0.5, 0.0]])
    np.testing.assert_allclose(trials.advantages(Lookahead(margin=0.5)), [[-0.5, -0.5]] * 2)


def test_only_who_has_advice_can_follow_it() -> None:
    with pytest.raises(ValueError, match="advice to follow"):
        checked(recipe(advised=False, lookahead=Lookahead(then="advice")))
