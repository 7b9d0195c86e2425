"""What rules would do over the load: held at rising and then at falling levels, in one go, so that hysteresis shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.tunables import TunableValue
from envs.simulated import SimulatedEngine
from envs.spaces import Observation
from policies.base import Decision, Policy, PolicyState
from policies.play import Contender, play
from policies.rules import RuleSet
from policies.steady import Bench
from policies.threshold import ThresholdPolicy


@dataclass(frozen=True)
class Level:
    """The end of one level. ``load``: of what native serves. ``active``: rules in force. ``settings``: knobs that rules
    move. Shares, seconds; None where unknown. ``changes``: made while the level lasted.
    """

    direction: str
    load: float
    active: tuple[str, ...]
    settings: dict[str, TunableValue]
    kv_usage: float | None
    kv_demand: float | None
    running: int
    waiting: int
    ttft_tail_s: float | None
    tbt_tail_s: float | None
    changes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def sweep(
    bench: Bench,
    rules: RuleSet,
    loads: Sequence[float],
    *,
    hold_s: float = 120.0,
    interval_s: float = 1.0,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> list[Level]:
    """Up through ``loads`` (in increasing order) and down again; the highest is held once. Raises ValueError."""
    if not loads or list(loads) != sorted(set(loads)) or min(loads) <= 0 or not hold_s > interval_s > 0:
        raise ValueError("loads must be > 0 and increase, and be held for longer than one interval")
    path = [("up", load) for load in loads] + [("down", load) for load in reversed(loads[:-1])]
    duration_s = hold_s * len(path)
    workload = bench.load.workload([(hold_s, load * bench.capacity_rps) for _, load in path])
    env = SimulatedEngine(
        bench.profile, workload, rate_scale=1.0, pool_bytes=bench.pool_bytes, interval_s=interval_s, warm_up_s=0.0,
        episode_s=duration_s, targets=bench.targets,
    )  # fmt: skip
    watched = _Watched(ThresholdPolicy(rules))
    knobs = dict.fromkeys([*(k for rule in rules.rules for k, _ in rule.sets), *(k for k, _ in rules.otherwise)])
    per_level = max(1, round(hold_s / interval_s))
    found: list[Level] = []
    moves = 0

    def each(tick: int, info: dict[str, Any]) -> bool:
        nonlocal moves
        moves += info["applied"] is not None
        if (tick + 1) % per_level == 0 and len(found) < len(path):
            found.append(_level(path[len(found)], info, watched.active, tuple(knobs), moves))
            moves = 0
        return len(found) == len(path)

    play(
        env, Contender(rules.name, watched), duration_s=duration_s, interval_s=interval_s, seed=seed, each=each,
        progress=progress,
    )  # fmt: skip
    return found


def differences(levels: Sequence[Level]) -> list[tuple[float, dict[str, tuple[TunableValue, TunableValue]]]]:
    """Loads at which the way up and the way down hold different settings: by knob, (up, down)."""
    up = {level.load: level for level in levels if level.direction == "up"}
    found = []
    for level in levels:
        if level.direction == "down":
            there = up[level.load].settings
            differ = {knob: (there[knob], value) for knob, value in level.settings.items() if there[knob] != value}
            if differ:
                found.append((level.load, differ))
    return sorted(found, key=lambda one: one[0])


class _Watched(Policy):
    """The same policy; says which rules are active."""

    def __init__(self, policy: ThresholdPolicy) -> None:
        self._policy = policy
        self.active: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self._policy.name

    def initial_state(self) -> PolicyState:
        return self._policy.initial_state()

    def decide(self, observation: Observation, state: PolicyState) -> tuple[Decision, PolicyState]:
        decision, after = self._policy.decide(observation, state)
        self.active = tuple(name for name, latch in after["rules"].items() if latch["active"])
        return decision, after


def _level(
    step: tuple[str, float], info: dict[str, Any], active: tuple[str, ...], knobs: tuple[str, ...], changes: int
) -> Level:
    observation: Observation = info["observation"]
    values, gauges = observation.values, info["stats"].gauges
    settings = {knob: observation.tunables[knob] for knob in knobs if knob in observation.tunables}
    return Level(
        *step, active, settings, values["kv_usage"], values["kv_demand"], gauges.running, gauges.waiting,
        values["ttft_tail_s"], values["tbt_tail_s"], changes,
    )  # fmt: skip
