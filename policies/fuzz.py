"""Does anything get through that must not? Random policies and broken telemetry, behind the guard.

Telemetry is broken where it comes in, in the engine's readings: missing, stale, NaN, infinite, negative, text, another
instance, lost. Proposals are anything at all. What is counted must all be 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from engine.stats import EngineStats
from engine.tunables import TUNABLES
from envs.live import LiveEngine
from envs.port import ApplyResult, ApplyStatus, Change
from envs.profile import Profile
from envs.reward import Charge
from envs.sim_port import SimPort
from envs.simulated import SimulatedEngine
from envs.spaces import NOTHING, encode_action
from envs.virtual_clock import VirtualClock
from policies.base import Decision, Policy, PolicyState
from policies.guard import Guard, GuardContext, native_fits
from policies.guards import guard_for
from policies.usual_budget import USUAL_BUDGET

_JUNK: Final[tuple[Any, ...]] = (
    float("nan"),
    float("inf"),
    -float("inf"),
    -1,
    -1e308,
    None,
    "x",
    10**400,
    True,
    [],
    {},
)
_PARTS: Final = ("gauges", "counters")
_READINGS: Final = 30
_TICK_NS: Final = 2 * 10**9
Done = Callable[[int], None] | None


@dataclass
class Fuzzed:
    """``outside``: actions that no knob's declaration allows. ``failed``: requests that the engine could not keep, the
    pool being exhausted. ``preempting``: actions after which requests were preempted, where leaving all as it was
    preempts none.
    """

    ticks: int = 0
    actions: int = 0
    outside: int = 0
    exceptions: int = 0
    failed: int = 0
    preempting: int = 0
    first_problem: str = ""

    @property
    def is_clean(self) -> bool:
        return not (self.outside or self.exceptions or self.failed or self.preempting)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_clean": self.is_clean}

    def note(self, problem: str) -> None:
        """The first one is kept."""
        self.first_problem = self.first_problem or problem


class RandomPolicy(Policy):
    """Proposes anything: declared changes, values that no knob has, knobs that nobody knows."""

    name = "random"

    def __init__(self, rng: random.Random, wild: float = 0.2) -> None:
        self._rng, self._wild = rng, wild

    def initial_state(self) -> PolicyState:
        return {}

    def decide(self, observation: object, state: PolicyState) -> tuple[Decision, PolicyState]:
        del observation
        rng = self._rng
        knob = rng.choice(list(TUNABLES))
        value: Any = rng.choice(TUNABLES[knob].values)
        if rng.random() < self._wild:
            knob = rng.choice([knob, "no_such_knob", ""])
            value = rng.choice([*_JUNK, 0, 3, 7.5, 10**9, "int3"])
        return Decision(None if rng.random() < 0.3 else Change(knob, value), "random", "at random"), state


def broken(stats: EngineStats, rng: random.Random) -> EngineStats | None:
    """A reading as a sick engine or network gives it; the original is left as it is."""
    if rng.random() < 0.05:
        return None
    changed = stats
    for part in _PARTS:
        values = getattr(stats, part)
        fields = [name for name in vars(values) if rng.random() < 0.15]
        copy = replace(values)
        for name in fields:
            setattr(copy, name, rng.choice(_JUNK))
        changed = replace(changed, **{part: copy})
    if rng.random() < 0.1:
        changed = replace(changed, effective={k: v for k, v in stats.effective.items() if rng.random() < 0.7})
    if rng.random() < 0.1:
        changed = replace(changed, effective={**changed.effective, rng.choice(list(TUNABLES)): rng.choice(_JUNK)})
    if rng.random() < 0.03:
        changed = replace(changed, instance="another")
    if rng.random() < 0.05:
        changed = replace(changed, stamp_ns=rng.choice([0, -1, stats.stamp_ns - 10**10]))
    return changed


class FuzzPort:
    """Breaks readings on their way, gives stale ones, and checks what is written before it is."""

    def __init__(
        self,
        read: Callable[[], EngineStats],
        write: Callable[[Change], ApplyResult],
        rng: random.Random,
        result: Fuzzed,
    ) -> None:
        self._read, self._write, self._rng, self._result = read, write, rng, result
        self._last: EngineStats | None = None

    def read(self) -> EngineStats | None:
        if self._rng.random() < 0.1:
            return self._last  # stale
        stats = self._read()
        self._last = broken(stats, self._rng) if self._rng.random() < 0.7 else stats
        return self._last

    def apply(self, change: Change) -> ApplyResult:
        self._result.actions += 1
        knob = TUNABLES.get(change.knob)
        if knob is None or change.value not in knob.values or isinstance(change.value, bool):
            self._result.outside += 1
            self._result.note(f"outside its bounds: {change}")
        return self._write(change)


def fuzz_decisions(policy: Policy, ticks: int, seed: int, profile: Profile, tick_done: Done = None) -> Fuzzed:
    """A policy, the guard and the live environment over broken readings of an engine that was busy once."""
    rng, result, env = random.Random(seed), Fuzzed(), _engine(profile, seed, _READINGS)
    readings = []
    for _ in range(_READINGS):
        env.step(NOTHING)
        readings.append(env.simulator.stats())
    clock = VirtualClock()
    knobs = dict(readings[-1].effective)

    def read() -> EngineStats:
        clock.advance_ns(_TICK_NS)
        return replace(rng.choice(readings), stamp_ns=clock.now_ns(), effective=dict(knobs))

    def write(change: Change) -> ApplyResult:
        knobs[change.knob] = change.value
        return ApplyResult(ApplyStatus.APPLIED, "", change)

    live = LiveEngine(FuzzPort(read, write, rng, result), clock=clock)
    loop = _Loop(policy, live, result, guard_for(profile, USUAL_BUDGET))
    for tick in range(ticks):
        loop.decide(_at_once)
        if tick_done is not None:
            tick_done(tick + 1)
    return result


def fuzz_engine(policy: Policy, ticks: int, seed: int, profile: Profile, tick_done: Done = None) -> Fuzzed:
    """The same with a simulated engine behind: does an action exhaust its pool, or break its bookkeeping?"""
    rng, result, env = random.Random(seed), Fuzzed(), _engine(profile, seed, ticks)

    def write(change: Change) -> ApplyResult:
        return SimPort(env.simulator).apply(change)

    def read() -> EngineStats:  # the simulator is another one after a restore
        return env.simulator.stats()

    live = LiveEngine(FuzzPort(read, write, rng, result), clock=_ClockOf(env))
    # Without a budget, so that every change is tried.
    loop = _Loop(policy, live, result, Guard(feasible=native_fits()))

    def step(act: Callable[[], bool]) -> None:
        before, preempted = env.snapshot(), env.simulator.stats().counters.preemptions
        acted = act()
        env.step(NOTHING)
        result.failed += env.last_figures.failed
        grown = env.simulator.stats().counters.preemptions - preempted
        env.simulator.cache.check_integrity()
        if acted and grown and not _preempts_anyway(env, before, preempted):
            result.preempting += 1
            result.note(f"{grown} requests preempted after {loop.last}")

    for tick in range(ticks):
        loop.decide(step)
        if tick_done is not None:
            tick_done(tick + 1)
    return result


def _at_once(act: Callable[[], bool]) -> None:
    act()


def _preempts_anyway(env: SimulatedEngine, before: bytes, preempted: int) -> bool:
    """Whether the interval preempts without the action, too. The environment is left as it was."""
    after = env.snapshot()
    env.restore(before)
    env.step(NOTHING)
    grown = env.simulator.stats().counters.preemptions > preempted
    env.restore(after)
    return grown


class _Loop:
    """The daemon's: observe, decide, ask the guard, act. Whatever is raised on the way is counted."""

    def __init__(self, policy: Policy, live: LiveEngine, result: Fuzzed, guard: Guard) -> None:
        self._policy, self._live, self._result, self._guard = policy, live, result, guard
        self._state, self._guard_state = policy.initial_state(), self._guard.initial_state()
        self.last: Change | None = None
        self._charge = _charge(live.reset()[1])

    def decide(self, step: Callable[[Callable[[], bool]], None]) -> None:
        """One tick; ``step`` gets what acts (and says whether it did) and lets time pass around it."""
        self._result.ticks += 1
        try:
            observation = self._live.observation
            decision, self._state = self._policy.decide(observation, self._state)
            context = GuardContext(observation, charge=self._charge)
            verdict, self._guard_state = self._guard.check(decision.change, context, self._guard_state)
            self.last = verdict.change
            step(self._act)
            self._charge = _charge(self._live.observe()[4])
        except Exception as error:  # noqa: BLE001  # what is looked for
            self._result.exceptions += 1
            self._result.note(f"{type(error).__name__}: {error}")

    def _act(self) -> bool:
        return self.last is not None and self._live.act(encode_action(self.last)) is not None


def _charge(info: dict[str, Any]) -> Charge:
    charge: Charge = info["charge"]
    return charge


class _ClockOf:
    """The clock of an environment's engine, which another takes the place of when it is restored."""

    def __init__(self, env: SimulatedEngine) -> None:
        self._env = env

    def now_ns(self) -> int:
        return self._env.simulator.clock.now_ns()

    def wall_s(self) -> float:
        return self._env.simulator.clock.wall_s()


def _engine(profile: Profile, seed: int, ticks: int) -> SimulatedEngine:
    env = SimulatedEngine(profile, "reasoning-bursty", rate_scale=0.1, episode_s=1000.0 + 2.0 * ticks)
    env.reset(seed=seed)
    return env
