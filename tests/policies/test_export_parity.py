"""The exported network against Stable-Baselines3's own: logits, and actions over raw observations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sb3_contrib", reason="the extra 'train' is not installed")
pytest.importorskip("torch", reason="the extra 'train' is not installed")

import torch
from policy_cards import card
from toy_training import toys

from envs.profile import read_profile
from envs.simulated import DEFAULT_PROFILE
from envs.spaces import NOTHING, Observation, encode_action, legal_action, vector_names
from policies.base import Decision, PolicyState
from policies.card import GuardLimits, Normaliser, read_policy
from policies.export import export_policy
from policies.guard import GuardContext
from policies.guarded import guarded_mask
from policies.learned import LearnedPolicy
from policies.network import Mlp, masked_argmax
from policies.train.algorithms import build, network_of
from policies.train.archive import POLICY, actor_tensors, read_states
from policies.train.env import TrainingEnv
from policies.train.recipe import Recipe, Source
from policies.train.traffic import Traffic
from policies.train.vector import CLIP, EPSILON, stack

ALGOS = ("maskable-ppo", "ppo", "dqn")


def trained(algo: str, folder: Path) -> tuple[Any, Any, Mlp]:
    """A model with weights and statistics as after training, saved by SB3, exported and read back."""
    recipe = Recipe(algo=algo, steps=1, envs=1, group=1, processes=False, hidden=[64, 64], seed=5)
    normalised = stack(toys(recipe), recipe)
    model = build(recipe, normalised)
    rng, entries = np.random.default_rng(1), len(vector_names())
    normalised.obs_rms.mean, normalised.obs_rms.var = rng.random(entries), 0.2 * rng.random(entries) ** 4
    with torch.no_grad():
        for tensor in model.policy.parameters():
            # Values as large as training makes them: at a few hundred, float32 itself has steps of 3e-5.
            scale = 0.1 if algo == "dqn" else 0.3
            tensor.add_(scale * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7)))
        if algo != "dqn":
            model.policy.action_net.bias[NOTHING] = -3.0
    model.save(folder / "model.zip")
    tensors = actor_tensors(algo, read_states(folder / "model.zip")[POLICY])
    statistics = normalised.obs_rms
    normaliser = Normaliser(mean=statistics.mean.tolist(), var=statistics.var.tolist(), epsilon=EPSILON, clip=CLIP)
    network = network_of(recipe, entries, int(model.action_space.n))
    export_policy(folder / "policy", card(algorithm=algo, network=network, normaliser=normaliser), tensors)
    read, weights = read_policy(folder / "policy")
    return model, normalised, Mlp(read.network, read.normaliser, weights)


def raw_observations(number: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Vectors of float32 in [0, 1] as observations are: figures, one-hot knobs, flags."""
    rng = np.random.default_rng(seed)
    vectors = rng.random((number, len(vector_names())), dtype=np.float32)
    flags = np.array([("=" in name or ":" in name) for name in vector_names()])
    vectors[:, flags] = vectors[:, flags] > 0.8
    return vectors


def compare(algo: str, folder: Path, number: int) -> tuple[float, int, int]:
    """Largest difference of a logit, number of different actions, and how many of these are no near-ties."""
    model, normalised, mlp = trained(algo, folder)
    vectors, rng = raw_observations(number, 2), np.random.default_rng(3)
    masks = rng.random((number, int(model.action_space.n))) < 0.5
    masks[:, 0] = True
    seen = normalised.normalize_obs(vectors)
    with torch.no_grad():
        tensor = torch.as_tensor(seen)
        if algo == "dqn":
            theirs = model.q_net(tensor).numpy()
        else:
            theirs = model.policy.action_net(model.policy.mlp_extractor.forward_actor(tensor)).numpy()
    ours = np.stack([mlp(vector) for vector in vectors])
    more = {"action_masks": masks} if algo == "maskable-ppo" else {}
    wanted, _ = model.predict(seen, deterministic=True, **more)
    pick = masked_argmax if algo == "maskable-ppo" else lambda values, _: int(np.argmax(values))
    chosen = np.array([pick(values, mask.astype(np.int8)) for values, mask in zip(ours, masks, strict=True)])
    allowed = np.where(masks, theirs, -np.inf) if algo == "maskable-ppo" else theirs
    best = np.sort(allowed, axis=1)
    different = chosen != wanted
    clear = different & (best[:, -1] - best[:, -2] > 1e-4)
    assert len(set(wanted.tolist())) > 10
    return float(np.abs(ours - theirs).max()), int(different.sum()), int(clear.sum())


@pytest.mark.parametrize("algo", ALGOS)
def test_logits_and_actions_are_those_of_sb3(algo: str, tmp_path: Path) -> None:
    most, different, clear = compare(algo, tmp_path, 2000)
    assert most <= 1e-4
    assert different == clear == 0


@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGOS)
def test_logits_and_actions_on_a_hundred_thousand_observations(algo: str, tmp_path: Path) -> None:
    most, different, clear = compare(algo, tmp_path, 100_000)
    print(f"{algo}: largest difference {most:.2e}, {different} of 100,000 actions differ, {clear} of them no near-tie")
    assert most <= 1e-4
    assert different <= 10
    assert clear == 0


class Nothing:
    name = "nothing"

    def initial_state(self) -> PolicyState:
        return {}

    def decide(self, _: Observation, state: PolicyState) -> tuple[Decision, PolicyState]:
        return Decision(None, "steady", ""), state


@pytest.mark.parametrize("algo", ALGOS)
def test_in_the_loop_it_does_what_the_model_does_behind_its_guard(algo: str, tmp_path: Path) -> None:
    """A simulated episode: the deployed policy's changes are those of SB3's model in the training environment."""
    model, normalised, _ = trained(algo, tmp_path)
    source = Source(workload="chat-bursty", rate_scale=0.1)
    recipe = Recipe(steps=1, sources=[source], envs=1, group=1, episode_steps=30)
    env = TrainingEnv(recipe, read_profile(DEFAULT_PROFILE), Traffic(recipe), 0)
    read, weights = read_policy(tmp_path / "policy")
    limits = GuardLimits.of(recipe.guard_config())
    policy = LearnedPolicy(read.model_copy(update={"guard": limits}), weights, fallback=Nothing())
    vector, _ = env.reset()
    state, changes = policy.initial_state(), 0
    for _ in range(recipe.episode_steps):
        observation, mask, _ = env.look()
        assert observation is not None
        more = {"action_masks": mask} if algo == "maskable-ppo" else {}
        action = int(model.predict(normalised.normalize_obs(vector), deterministic=True, **more)[0])
        expected = legal_action(action, mask)
        inside = guarded_mask(policy._guard, GuardContext(observation), state["guard"])
        np.testing.assert_array_equal(inside, mask)
        decision, state = policy.decide(observation, state)
        assert encode_action(decision.change) == expected
        changes += expected != 0
        vector, *_ = env.step(action)
    assert changes > 3 or algo != "maskable-ppo"  # without masks it may want what it cannot have
