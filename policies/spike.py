"""Does a policy get back inside the targets when the load is suddenly three times as high?

A spike stays, so that nothing gets better by itself. What can be reached at all is what a greedy policy with foresight
reaches (:mod:`policies.evaluation.oracle`): only where it comes back is a policy asked to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

from envs.simulated import SimulatedEngine
from policies.evaluation.oracle import OraclePlan, play_oracle
from policies.executors import Executor, in_order
from policies.named import World, contender
from policies.play import Played, Row, play
from policies.steady import Bench
from policies.usual_budget import USUAL_BUDGET

FACTOR: Final = 3.0
WITHIN_S: Final = 10.0
CALM_S: Final = 60.0
SPIKE_S: Final = 60.0
BASES: Final = (0.25, 0.3, 0.35, 0.4, 0.5, 0.6)  # of what native serves, before the spike
_PLAN: Final = OraclePlan(every_s=4.0, horizon_s=20.0)


@dataclass(frozen=True)
class Spike:
    """One base load. ``policy_s``: seconds from the spike to the last interval outside the targets, None when the last
    quarter of the spike has one. ``oracle_s``: the same with foresight, which is tried only where the policy is late
    (``asked``).
    """

    base: float
    policy_s: float | None
    changes: int
    oracle_s: float | None = None
    asked: bool = False

    @property
    def is_met(self) -> bool:
        """Back inside within ten seconds wherever the oracle is."""
        return _in_time(self.policy_s) or (self.asked and not _in_time(self.oracle_s))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_met": self.is_met}


def spike(bench: Bench, name: str, interval_s: float, seed: int, quality_budget: float, base: float) -> Spike:
    """Play a policy, and foresight, through one spike. Raises ValueError for a name that stands for none."""
    base_rps = base * bench.capacity_rps
    workload = bench.load.workload([(CALM_S, base_rps), (SPIKE_S, FACTOR * base_rps)])
    who = contender(name, World(bench.profile, bench.targets))
    duration_s = CALM_S + SPIKE_S

    def engine() -> SimulatedEngine:
        return SimulatedEngine(
            bench.profile, workload, rate_scale=1.0, pool_bytes=bench.pool_bytes, interval_s=interval_s, warm_up_s=0.0,
            episode_s=duration_s, values=who.values, targets=bench.targets,
        )  # fmt: skip

    played = play(engine(), who, duration_s=duration_s, interval_s=interval_s, seed=seed)
    changes = len([move for move in played.moves if move.at_s > CALM_S])
    late = Spike(base, back_inside(bench, interval_s, played), changes)
    if late.is_met:
        return late
    seen = play_oracle(
        engine(), _PLAN, duration_s=duration_s, interval_s=interval_s, seed=seed, quality_budget=quality_budget
    )
    return replace(late, oracle_s=back_inside(bench, interval_s, seen), asked=True)


def back_inside(bench: Bench, interval_s: float, played: Played) -> float | None:
    """Seconds from the spike to the end of the last interval outside the targets; None when one is in its last
    quarter.
    """
    outside = [
        row.at_s - CALM_S
        for row in played.rows
        if row.at_s > CALM_S + 1e-9 and not _is_inside(row, bench.targets.ttft_s, bench.targets.tbt_s)
    ]
    last = max(outside, default=0.0)
    return None if last > 0.75 * SPIKE_S + interval_s / 2 else last


def _in_time(after_s: float | None) -> bool:
    return after_s is not None and after_s <= WITHIN_S


def _is_inside(row: Row, ttft_s: float, tbt_s: float) -> bool:
    if row.ttft_tail_s is None and row.waiting:
        return False  # nobody got a first token, although somebody waits for one
    return (row.ttft_tail_s or 0.0) <= ttft_s and (row.tbt_tail_s or 0.0) <= tbt_s


def spikes(
    bench: Bench,
    name: str,
    executor: Executor,
    *,
    bases: Sequence[float] = BASES,
    interval_s: float = 2.0,
    seed: int = 0,
    quality_budget: float = USUAL_BUDGET,
    done: Callable[[], None] = lambda: None,
) -> list[Spike]:
    """Every base load, in order; ``done`` is called after each."""
    return in_order(executor, partial(spike, bench, name, interval_s, seed, quality_budget), list(bases), done)
