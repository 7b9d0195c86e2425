"""The algorithms of Stable-Baselines3 and sb3-contrib as a recipe asks for them."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from sb3_contrib import MaskablePPO
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.vec_env import VecEnv

from envs.spaces import NOTHING
from policies.advice_input import ADVICE_ENTRIES
from policies.card import Network
from policies.train.advised import AdvisedMaskablePolicy, AdvisedPolicy, follow_advice
from policies.train.recipe import Recipe

Algorithm = MaskablePPO | PPO | DQN
# A network that knows nothing should do nothing: with thirty other actions it would turn knobs at every tick, and what
# imitation never saw it do would be anything at all.
NOTHING_FIRST: Final = 4.0


def build(recipe: Recipe, venv: VecEnv) -> Algorithm:
    """A fresh model on the CPU, seeded by the recipe."""
    if recipe.algo == "dqn":
        return _dqn(recipe, venv)
    settings = recipe.ppo
    common: dict[str, Any] = {
        "n_steps": recipe.episode_steps,
        "learning_rate": settings.learning_rate,
        "batch_size": settings.batch_size,
        "n_epochs": settings.epochs,
        "gamma": settings.gamma,
        "gae_lambda": settings.gae_lambda,
        "clip_range": settings.clip_range,
        "ent_coef": settings.entropy,
        "target_kl": settings.target_kl,
        "policy_kwargs": {"net_arch": {"pi": recipe.hidden, "vf": recipe.hidden}},
        "seed": recipe.seed,
        "device": "cpu",
    }
    model: MaskablePPO | PPO
    if recipe.algo == "maskable-ppo":
        model = MaskablePPO(AdvisedMaskablePolicy if recipe.advised else "MlpPolicy", venv, **common)
    else:
        model = PPO(AdvisedPolicy if recipe.advised else "MlpPolicy", venv, **common)
    outputs = cast("torch.nn.Linear", model.policy.action_net)
    with torch.no_grad():
        outputs.bias[NOTHING] = NOTHING_FIRST
    if recipe.advised:
        follow_advice(outputs)
    return model


def _dqn(recipe: Recipe, venv: VecEnv) -> DQN:
    settings = recipe.dqn
    return DQN(
        "MlpPolicy",
        venv,
        learning_rate=settings.learning_rate,
        batch_size=settings.batch_size,
        gamma=settings.gamma,
        buffer_size=settings.buffer_steps,
        learning_starts=settings.first_steps,
        # Counted in steps of all environments at once.
        train_freq=settings.train_every,
        gradient_steps=settings.updates,
        target_update_interval=settings.target_every,
        exploration_fraction=settings.explore_share,
        exploration_final_eps=settings.explore_end,
        policy_kwargs={"net_arch": recipe.hidden},
        seed=recipe.seed,
        device="cpu",
    )


def network_of(recipe: Recipe, entries: int, actions: int) -> Network:
    """What :func:`policies.train.archive.actor_tensors` has the weights of."""
    activation = "relu" if recipe.algo == "dqn" else "tanh"
    widths, skip = [entries, *recipe.hidden, actions], ADVICE_ENTRIES if recipe.advised else 0
    return Network.model_validate({"activation": activation, "widths": widths, "skip": skip})
