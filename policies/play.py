"""Plays one policy through a simulated workload, behind the daemon's guard and at the daemon's pace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol

from engine.tunables import TunableValue
from envs.simulated import SimulatedEngine
from envs.spaces import NOTHING, Observation, encode_action
from policies.base import Policy
from policies.guard import Guard, GuardContext
from policies.guards import guard_for, made
from policies.tails import Tail
from policies.usual_budget import USUAL_BUDGET

OVERLOADED_SHARE: Final = 0.1  # of all requests, refused or still waiting at the end
MOST_ROWS: Final = 2000  # points of a plot; longer runs keep every n-th tick


@dataclass(frozen=True)
class Contender:
    """A policy by name, or none at all; ``values``: knobs in force from the start. ``budgeted``: whether the
    guard holds it to a quality budget. See :mod:`policies.named`.
    """

    name: str
    policy: Policy | None = None
    values: dict[str, TunableValue] = field(default_factory=dict)
    budgeted: bool = True


@dataclass
class Row:
    """One tick of the time axis. ``resident``: bytes by format. Tails are of the interval, None without values."""

    at_s: float
    offered_rps: float
    running: int
    waiting: int
    load: float
    resident: dict[str, int]
    ttft_tail_s: float | None
    tbt_tail_s: float | None
    goodput_rps: float


@dataclass(frozen=True)
class Move:
    """A change that was made, when, and by which scenario."""

    at_s: float
    change: str
    scenario: str


@dataclass
class Played:
    """What came of it. Requests that are under way at the end are offered and nothing else; ``waiting`` of them do not
    run then. ``budgeted``: as of the contender. ``decision_ns``: processor time of every decision, guard included.
    """

    name: str
    duration_s: float = 0.0
    wall_s: float = 0.0
    offered: int = 0
    completed: int = 0
    good: int = 0
    rejected: int = 0
    failed: int = 0
    aborted: int = 0
    tokens: int = 0
    quality_charge: float = 0.0
    reward: float = 0.0
    preemptions: int = 0
    cached_tokens: int = 0
    queried_tokens: int = 0
    recoded_tokens: int = 0
    pool_bytes: int = 0
    budgeted: bool = True
    decision_ns: list[int] = field(default_factory=list)
    waiting: int = 0
    ttft: Tail = field(default_factory=Tail)
    tbt: Tail = field(default_factory=Tail)
    moves: list[Move] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def goodput_rps(self) -> float:
        """Requests inside all targets per second."""
        return self.good / self.duration_s if self.duration_s else 0.0

    @property
    def is_overloaded(self) -> bool:
        """Whether more came than was served: some were refused, or wait at the end, and those are not just a few."""
        return self.rejected + self.waiting > OVERLOADED_SHARE * self.offered

    @property
    def attainment(self) -> float | None:
        """Share of ended requests inside all targets, refused and failed ones outside; None when none ended."""
        ended = self.completed + self.rejected + self.failed
        return self.good / ended if ended else None

    @property
    def quality_per_token(self) -> float:
        """Mean relative loss of a generated token."""
        return self.quality_charge / self.tokens if self.tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        """Figures without the time axis; seconds, tokens, shares."""
        left_out = {"ttft", "tbt", "moves", "rows", "decision_ns"}
        plain = {name: value for name, value in vars(self).items() if name not in left_out}
        tails = {
            f"{name}_p{round(100 * q)}_s": tail.quantile_s(q)
            for name, tail in (("ttft", self.ttft), ("tbt", self.tbt))
            for q in (0.5, 0.9, 0.99)
        }
        derived = {
            "goodput_rps": self.goodput_rps,
            "attainment": self.attainment,
            "quality_per_token": self.quality_per_token,
        }
        return {**plain, **derived, **tails, "moves": [asdict(move) for move in self.moves]}


class Chooser(Protocol):
    """Picks actions from more than a policy may see. The environment may be moved on, if it is restored."""

    def choose(self, tick: int, info: dict[str, Any]) -> int:
        """The action of a tick."""
        ...


def play(
    env: SimulatedEngine,
    who: Contender,
    *,
    duration_s: float,
    interval_s: float,
    seed: int,
    guard: Guard | None = None,
    quality_budget: float = USUAL_BUDGET,
    progress: Callable[[float], None] | None = None,
    each: Callable[[int, dict[str, Any]], bool] | None = None,
    chooser: Chooser | None = None,
) -> Played:
    """Run ``env`` (made with ``who.values`` and without warm-up) for a time. ``progress`` gets the seconds done.

    ``guard``: the daemon's for the environment's profile and ``quality_budget`` if None. ``each`` gets every tick's
    number and ``info``, and ends the run by returning True. ``chooser``: in place of a policy and its guard.
    """
    begin_s = time.perf_counter()
    result = Played(who.name, budgeted=who.budgeted)
    guard = guard or guard_for(env.profile, quality_budget if who.budgeted else None)
    guard_state, policy = guard.initial_state(), who.policy
    state = policy.initial_state() if policy is not None else {}
    _, info = env.reset(seed=seed)
    ticks = max(1, round(duration_s / interval_s))
    keep = -(-ticks // MOST_ROWS)
    tick = 0
    for tick in range(ticks):
        action, scenario = NOTHING, ""
        if chooser is not None:
            action = chooser.choose(tick, info)
        elif policy is not None:
            observation: Observation = info["observation"]
            started_ns = time.thread_time_ns()
            decision, state = policy.decide(observation, state)
            context = GuardContext(observation, charge=info["charge"])
            verdict, guard_state = guard.check(decision.change, context, guard_state)
            result.decision_ns.append(time.thread_time_ns() - started_ns)
            if verdict.change is not None:
                action, scenario = encode_action(verdict.change), made(decision, verdict).scenario
        _, reward, _, _, info = env.step(action)
        result.reward += float(reward)
        if info["applied"] is not None:
            result.moves.append(Move((tick + 1) * interval_s, str(info["applied"]), scenario))
        _add(result, env, info, interval_s, keep_row=tick % keep == 0)
        if progress is not None:
            progress((tick + 1) * interval_s)
        if each is not None and each(tick, info):
            break
    counters = env.simulator.stats().counters
    result.preemptions, result.recoded_tokens = counters.preemptions, counters.recoded_tokens
    result.cached_tokens, result.queried_tokens = counters.prefix_cache_hits, counters.prefix_cache_queries
    result.duration_s, result.wall_s = (tick + 1) * interval_s, time.perf_counter() - begin_s
    return result


def _add(result: Played, env: SimulatedEngine, info: dict[str, Any], interval_s: float, *, keep_row: bool) -> None:
    figures, gauges = env.last_figures, info["stats"].gauges
    for name in ("offered", "completed", "good", "rejected", "failed", "aborted", "tokens", "quality_charge"):
        setattr(result, name, getattr(result, name) + getattr(figures, name))
    for ttft_ns in figures.ttft_ns:
        result.ttft.add(ttft_ns)
    result.tbt.add_all(figures.gaps)
    result.pool_bytes, result.waiting = gauges.kv_pool_bytes, gauges.waiting
    if not keep_row:
        return
    resident: dict[str, int] = {}
    for row in gauges.resident:
        resident[row.kv_format] = resident.get(row.kv_format, 0) + row.bytes
    true = info["true"]
    result.rows.append(
        Row(
            info["stats"].stamp_ns / 1e9,
            figures.offered / interval_s,
            gauges.running,
            gauges.waiting,
            info["stats"].load,
            resident,
            true["ttft_tail_s"],
            true["tbt_tail_s"],
            true["goodput_rps"],
        )
    )
