"""One cell of an evaluation: one contender on one seed of one scenario. Pure, so that any process may do it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from engine.tunables import TunableValue, default_values
from envs.profile import Profile
from envs.simulated import SimulatedEngine
from policies.auto import BUNDLED
from policies.evaluation.calibration import Calibration
from policies.evaluation.oracle import ORACLE, OraclePlan, play_oracle
from policies.evaluation.scenarios import SEGMENTS, Scenario, Span, traffic
from policies.named import UNBUDGETED, World, contender
from policies.play import Contender, Move, Played, play
from policies.rules import preset_text, presets
from policies.usual_budget import USUAL_BUDGET

FULL: Final = 0.95  # of the pool: from here on it counts as full
PRESSED_SHARE: Final = 0.2  # of a window with a full pool: from here on native is under pressure


@dataclass(frozen=True)
class Setup:
    """What is the same for all cells. ``drain_s``: for how long requests may end after the last arrival."""

    profile: Profile
    calibrations: Mapping[str, Calibration]
    span: Span = field(default_factory=Span)
    interval_s: float = 2.0
    drain_s: float = 60.0
    pool_bytes: int | None = None
    quality_budget: float = USUAL_BUDGET
    oracle: OraclePlan = field(default_factory=OraclePlan)

    def fingerprint(self) -> dict[str, Any]:
        """What results depend on, as JSON."""
        return {
            "profile": self.profile.digest,
            "calibrations": {name: one.to_json() for name, one in sorted(self.calibrations.items())},
            **asdict(self.span),
            "interval_s": self.interval_s,
            "drain_s": self.drain_s,
            "pool_bytes": self.pool_bytes,
            "quality_budget": self.quality_budget,
            "oracle": asdict(self.oracle),
        }


@dataclass(frozen=True)
class Cell:
    """``frozen``: knobs that stay at their defaults. ``rate``: times the scenario's rate."""

    scenario: Scenario
    seed: int
    contender: str
    frozen: tuple[str, ...] = ()
    rate: float = 1.0

    @property
    def key(self) -> str:
        """The same for the same question: a policy's file counts by its content."""
        parts = [self.scenario.text, self.seed, _content(self.contender), list(self.frozen), self.rate]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Segment:
    """A part of the window, by time of completion."""

    good: int = 0
    tokens: int = 0
    charge: float = 0.0


@dataclass(frozen=True)
class Score:
    """What came of a cell. Seconds, tokens, shares; ``quality``: mean relative loss of a generated token.

    ``attainment``: share of all offered requests that were inside all targets. ``window_tokens``: generated while
    requests arrived. ``full_share``: of that window with at least 95 % of the pool in use. ``reversals``: changes that
    put a knob back to where it was before its last change.
    """

    offered: int
    completed: int
    good: int
    refused: int
    goodput_rps: float
    attainment: float
    window_tokens: int
    tokens: int
    prompt_tokens: int
    quality: float
    ttft_p95_s: float | None
    tbt_p95_s: float | None
    preemptions: int
    full_share: float
    changes: int
    reversals: int
    segments: tuple[Segment, ...]
    wall_s: float = 0.0
    decision_p99_ms: float | None = None

    @property
    def pressured(self) -> bool:
        """Of static native: whether the workload was short of memory."""
        return self.full_share >= PRESSED_SHARE or self.preemptions > 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Score:
        segments = tuple(Segment(**segment) for segment in data["segments"])
        return cls(**{**data, "segments": segments})


def run_cell(setup: Setup, cell: Cell) -> Score:
    """Play it. Raises ValueError for a contender or a scenario that cannot be."""
    calibration = setup.calibrations[cell.scenario.source]
    duration_s, interval_s = setup.span.duration_s, setup.interval_s
    trace = traffic(
        cell.scenario, setup.span, seed=cell.seed, rate_scale=cell.rate * calibration.rate_scale(cell.scenario)
    )
    who = (
        Contender(ORACLE)
        if cell.contender == ORACLE
        else contender(cell.contender, World(setup.profile, calibration.targets, setup.quality_budget))
    )
    env = SimulatedEngine(
        setup.profile, trace, rate_scale=1.0, pool_bytes=setup.pool_bytes, interval_s=interval_s, warm_up_s=0.0,
        episode_s=duration_s, repeats=False, values=who.values, held=cell.frozen, targets=calibration.targets,
    )  # fmt: skip
    watch = _Watch(env, round(duration_s / interval_s))
    longest_s = duration_s + setup.drain_s
    if cell.contender == ORACLE:
        played = play_oracle(
            env, setup.oracle, duration_s=longest_s, interval_s=interval_s, seed=cell.seed, each=watch,
            quality_budget=setup.quality_budget,
        )  # fmt: skip
    else:
        played = play(
            env, who, duration_s=longest_s, interval_s=interval_s, seed=cell.seed, each=watch,
            quality_budget=setup.quality_budget,
        )  # fmt: skip
    prompt_tokens = sum(request.prompt_tokens for request in trace.requests)
    return _score(played, watch, prompt_tokens, duration_s, {**default_values(), **who.values})


class _Watch:
    """Takes figures by segment, and ends the run when everything that arrived has ended."""

    def __init__(self, env: SimulatedEngine, ticks: int) -> None:
        self._env, self._ticks = env, ticks
        self.full = 0
        self.good, self.tokens, self.charge = [0] * SEGMENTS, [0] * SEGMENTS, [0.0] * SEGMENTS

    def __call__(self, tick: int, info: dict[str, Any]) -> bool:
        figures = self._env.last_figures
        # What ends after the window counts for its last part, tokens of that time do not: nothing arrives any more.
        part = min(SEGMENTS - 1, tick * SEGMENTS // self._ticks)
        self.good[part] += figures.good
        if tick < self._ticks:
            self.full += info["stats"].gauges.kv_usage >= FULL
            self.tokens[part] += figures.tokens
            self.charge[part] += figures.quality_charge
        return tick >= self._ticks and self._env.simulator.is_idle

    @property
    def full_share(self) -> float:
        return self.full / self._ticks


def _score(
    played: Played, watch: _Watch, prompt_tokens: int, duration_s: float, start: Mapping[str, TunableValue]
) -> Score:
    segments = tuple(
        Segment(good, tokens, charge)
        for good, tokens, charge in zip(watch.good, watch.tokens, watch.charge, strict=True)
    )
    times = played.decision_ns
    return Score(
        offered=played.offered,
        completed=played.completed,
        good=played.good,
        refused=played.rejected + played.failed,
        goodput_rps=played.good / duration_s,
        attainment=played.good / played.offered if played.offered else 1.0,
        window_tokens=sum(watch.tokens),
        tokens=played.tokens,
        prompt_tokens=prompt_tokens,
        quality=played.quality_per_token,
        ttft_p95_s=played.ttft.quantile_s(0.95),
        tbt_p95_s=played.tbt.quantile_s(0.95),
        preemptions=played.preemptions,
        full_share=watch.full_share,
        changes=len(played.moves),
        reversals=reversals(played.moves, start),
        segments=segments,
        wall_s=played.wall_s,
        decision_p99_ms=float(np.quantile(times, 0.99)) / 1e6 if times else None,
    )


def reversals(moves: Sequence[Move], start: Mapping[str, TunableValue]) -> int:
    """Changes that put a knob back to where it was before its last change; ``start``: the knobs before any."""
    count = 0
    now, before = {knob: str(value) for knob, value in start.items()}, dict[str, str]()
    for move in moves:
        knob, _, value = move.change.partition("=")
        count += before.get(knob) == value
        now[knob], before[knob] = value, now[knob]
    return count


def _content(name: str) -> str:
    """The name of a contender, with a digest of what it is read from."""
    if name in presets():
        return f"{name}:{hashlib.sha256(preset_text(name).encode()).hexdigest()}"
    if name.startswith(UNBUDGETED):
        return UNBUDGETED + _content(name.removeprefix(UNBUDGETED))
    path = BUNDLED if name == "auto" else Path(name.partition(":")[2] or name)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        return f"{name}:{digest}"
    return f"{name}:{hashlib.sha256(path.read_bytes()).hexdigest()}" if path.is_file() else name
