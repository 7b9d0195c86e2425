"""Learning by trying: what each of several actions comes to on copies of the engine, under the same future. numpy only.

Reinforcement has to find out from one noisy episode after another what an action was worth. A simulator can be asked:
the same state, the same arrivals, one action each, and the difference is the action's alone (rollouts with common
random numbers; learning their costs instead of an expert's choices is AggreVaTe's idea, Ross & Bagnell 2014). The
future that the copies see is only the one that comes; a network that learns the mean over many futures does not see it.

Each action is left alone for the horizon. With a continuation by the network itself nothing would ever be worth much,
since what is not done now can be done two seconds later. A network that is advised improves on its teacher instead: by
what an action is worth if the teacher goes on from there (rollouts of a base policy, Bertsekas 2013).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from envs.spaces import NOTHING, legal_action
from policies.network import Mlp, masked_argmax
from policies.train.recipe import Lookahead

NONE: Final = -1
"""Stands where fewer actions were tried than there is room for."""


@dataclass(frozen=True)
class Student:
    """The network as it is, to be asked inside an environment's process. ``masked``: whether it knows masks."""

    network: Mlp
    masked: bool

    def act(self, vector: NDArray[np.float32], mask: NDArray[np.int8]) -> int:
        """What the exported policy would do."""
        values = self.network(vector)
        return masked_argmax(values, mask) if self.masked else legal_action(int(np.argmax(values)), mask)


@dataclass(frozen=True)
class Studied:
    """An episode: ``seen`` float32 [decisions, entries], raw; of those where actions were tried ``vectors`` float32
    [rows, entries], ``actions`` int64 [rows, tried], nothing first and padded with :data:`NONE`, and ``worths`` float64
    [rows, tried] (:meth:`policies.train.env.TrainingEnv.worths`); ``outcome`` as the environment's.
    """

    seen: NDArray[np.float32]
    vectors: NDArray[np.float32]
    actions: NDArray[np.int64]
    worths: NDArray[np.float64]
    outcome: dict[str, Any]


class Studyable(Protocol):
    """What an environment must be able to do for it."""

    def play_apart(self, number: int) -> None: ...

    def reset(self) -> tuple[NDArray[np.float32], dict[str, Any]]: ...

    def step(self, action: int) -> Any: ...

    def action_masks(self) -> NDArray[np.int8]: ...

    def advice(self) -> int: ...

    def worths(self, actions: Sequence[int], plan: Lookahead) -> NDArray[np.float64]: ...


def study(env: Studyable, number: int, student: Student, plan: Lookahead, rng: np.random.Generator) -> Studied:
    """Play episode ``number`` as the student would and try actions on the way."""
    env.play_apart(number)
    vector, _ = env.reset()
    seen, vectors, actions, worths = [], [], [], []
    room = 3 + plan.tries
    tick, ended, outcome = int(rng.integers(plan.every)), False, dict[str, Any]()
    while not ended:
        mask = env.action_masks()
        chosen = student.act(vector, mask)
        seen.append(vector)
        tick += 1
        if tick % plan.every == 0 and (tried := _tried(mask, {chosen, env.advice()}, plan.tries, rng)):
            found = env.worths([NOTHING, *tried], plan)
            vectors.append(vector)
            actions.append(_padded([NOTHING, *tried], room, NONE))
            worths.append(_padded(found, room, 0.0))
        vector, _, terminated, truncated, info = env.step(chosen)
        ended, outcome = terminated or truncated, info.get("outcome", {})
    entries = len(seen[0])
    return Studied(
        np.stack(seen),
        np.array(vectors, dtype=np.float32).reshape(-1, entries),
        np.array(actions, dtype=np.int64).reshape(-1, room),
        np.array(worths, dtype=np.float64).reshape(-1, room),
        outcome,
    )


def _tried(mask: NDArray[np.int8], wanted: set[int], tries: int, rng: np.random.Generator) -> list[int]:
    """The wanted actions, as far as they are any, and others that the mask allows, drawn without preference."""
    first = sorted(wanted - {NOTHING})
    others = np.setdiff1d(np.flatnonzero(mask), [NOTHING, *first])
    drawn = rng.choice(others, size=min(tries, len(others)), replace=False) if len(others) else others
    return [*first, *(int(action) for action in drawn)]


def _padded(values: Sequence[float] | NDArray[Any], room: int, fill: float) -> NDArray[Any]:
    padded = np.full(room, fill)
    padded[: len(values)] = values
    return padded
