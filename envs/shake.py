"""Random legal actions on the simulated environment, for as long as wanted: nothing raises, every figure is finite, and
the engine's books agree. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from envs.randomise import Randomisation
from envs.simulated import SimulatedEngine

WORKLOADS: Final = ("chat-bursty", "reasoning-bursty", "agent-shared-prefix", "chat-turns", "flash-crowd")
EPISODE_STEPS: Final = 1000
_AUDIT_STEPS: Final = 100  # between two audits of the books
_INTERVAL_S: Final = 0.05
_HOST_SHARE: Final = 2  # host pool over the pool on the device, in every other episode


@dataclass
class Shaken:
    """What was done: control intervals, actions that were applied, requests that ended, audits of the books."""

    steps: int = 0
    episodes: int = 0
    changes: int = 0
    requests: int = 0
    preemptions: int = 0
    host_bytes: int = 0
    audits: int = 0

    def add(self, other: Shaken) -> None:
        """Put another one's figures on top."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class ShakeError(AssertionError):
    """Something broke; says in which episode, so that it can be repeated."""


def pieces(steps: int, seed: int) -> Iterator[tuple[int, int]]:
    """(seed, steps) of episodes that make up so many steps."""
    for number in range(-(-steps // EPISODE_STEPS)):
        yield seed + number, min(EPISODE_STEPS, steps - number * EPISODE_STEPS)


def shake(
    seed: int,
    steps: int,
    *,
    workload: str | None = None,
    interval_s: float = _INTERVAL_S,
    tell: Callable[[Shaken], None] | None = None,
    **changes: Any,
) -> Shaken:
    """One episode of random legal actions. ``seed`` chooses all: world, workload, host tier or none, actions.

    ``interval_s``: short, since the number of steps counts, and not how much traffic lies between them. ``changes``:
    further arguments of the environment. Raises ShakeError for a figure that is not finite, or books that disagree.
    """
    name, done = workload or WORKLOADS[seed % len(WORKLOADS)], Shaken(episodes=1)
    env = SimulatedEngine(workload=name, **_arguments(seed, interval_s, changes))
    rng = np.random.default_rng(seed)
    _, info = env.reset(seed=seed)
    try:
        for _ in range(steps):
            action = int(rng.choice(np.flatnonzero(info["action_mask"])))
            vector, reward, _, _, info = env.step(action)
            done.steps += 1
            done.changes += info["applied"] is not None
            done.requests += info["true"]["completed"] + env.last_figures.violations
            _check(env, vector, float(reward), info)
            if done.steps % _AUDIT_STEPS == 0 or done.steps == steps:
                env.simulator.cache.check_integrity()
                done.audits += 1
    except Exception as error:
        raise ShakeError(f"seed {seed}, {name}, step {done.steps}: {type(error).__name__}: {error}") from error
    counters = env.simulator.stats().counters
    done.preemptions, done.host_bytes = counters.preemptions, counters.host_out_bytes + counters.host_in_bytes
    if tell is not None:
        tell(done)
    return done


def _arguments(seed: int, interval_s: float, changes: dict[str, Any]) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "interval_s": interval_s,
        "warm_up_s": 2.0,
        "episode_s": 2.0 + EPISODE_STEPS * interval_s,
        "randomise": Randomisation.usual(),
        "rate_scale": 0.5,
        "pool_bytes": 1 << 30,  # a small one: full most of the time
        "options": {"max_waiting": 32, "patience_s": 20.0},
    }
    if seed % 2:
        usual["host_pool_bytes"] = _HOST_SHARE * usual["pool_bytes"]
    return {**usual, **changes}


def _check(env: SimulatedEngine, vector: Any, reward: float, info: dict[str, Any]) -> None:
    if not (np.isfinite(vector).all() and env.observation_space.contains(vector)):
        raise ValueError("an observation outside its box")
    figures = [reward, *(value for value in info["true"].values() if value is not None)]
    if not all(math.isfinite(value) for value in figures):
        raise ValueError(f"a figure that is not finite: {info['true']}, reward {reward}")
