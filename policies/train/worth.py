"""The network learns what actions are worth, from what trying them came to: a regression of its outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib import MaskablePPO
from stable_baselines3 import PPO
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize

from policies.advice_input import advised_actions
from policies.card import Normaliser
from policies.network import Mlp
from policies.train.algorithms import network_of
from policies.train.archive import actor_tensors
from policies.train.lookahead import NONE, Student, Studied
from policies.train.recipe import Lookahead, Recipe
from policies.train.vector import CLIP, EPSILON

Learner = MaskablePPO | PPO
_WATCHED: Final = 8  # every so manieth episode is not learnt from and says when to stop


@dataclass(frozen=True)
class Trials:
    """All that was tried: as :class:`policies.train.lookahead.Studied`, of many episodes; ``watched`` bool [rows]: not
    to be learnt from.
    """

    vectors: NDArray[np.float32]
    actions: NDArray[np.int64]
    worths: NDArray[np.float64]
    watched: NDArray[np.bool_]

    @classmethod
    def of(cls, studied: list[Studied]) -> Trials:
        """Episodes in the order in which they were played."""
        rows = [len(one.actions) for one in studied]
        watched = np.repeat([number % _WATCHED == _WATCHED - 1 for number in range(len(studied))], rows)
        vectors, actions, worths = (
            np.concatenate([getattr(one, name) for one in studied]) for name in ("vectors", "actions", "worths")
        )
        return cls(vectors, actions, worths, watched)

    def advantages(self, plan: Lookahead) -> NDArray[np.float32]:
        """In the plan's units, over doing nothing, float32 [rows, tried - 1]."""
        usual = np.zeros(len(self.actions), dtype=np.int64)
        if plan.then == "advice":
            usual = advised_actions(self.vectors)
        worths = self.worths / plan.unit - plan.margin * (self.actions != usual[:, None])
        beyond: NDArray[np.float32] = np.clip(worths[:, 1:] - worths[:, :1], -plan.most, plan.most).astype(np.float32)
        return beyond


def student_of(model: Learner, normalised: VecNormalize, recipe: Recipe) -> Student:
    """The network as numpy runs it."""
    statistics = cast("RunningMeanStd", normalised.obs_rms)
    normaliser = Normaliser(mean=statistics.mean.tolist(), var=statistics.var.tolist(), epsilon=EPSILON, clip=CLIP)
    tensors = actor_tensors(recipe.algo, model.policy.state_dict())
    entries, actions = len(statistics.mean), int(cast("Any", model.action_space).n)
    return Student(Mlp(network_of(recipe, entries, actions), normaliser, tensors), recipe.algo == "maskable-ppo")


def fit(
    model: Learner, normalised: VecNormalize, trials: Trials, plan: Lookahead, rng: np.random.Generator
) -> dict[str, float]:
    """Teach the outputs, that for nothing being the measure of all others. Of all epochs the one that tells
    the worths of the watched episodes best is kept.

    Returns ``rows``; on the watched ones, in units per decision, ``best`` (the best of what was tried, known
    afterwards), ``got`` (the network's choices) and ``explained`` (the share of the variance of worths).
    """
    seen = torch.as_tensor(normalised.normalize_obs(trials.vectors))
    actions = torch.as_tensor(trials.actions[:, 1:])
    wanted = torch.as_tensor(trials.advantages(plan))
    known = actions != NONE
    learnt = np.flatnonzero(~trials.watched)
    watched = torch.as_tensor(np.flatnonzero(trials.watched))
    optimizer = torch.optim.Adam(_actor(model), lr=plan.learning_rate)
    model.policy.set_training_mode(True)
    best = _judged(model, seen, actions, wanted, known, watched)
    kept = {name: value.clone() for name, value in model.policy.state_dict().items()}
    for _ in range(plan.epochs):
        order = rng.permutation(learnt)
        for begin in range(0, len(order), plan.batch_size):
            rows = torch.as_tensor(order[begin : begin + plan.batch_size])
            errors = (_worths(model, seen[rows], actions[rows]) - wanted[rows])[known[rows]]
            loss = errors.square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(_actor(model), 1.0)
            optimizer.step()
        now = _judged(model, seen, actions, wanted, known, watched)
        if now["explained"] >= best["explained"] or not len(watched):
            best, kept = now, {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.policy.load_state_dict(kept)
    return {"rows": float(len(trials.actions)), **best}


def sharpen(model: Learner, by: float) -> None:
    """Multiply the outputs: the same choices, taken with more confidence where actions are drawn."""
    with torch.no_grad():
        for parameter in model.policy.action_net.parameters():
            parameter.mul_(by)


def _actor(model: Learner) -> list[torch.nn.Parameter]:
    policy = model.policy
    return [*policy.mlp_extractor.policy_net.parameters(), *policy.action_net.parameters()]


def _worths(model: Learner, seen: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Of each action over nothing, [rows, tried]; anything for those that are none."""
    policy = model.policy
    features = cast("torch.Tensor", policy.extract_features(seen))
    outputs = policy.action_net(policy.mlp_extractor.forward_actor(features))
    return cast("torch.Tensor", outputs.gather(1, actions.clamp(min=0)) - outputs[:, :1])


def _judged(
    model: Learner,
    seen: torch.Tensor,
    actions: torch.Tensor,
    wanted: torch.Tensor,
    known: torch.Tensor,
    rows: torch.Tensor,
) -> dict[str, float]:
    """What choices among what was tried bring on ``rows``, nothing being worth 0."""
    if not len(rows):
        return {"best": 0.0, "got": 0.0, "explained": 0.0}
    with torch.no_grad():
        found = _worths(model, seen[rows], actions[rows])
    worths, there = wanted[rows], known[rows]
    hopes = found.masked_fill(~there, -torch.inf)
    chosen = hopes.argmax(dim=1, keepdim=True)
    got = torch.where(hopes.gather(1, chosen) > 0, worths.gather(1, chosen), 0.0)
    best = worths.masked_fill(~there, 0.0).max(dim=1).values.clamp(min=0.0)
    errors, spread = (found - worths)[there], worths[there]
    explained = 1.0 - float(errors.square().mean()) / max(float(spread.var(correction=0)), 1e-9)
    return {"best": float(best.mean()), "got": float(got.mean()), "explained": explained}
