"""Environments small enough that learning is a matter of seconds. Picklable: their processes import this file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from engine.tunables import default_values
from envs.features import FEATURES
from envs.signals import Targets
from envs.spaces import Observation, action_space, decode_action, observation_space
from policies.base import Change, Decision, PolicyState
from policies.train.lookahead import Student, Studied, study
from policies.train.recipe import Lookahead, Recipe
from policies.train.teacher import Teacher

UP, DOWN = Change("kv_format", "int4"), Change("kv_format", "native")


class Toy(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Load comes and goes; int4 pays at high load and native at low load. Planned episodes, as the real one's."""

    def __init__(self, recipe: Recipe, stream: int, index: int = 0) -> None:
        self._index, self._seed = index, recipe.seed
        self.observation_space, self.action_space = observation_space(), action_space()
        self._steps, self._home, self._stream, self._next, self._stride = recipe.episode_steps, stream, stream, 0, 1
        self.price = 0.0

    def play(self, number: int) -> None:
        self._stream, self._next, self._stride = self._home, number, 1

    def play_apart(self, number: int) -> None:
        self._stream, self._next, self._stride = 2 * 10**6 + self._index, number, 1

    def play_held_out(self, number: int, stride: int) -> None:
        self._stream, self._next, self._stride = 10**6, number, stride

    def set_price(self, price: float) -> None:
        self.price = price

    def reset(self, **_: Any) -> tuple[NDArray[np.float32], dict[str, Any]]:
        self._rng = np.random.default_rng([self._stream, self._next])
        self._next += self._stride
        self._at, self._sum, self._changes = 0, 0.0, 0
        self._values = default_values()
        self._load = float(self._rng.integers(2))
        return self._look(), {}

    def _look(self) -> NDArray[np.float32]:
        values: dict[str, float | None] = dict.fromkeys((feature.name for feature in FEATURES), 0.0)
        values["load"] = self._load
        self.observation = Observation(10**9 * self._at, values, dict(self._values), observed_s=99.0, instance="a")
        return self.observation.vector()

    def action_masks(self) -> NDArray[np.int8]:
        mask = np.zeros(int(self.action_space.n), dtype=np.int8)
        mask[0] = 1
        for change in (UP, DOWN):
            if self._values["kv_format"] != change.value:
                mask[_ACTIONS[change]] = 1
        return mask

    def advice(self) -> int:
        return 0

    def look(self) -> tuple[Observation, NDArray[np.int8], Targets]:
        return self.observation, self.action_masks(), Targets()

    def study(self, number: int, student: Student, plan: Lookahead) -> Studied:
        return study(self, number, student, plan, np.random.default_rng([self._seed, self._index, number]))

    def worths(self, actions: Sequence[int], plan: Lookahead) -> NDArray[np.float64]:  # noqa: ARG002
        """Whether the format fits the load as it is now, whatever the plan."""
        formats = [self._values["kv_format"] if (c := decode_action(a)) is None else c.value for a in actions]
        return np.array([float((value == "int4") == (self._load > 0.5)) for value in formats])

    def step(self, action: np.int64 | int) -> Any:
        change = decode_action(int(action)) if self.action_masks()[int(action)] else None
        if change is not None:
            self._values[change.knob] = change.value
            self._changes += 1
        right = (self._values["kv_format"] == "int4") == (self._load > 0.5)
        self._sum += float(right)
        self._at += 1
        if self._rng.random() < 0.2:
            self._load = 1.0 - self._load
        info: dict[str, Any] = {}
        if self._at == self._steps:
            reward = self._sum / self._steps
            info["outcome"] = {
                "source": "toy", "default_knobs": True, "reward": reward, "goodput_rps": reward, "attainment": reward,
                "tokens": 100.0, "loss": 0.0, "loss_per_token": 0.0, "changes": float(self._changes),
            }  # fmt: skip
        return self._look(), float(right), False, self._at == self._steps, info


_ACTIONS = {change: index for index in range(1, int(action_space().n)) if (change := decode_action(index)) is not None}


class Right:
    """Knows what pays."""

    name = "right"

    def initial_state(self) -> PolicyState:
        return {}

    def decide(self, observation: Observation, state: PolicyState) -> tuple[Decision, PolicyState]:
        wanted = UP if (observation.values["load"] or 0.0) > 0.5 else DOWN
        change = wanted if observation.tunables["kv_format"] != wanted.value else None
        return Decision(change, "right", "because the load is what it is"), state


def right() -> Teacher:
    """It, whatever the targets."""
    return Teacher(Right.name, lambda _: Right())


def _toy(recipe: Recipe, index: int) -> Toy:
    return Toy(recipe, index // recipe.group, index)


def toys(recipe: Recipe) -> Any:
    return partial(_toy, recipe)


class Ticks:
    """A clock that moves on by ``step_s`` at every look."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.at_ns, self.step_ns = 0, round(1e9 * step_s)

    def now_ns(self) -> int:
        self.at_ns += self.step_ns
        return self.at_ns

    def wall_s(self) -> float:
        return 0.0
