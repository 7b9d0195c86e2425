"""What is evaluated on: a workload or trace at a load, and the requests that a seed makes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np

from envs.workload.catalogue import CATALOGUE
from envs.workload.generators import Workload, generate
from envs.workload.loaders import load_trace
from envs.workload.scaling import Scaling, scale
from envs.workload.splits import window
from envs.workload.trace import Trace, TraceError
from policies.split import EVALUATION_SEED, HELD_OUT, Family, family

SEGMENTS: Final = 6  # equal parts of a window, told apart in the figures; regimes of three parts fit
LEAST_LOAD: Final = 1e-6
MOST_LOAD: Final = 1e6
_TRIES: Final = 20

# Half of what native storage can serve, and more than that: memory is ample in the first and short in the second.
LOADS: Final = ("0.5", "1.2")
DEFAULT: Final = tuple(f"{name}@{load}" for name in HELD_OUT for load in LOADS)


@dataclass(frozen=True)
class Scenario:
    """``source`` (a built-in workload or a trace file) at a mean rate: ``load`` times what static native can serve, or,
    with ``load`` None, ``factor`` times the source's own rate.
    """

    text: str
    source: str
    load: float | None = 1.0
    factor: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Scenario:
        """``SOURCE``, ``SOURCE@LOAD`` or ``SOURCE@xFACTOR``. Raises ValueError, one line."""
        source, at, load = text.rpartition("@")
        if not at or Path(text).is_file():
            source, load = text, "1.0"
        if source not in CATALOGUE and not Path(source).is_file():
            raise ValueError(f"{source}: no such file, nor a built-in workload ({', '.join(CATALOGUE)})")
        try:
            number = float(load.removeprefix("x"))
        except ValueError:
            number = math.nan
        if not LEAST_LOAD <= number <= MOST_LOAD:
            raise ValueError(
                f"{text!r}: write SOURCE@LOAD or SOURCE@xFACTOR with a number > 0, from {LEAST_LOAD:g} to {MOST_LOAD:g}"
            )
        return cls(text, source, None, number) if load.startswith("x") else cls(text, source, number)

    @property
    def is_generated(self) -> bool:
        return not Path(self.source).is_file()

    @property
    def family(self) -> Family:
        return family(self.source)


@dataclass(frozen=True)
class Span:
    """For how long requests arrive, and what lengths are divided by."""

    duration_s: float = 600.0
    length_scale: float = 1.0


def own_rate_rps(scenario: Scenario, span: Span) -> float:
    """Requests per second of the source as it is."""
    if scenario.is_generated:
        return fmean(regime.mean_rps for regime in _shaped(scenario, span).regimes)
    trace = load_trace(Path(scenario.source))
    return len(trace.requests) / max(trace.duration_s, 1e-9)


def traffic(scenario: Scenario, span: Span, *, seed: int, rate_scale: float) -> Trace:
    """The requests of one seed over ``span.duration_s``, at ``rate_scale`` times the source's rate.

    Built-in workloads are generated anew. Of a trace a window is drawn, at any time of it, stretched to the rate.
    Raises TraceError when nothing arrives.
    """
    lengths = Scaling(length_scale=span.length_scale)
    if scenario.is_generated:
        made = generate(
            _shaped(scenario, span), duration_s=span.duration_s, seed=EVALUATION_SEED + seed, rate_scale=rate_scale
        )
        return scale(made, lengths)
    trace = load_trace(Path(scenario.source), seed=seed)
    length_s = span.duration_s * rate_scale
    rng = np.random.default_rng(EVALUATION_SEED + seed)
    for _ in range(_TRIES):
        start_s = rng.uniform(0.0, max(0.0, trace.duration_s - length_s))
        try:
            cut = window(trace, start_s, start_s + length_s)
        except TraceError:
            continue
        return scale(cut, replace(lengths, time_scale=1.0 / rate_scale))
    raise TraceError(f"{scenario.source}: nothing arrives in {length_s:g} s of it, wherever one looks")


def sample(scenario: Scenario, span: Span, number: int) -> Trace:
    """``number`` requests evenly out of the whole source, of a seed that no evaluation uses."""
    if scenario.is_generated:
        workload = _shaped(scenario, span)
        trace = generate(workload, duration_s=max(span.duration_s, 300.0), seed=EVALUATION_SEED - 1)
    else:
        trace = load_trace(Path(scenario.source))
    trace = scale(trace, Scaling(length_scale=span.length_scale))
    return evenly(trace, number)


def evenly(trace: Trace, number: int) -> Trace:
    """``number`` requests from all over a trace, or all of one that has fewer."""
    places = np.linspace(0, len(trace.requests) - 1, min(number, len(trace.requests))).round().astype(int)
    return replace(trace, requests=tuple(trace.requests[place] for place in places))


def _shaped(scenario: Scenario, span: Span) -> Workload:
    """The workload with its regimes spread evenly over the window."""
    workload = CATALOGUE[scenario.source]
    return replace(workload, regime_s=span.duration_s / len(workload.regimes)) if workload.then else workload
