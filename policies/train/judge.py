"""Scores on held-out episodes: the same ones for every policy, at every time, of every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from envs.spaces import NOTHING, encode_action
from policies.base import Change, PolicyState
from policies.card import Score
from policies.train.algorithms import Algorithm
from policies.train.teacher import Teacher
from policies.train.vector import masks, outcomes, raw

Act = Callable[[NDArray[np.float32], VecEnv], NDArray[np.int64]]
"""Actions of all environments out of their raw observations. May ask the environments for more."""
Outcome = dict[str, Any]
Figure = Literal["reward", "goodput_rps", "loss_per_token"]
FIGURES: Final[tuple[Figure, ...]] = ("reward", "goodput_rps", "loss_per_token")
_RESAMPLES: Final = 2000


def judge(normalised: VecNormalize, make_act: Callable[[], Act], episodes: int, first: int = 0) -> list[Outcome]:
    """Play ``episodes`` held-out episodes from number ``first`` on and return their outcomes in this order.

    The environments are left in the middle of nowhere: send them back with ``play`` and reset them.
    """
    venv = raw(normalised)
    number = venv.num_envs
    rounds = -(-episodes // number)
    for index in range(number):
        venv.env_method("play_held_out", first + index, number, indices=[index])
    found: list[Outcome] = []
    vectors = cast("NDArray[np.float32]", venv.reset())
    for _ in range(rounds):
        act = make_act()
        ended: list[Outcome] = []
        while not ended:
            step, _, _, infos = venv.step(act(vectors, venv))
            vectors, ended = cast("NDArray[np.float32]", step), outcomes(infos)
        found += ended
    return found[:episodes]


def learned_act(model: Algorithm, normalised: VecNormalize) -> Act:
    """The network's best action, as the exported policy takes it."""

    def act(vectors: NDArray[np.float32], venv: VecEnv) -> NDArray[np.int64]:
        seen = normalised.normalize_obs(vectors)
        more: dict[str, Any] = {"action_masks": masks(venv)} if model.__class__.__name__ == "MaskablePPO" else {}
        actions, _ = model.predict(cast("NDArray[np.float32]", seen), deterministic=True, **more)
        return actions

    return act


def static_act() -> Act:
    """Leaves everything as it is: static native."""
    return lambda vectors, _: np.full(len(vectors), NOTHING)


def teacher_act(teacher: Teacher, number: int) -> Act:
    """The teacher in each of ``number`` environments, with a state for each."""
    pupils = Pupils(teacher, number)
    return lambda _, venv: np.array([encode_action(change) for change, _ in pupils.advised(venv)])


class Pupils:
    """What a teacher would do in each of several environments, from the beginning of an episode on."""

    def __init__(self, teacher: Teacher, number: int) -> None:
        self._teacher = teacher
        self._states: list[PolicyState | None] = [None] * number

    def advised(self, venv: VecEnv) -> list[tuple[Change | None, NDArray[np.int8]]]:
        """The change, and the mask, of every environment as it is now."""
        found = []
        for index, (observation, mask, targets) in enumerate(venv.env_method("look")):
            policy, state = self._teacher.policy(targets), self._states[index]
            decision, self._states[index] = policy.decide(
                observation, policy.initial_state() if state is None else state
            )
            found.append((decision.change, mask))
        return found


def mean(found: Sequence[Outcome], figure: str = "reward") -> float:
    return float(np.mean([outcome[figure] for outcome in found]))


def loss_per_token(found: Sequence[Outcome]) -> float:
    """Token-weighted over all episodes."""
    return float(sum(outcome["loss"] for outcome in found) / max(1.0, sum(outcome["tokens"] for outcome in found)))


def score(found: Sequence[Outcome], budget: float) -> float:
    """What the best model is chosen by: the mean reward of the service, less 1 for every budget of quality beyond the
    first one.
    """
    return mean(found) - max(0.0, loss_per_token(found) / budget - 1.0)


def scores(policy: str, found: Sequence[Outcome], seed: int = 0) -> list[Score]:
    """Means over episodes with 95 % percentile-bootstrap intervals."""
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(found), size=(_RESAMPLES, len(found)))
    result = []
    for figure in FIGURES:
        values = np.array([outcome[figure] for outcome in found], dtype=np.float64)
        low, high = np.percentile(values[picks].mean(axis=1), [2.5, 97.5])
        result.append(
            Score(
                policy=policy,
                figure=figure,
                mean=float(values.mean()),
                low=float(low),
                high=float(high),
                episodes=len(found),
            )
        )
    return result
