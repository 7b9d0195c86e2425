"""Plays one policy through a simulated workload, behind the daemon's guard and at the daemon's pace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from autotune.simulation.tails import Tail
from engine.tunables import TunableValue, parse_change
from envs.profile import Profile
from envs.signals import Targets
from envs.simulated import SimulatedEngine
from envs.spaces import NOTHING, Observation, encode_action
from policies.base import Policy
from policies.guard import Guard, GuardContext, native_fits
from policies.predictor_of import predictor_of
from policies.rules import RuleError, load_rules
from policies.threshold import ThresholdPolicy

MOST_ROWS = 2000  # points of a plot; longer runs keep every n-th tick


@dataclass(frozen=True)
class Contender:
    """A policy by name: rules, or none at all and fixed ``values`` from the start."""

    name: str
    policy: Policy | None = None
    values: dict[str, TunableValue] = field(default_factory=dict)


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
    """What came of it. Requests that are under way at the end are offered and nothing else."""

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
    ttft: Tail = field(default_factory=Tail)
    tbt: Tail = field(default_factory=Tail)
    moves: list[Move] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def goodput_rps(self) -> float:
        """Requests inside all targets per second."""
        return self.good / self.duration_s if self.duration_s else 0.0

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
        left_out = {"ttft", "tbt", "moves", "rows"}
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


def contender(text: str, profile: Profile | None = None, targets: Targets | None = None) -> Contender:
    """``none``; ``predictor``; ``static:KNOB=VALUE,...``; a preset's name or a rules file. Raises ValueError, one line.

    ``profile`` and ``targets``: what the predictor calculates with; without a profile there is none.
    """
    if text == "none":
        return Contender("none")
    if text == "predictor" and profile is not None:
        return Contender(text, predictor_of(profile, targets or Targets()))
    kind, colon, rest = text.partition(":")
    if kind == "static" and colon:
        values = {}
        for part in rest.split(","):
            knob, equals, value = part.partition("=")
            if not equals:
                raise ValueError(f"{text!r}: write static:KNOB=VALUE,KNOB=VALUE")
            values[knob.strip()] = parse_change(knob.strip(), value.strip())
        return Contender(text, values=values)
    try:
        return Contender(text, ThresholdPolicy(load_rules(text)))
    except RuleError as error:
        raise ValueError("; ".join(error.problems)) from error


def play(
    env: SimulatedEngine,
    who: Contender,
    *,
    duration_s: float,
    interval_s: float,
    seed: int,
    progress: Callable[[float], None] | None = None,
) -> Played:
    """Run ``env`` (made with ``who.values`` and without warm-up) for a time. ``progress`` gets the seconds done."""
    begin_s = time.perf_counter()
    result, guard = Played(who.name), Guard(feasible=native_fits())
    guard_state, policy = guard.initial_state(), who.policy
    state = policy.initial_state() if policy is not None else {}
    _, info = env.reset(seed=seed)
    ticks = max(1, round(duration_s / interval_s))
    keep = -(-ticks // MOST_ROWS)
    for tick in range(ticks):
        action, scenario = NOTHING, ""
        if policy is not None:
            observation: Observation = info["observation"]
            decision, state = policy.decide(observation, state)
            verdict, guard_state = guard.check(decision.change, GuardContext(observation), guard_state)
            if verdict.change is not None:
                action, scenario = encode_action(verdict.change), decision.scenario
        _, reward, _, _, info = env.step(action)
        result.reward += float(reward)
        if info["applied"] is not None:
            result.moves.append(Move((tick + 1) * interval_s, str(info["applied"]), scenario))
        _add(result, env, info, interval_s, keep_row=tick % keep == 0)
        if progress is not None:
            progress((tick + 1) * interval_s)
    counters = env.simulator.stats().counters
    result.preemptions, result.recoded_tokens = counters.preemptions, counters.recoded_tokens
    result.cached_tokens, result.queried_tokens = counters.prefix_cache_hits, counters.prefix_cache_queries
    result.duration_s, result.wall_s = ticks * interval_s, time.perf_counter() - begin_s
    return result


def _add(result: Played, env: SimulatedEngine, info: dict[str, Any], interval_s: float, *, keep_row: bool) -> None:
    figures, gauges = env.last_figures, info["stats"].gauges
    for name in ("offered", "completed", "good", "rejected", "failed", "aborted", "tokens", "quality_charge"):
        setattr(result, name, getattr(result, name) + getattr(figures, name))
    for ttft_ns in figures.ttft_ns:
        result.ttft.add(ttft_ns)
    result.tbt.add_all(figures.gaps)
    result.pool_bytes = gauges.kv_pool_bytes
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
