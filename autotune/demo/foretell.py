"""What the simulator says of the replays that were just made: the same traffic, pool, targets and policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from autotune.demo.sides import Side
from autotune.demo.stack import DWELL_S, TICK_S, WINDOW_S
from autotune.schema import PolicySection
from engine.tunables import CostClass
from envs.profile import Profile
from envs.signals import Targets
from envs.simulated import SimulatedEngine
from envs.workload.trace import Trace
from policies.guard import GuardConfig
from policies.guards import guard_for
from policies.named import World, contender
from policies.play import play

QUALITY_BUDGET: Final = PolicySection().quality_budget  # the daemon's, when nothing is said
_DRAIN_S = 60.0  # what came last wants to be served, too


@dataclass(frozen=True)
class Foretold:
    """Shares of the offered requests inside all targets, one per trace, and the policy's decisions."""

    inside: tuple[float, ...]
    changes: int


def foretell(
    sides: Sequence[Side],
    traces: Sequence[Trace],
    profile: Profile,
    *,
    pool_bytes: int,
    targets: Targets,
    settle_s: float,
    progress: Callable[[str], None],
) -> dict[str, Foretold]:
    """By side's name. ``settle_s``: how long a daemon looks on before the load begins."""
    found: dict[str, Foretold] = {}
    for one in sides:
        inside, changes = [], 0
        for trace in traces:
            later = replace(trace, requests=tuple(replace(r, arrival_s=r.arrival_s + settle_s) for r in trace.requests))
            who = contender(one.name, World(profile, targets))
            seconds = later.duration_s + _DRAIN_S
            env = SimulatedEngine(
                profile, later, rate_scale=1.0, pool_bytes=pool_bytes, interval_s=TICK_S, warm_up_s=0.0,
                episode_s=seconds, repeats=False, values=who.values, targets=targets, short_s=WINDOW_S,
            )  # fmt: skip
            dwell_s = {CostClass(name): value for name, value in DWELL_S.items()}
            budget = QUALITY_BUDGET if who.budgeted else None
            guard = guard_for(profile, budget, GuardConfig(window_s=WINDOW_S, dwell_s=dwell_s))
            played = play(env, who, duration_s=seconds, interval_s=TICK_S, seed=0, guard=guard)
            inside.append(played.good / played.offered if played.offered else 0.0)
            changes += len(played.moves)
        found[one.name] = Foretold(tuple(inside), changes)
        progress(f"  simulated, {one.label}: {sum(inside) / len(inside):.0%} inside the targets, {changes} changes")
    return found
