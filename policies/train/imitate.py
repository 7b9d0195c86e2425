"""A warm start: the network first learns to do what a teacher would have done on the same observations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib import MaskablePPO
from stable_baselines3 import DQN
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize
from torch.nn import functional

from envs.spaces import NOTHING, encode_action, legal_action
from policies.train.algorithms import Algorithm
from policies.train.judge import Pupils, learned_act
from policies.train.recipe import Recipe, WarmStart
from policies.train.teacher import Teacher
from policies.train.vector import raw

_BATCH: Final = 256
_FULL_MARGIN: Final = 0.3  # of Q values: how far the teacher's action should lead


@dataclass(frozen=True)
class Lessons:
    """What was seen and what the teacher would have done. ``returns``: discounted, in the reward of training."""

    vectors: NDArray[np.float32]  # [rows, entries], raw
    masks: NDArray[np.int8]  # [rows, actions]
    labels: NDArray[np.int64]  # [rows]
    returns: NDArray[np.float32]  # [rows]


def warm_start(
    model: Algorithm,
    normalised: VecNormalize,
    recipe: Recipe,
    teacher: Teacher,
    see: Callable[[NDArray[np.float32]], None],
) -> dict[str, float]:
    """Teach ``model`` on episodes that training does not use; the statistics of ``normalised`` begin with them, too.

    ``see`` gets every raw observation. Returns how often it agrees with the teacher in the end, over all and over those
    rows in which the teacher changes something. The environments are left in the middle of nowhere.
    """
    plan = recipe.warm_start
    assert plan is not None  # noqa: S101  # the caller's business
    rng = np.random.default_rng([recipe.seed, 1])
    lessons: list[Lessons] = []
    for number in range(plan.rounds):
        for episode in range(plan.episodes):
            played = number * plan.episodes + episode
            lessons.append(_lesson(model, normalised, teacher, played, recipe, student_acts=number > 0))
            see(lessons[-1].vectors)
            cast("RunningMeanStd", normalised.obs_rms).update(lessons[-1].vectors)
        _fit(model, normalised, _joined(lessons), plan, rng)
    return _agreement(model, normalised, _joined(lessons))


def _lesson(
    model: Algorithm, normalised: VecNormalize, teacher: Teacher, number: int, recipe: Recipe, *, student_acts: bool
) -> Lessons:
    venv = raw(normalised)
    venv.env_method("play_apart", number)
    pupils = Pupils(teacher, venv.num_envs)
    student = learned_act(model, normalised)
    vectors = cast("NDArray[np.float32]", venv.reset())
    rows: list[tuple[NDArray[Any], ...]] = []
    over = False
    while not over:
        advised = pupils.advised(venv)
        wanted = np.array([legal_action(encode_action(change), mask) for change, mask in advised], dtype=np.int64)
        step, rewards, dones, _ = venv.step(student(vectors, venv) if student_acts else wanted)
        rows.append((vectors, np.stack([mask for _, mask in advised]), wanted, rewards))
        vectors, over = cast("NDArray[np.float32]", step), bool(dones.any())
    columns = [np.stack(column) for column in zip(*rows, strict=True)]
    gamma = recipe.dqn.gamma if recipe.algo == "dqn" else recipe.ppo.gamma
    returns = _returns(columns[3].astype(np.float64), gamma, recipe.group)
    flat = [column.reshape(-1, *column.shape[2:]) for column in (*columns[:3], returns.astype(np.float32))]
    return Lessons(*flat)


def _returns(rewards: NDArray[np.float64], gamma: float, group: int) -> NDArray[np.float64]:
    """[steps, environments]. After the end it is taken to go on as it was on average; with groups, as the rest does."""
    if group > 1:  # all do alike here, so nobody is ahead of the others
        return np.zeros_like(rewards)
    value = rewards.mean(axis=0) / max(1 - gamma, 1e-3)
    result = np.empty_like(rewards)
    for step in reversed(range(len(rewards))):
        value = result[step] = rewards[step] + gamma * value
    return result


def _joined(lessons: list[Lessons]) -> Lessons:
    names = ("vectors", "masks", "labels", "returns")
    return Lessons(*(np.concatenate([getattr(lesson, name) for lesson in lessons]) for name in names))


def _fit(
    model: Algorithm, normalised: VecNormalize, lessons: Lessons, plan: WarmStart, rng: np.random.Generator
) -> None:
    seen = torch.as_tensor(normalised.normalize_obs(lessons.vectors))
    labels, returns = torch.as_tensor(lessons.labels), torch.as_tensor(lessons.returns)
    weights = torch.where(labels == NOTHING, 1.0, plan.weight)
    model.policy.set_training_mode(True)
    for _ in range(plan.epochs):
        order = rng.permutation(len(labels))
        for begin in range(0, len(order), _BATCH):
            rows = torch.as_tensor(order[begin : begin + _BATCH])
            loss = _loss(model, seen[rows], lessons.masks[rows.numpy()], labels[rows], weights[rows], returns[rows])
            model.policy.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.policy.parameters(), 0.5)
            model.policy.optimizer.step()
    if isinstance(model, DQN):
        model.q_net_target.load_state_dict(model.q_net.state_dict())


def _loss(
    model: Algorithm,
    seen: torch.Tensor,
    allowed: NDArray[np.int8],
    labels: torch.Tensor,
    weights: torch.Tensor,
    returns: torch.Tensor,
) -> torch.Tensor:
    if isinstance(model, DQN):
        # Large-margin imitation (Hester et al. 2018): every other action is worth at least a margin less.
        values = model.q_net(seen)
        margins = torch.full_like(values, _FULL_MARGIN).scatter(1, labels[:, None], 0.0)
        lead = (values + margins).max(dim=1).values - values.gather(1, labels[:, None])[:, 0]
        worth = functional.smooth_l1_loss(values.gather(1, labels[:, None])[:, 0], returns)
        return cast("torch.Tensor", (weights * lead).mean() + worth)
    if isinstance(model, MaskablePPO):
        values, log_probability, _ = model.policy.evaluate_actions(seen, labels, action_masks=torch.as_tensor(allowed))
    else:
        values, log_probability, _ = model.policy.evaluate_actions(seen, labels)
    return -(weights * log_probability).mean() + 0.5 * functional.mse_loss(values.flatten(), returns)


def _agreement(model: Algorithm, normalised: VecNormalize, lessons: Lessons) -> dict[str, float]:
    seen = normalised.normalize_obs(lessons.vectors)
    more: dict[str, Any] = {"action_masks": lessons.masks} if isinstance(model, MaskablePPO) else {}
    actions, _ = model.predict(cast("NDArray[np.float32]", seen), deterministic=True, **more)
    same, changing = actions == lessons.labels, lessons.labels != NOTHING
    return {
        "rows": float(len(same)),
        "agrees": float(same.mean()),
        "changes": float(changing.mean()),
        "agrees_on_changes": float(same[changing].mean()) if changing.any() else 1.0,
    }
