"""Does a policy hold still where the load does? Hours at many levels, behind the guard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from engine.tunables import default_values
from envs.simulated import SimulatedEngine
from policies.evaluation.cells import reversals
from policies.executors import Executor, in_order
from policies.named import World, contender
from policies.play import play
from policies.steady import Bench

SETTLE_S: Final = 300.0
MOST_CHANGES: Final = 1


@dataclass(frozen=True)
class Held:
    """One level. ``changes`` and ``reversals``: after the first five minutes. ``knobs``: how often each moved then."""

    level: float
    hours: float
    changes: int
    reversals: int
    attainment: float | None
    knobs: dict[str, int]

    @property
    def is_still(self) -> bool:
        return self.changes <= MOST_CHANGES and self.reversals == 0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_still": self.is_still}


def levels(number: int, highest: float = 2.0) -> list[float]:
    """Evenly spaced shares of what native serves, up to ``highest``."""
    return [round(highest * (place + 1) / number, 6) for place in range(number)]


def hold(bench: Bench, name: str, hours: float, interval_s: float, seed: int, level: float) -> Held:
    """Play a policy at one level. Raises ValueError for a name that stands for none."""
    duration_s = 3600.0 * hours
    workload = bench.load.workload([(duration_s, level * bench.capacity_rps)])
    who = contender(name, World(bench.profile, bench.targets))
    env = SimulatedEngine(
        bench.profile, workload, rate_scale=1.0, pool_bytes=bench.pool_bytes, interval_s=interval_s, warm_up_s=0.0,
        episode_s=duration_s, values=who.values, targets=bench.targets,
    )  # fmt: skip
    played = play(env, who, duration_s=duration_s, interval_s=interval_s, seed=seed)
    late = [move for move in played.moves if move.at_s > SETTLE_S]
    knobs: dict[str, int] = {}
    for move in late:
        knob = move.change.partition("=")[0]
        knobs[knob] = knobs.get(knob, 0) + 1
    start = {**default_values(), **who.values}
    early = [move for move in played.moves if move.at_s <= SETTLE_S]
    back = reversals(played.moves, start) - reversals(early, start)
    return Held(level, hours, len(late), back, played.attainment, knobs)


def constant_load(
    bench: Bench,
    name: str,
    executor: Executor,
    *,
    shares: Sequence[float],
    hours: float = 24.0,
    interval_s: float = 2.0,
    seed: int = 0,
    done: Callable[[], None] = lambda: None,
) -> list[Held]:
    """Every level, in order of ``shares``; ``done`` is called after each."""
    return in_order(executor, partial(hold, bench, name, hours, interval_s, seed), list(shares), done)
