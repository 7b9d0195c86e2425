"""A greedy policy that sees the future: it tries every change on a copy of the engine and keeps what turned out best.

No policy can know so much. What even the oracle does not reach, the knobs do not give, apart from what several changes
in a row would: it looks ahead for one change at a time, so it is no upper bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from engine.tunables import TUNABLES
from envs.simulated import SimulatedEngine
from envs.spaces import NOTHING, all_changes, encode_action
from policies.play import Chooser, Contender, Played, play

ORACLE: Final = "oracle"
_OVER_BUDGET: Final = 50.0  # good requests that one token's worth of loss beyond the budget is counted as


@dataclass(frozen=True)
class OraclePlan:
    """``every_s``: between two decisions. ``horizon_s``: how far it looks. ``knobs``: what it tries."""

    every_s: float = 6.0
    horizon_s: float = 20.0
    knobs: tuple[str, ...] = ("kv_format", "eviction")


def play_oracle(
    env: SimulatedEngine,
    plan: OraclePlan,
    *,
    duration_s: float,
    interval_s: float,
    seed: int,
    quality_budget: float,
    each: Callable[[int, dict[str, Any]], bool] | None = None,
) -> Played:
    """As :func:`policies.play.play`, with changes chosen by foresight. No guard: nothing it does can be a surprise."""
    chooser = _Foresight(env, plan, interval_s, quality_budget)
    return play(
        env, Contender(ORACLE), duration_s=duration_s, interval_s=interval_s, seed=seed, each=each, chooser=chooser
    )


class _Foresight(Chooser):
    def __init__(self, env: SimulatedEngine, plan: OraclePlan, interval_s: float, quality_budget: float) -> None:
        self._env, self._budget = env, quality_budget
        self._every = max(1, round(plan.every_s / interval_s))
        self._horizon = max(1, round(plan.horizon_s / interval_s))
        changes = [change for change in all_changes() if change.knob in plan.knobs and change.knob in TUNABLES]
        self._actions = [encode_action(change) for change in changes]
        self._tokens, self._charge = 0, 0.0

    def choose(self, tick: int, info: dict[str, Any]) -> int:
        figures = self._env.last_figures
        self._tokens += figures.tokens
        self._charge += figures.quality_charge
        if tick % self._every or self._env.simulator.is_idle:
            return NOTHING
        mask = info["action_mask"]
        here = self._env.snapshot()
        best, best_worth = NOTHING, self._worth(NOTHING)
        for action in self._actions:
            self._env.restore(here)
            if mask[action] and (worth := self._worth(action)) > best_worth + 1e-9:
                best, best_worth = action, worth
        self._env.restore(here)
        return best

    def _worth(self, action: int) -> float:
        """Good requests less bad ones over the horizon; tokens generated break ties, loss beyond the budget counts."""
        good, tokens, charge, figures = 0.0, self._tokens, self._charge, self._env.last_figures
        for step in range(self._horizon):
            self._env.step(action if step == 0 else NOTHING)
            figures = self._env.last_figures
            good += figures.good - 0.5 * figures.violations
            tokens += figures.tokens
            charge += figures.quality_charge
        generated = tokens - self._tokens
        waiting = self._env.simulator.stats().gauges.waiting
        # Precision that is lost stays lost: what the last interval charged goes on for as long again.
        charge += self._horizon * figures.quality_charge
        tokens += self._horizon * figures.tokens
        over = max(0.0, charge - self._budget * tokens)
        return good + 1e-4 * generated - 0.2 * waiting - _OVER_BUDGET * over
