"""Several environments as one: in processes where that pays, normalised, with shared traffic as a baseline."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import gymnasium
import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecEnvWrapper, VecNormalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

from envs.profile import Profile
from policies.advice_input import advised_names
from policies.train.advised import AdviceAsItIs
from policies.train.env import TrainingEnv
from policies.train.recipe import Recipe
from policies.train.traffic import Traffic

# A variance that is never below this: entries that hardly moved in training do not blow up when they do.
EPSILON: Final = 1e-3
CLIP: Final = 10.0
MakeEnv = Callable[[int], gymnasium.Env[Any, Any]]
"""The environment with this index; called in its own process, so it must be picklable."""


def training_envs(recipe: Recipe, profile: Profile) -> MakeEnv:
    """How to make the environments of a recipe; those of one group play one stream."""
    return partial(_training_env, recipe, profile, Traffic(recipe))


def _training_env(recipe: Recipe, profile: Profile, traffic: Traffic, index: int) -> gymnasium.Env[Any, Any]:
    return TrainingEnv(recipe, profile, traffic, stream=index // recipe.group, index=index)


def stack(make_env: MakeEnv, recipe: Recipe) -> VecNormalize:
    """All environments of a recipe, observations normalised. Closing it ends the processes."""
    makers = [partial(make_env, index) for index in range(recipe.envs)]
    venv: VecEnv
    if recipe.processes and recipe.envs > 1 and (os.cpu_count() or 1) > 1:
        # forkserver: no thread of this process is copied, and torch is not loaded again for every one.
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        venv = SubprocVecEnv(makers, start_method=method)  # type: ignore[arg-type]
    else:
        venv = DummyVecEnv(makers)  # type: ignore[arg-type]
    if recipe.group > 1:
        venv = GroupBaseline(venv, recipe.group)
    normalised = VecNormalize(venv, norm_obs=True, norm_reward=False, clip_obs=CLIP, epsilon=EPSILON)
    if recipe.advised:
        normalised.obs_rms = AdviceAsItIs(len(advised_names()), EPSILON)  # type: ignore[assignment]
    return normalised


class GroupBaseline(VecEnvWrapper):
    """Environments of a group play the same traffic at once: the reward of each is less the mean of the others'.

    What the traffic itself brings, by far the most of it, is the same for all of a group and says nothing about what
    was done (input-dependent baselines, Mao et al. 2019). The mean leaves the own reward out, so it biases nothing.
    """

    def __init__(self, venv: VecEnv, group: int) -> None:
        super().__init__(venv)
        self._group = group

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        observations, rewards, dones, infos = self.venv.step_wait()
        rows = rewards.reshape(-1, self._group)
        others = (rows.sum(axis=1, keepdims=True) - rows) / (self._group - 1)
        return observations, (rows - others).reshape(-1), dones, infos


def raw(normalised: VecNormalize) -> VecEnv:
    """The environments below statistics and baseline."""
    venv = normalised.venv
    return venv.venv if isinstance(venv, GroupBaseline) else venv


def masks(venv: VecEnv) -> np.ndarray[Any, np.dtype[np.int8]]:
    """int8 [environments, actions]."""
    return np.stack(venv.env_method("action_masks"))


def outcomes(infos: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the environments whose episode has just ended."""
    return [info["outcome"] for info in infos if "outcome" in info]
