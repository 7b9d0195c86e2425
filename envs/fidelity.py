"""How true the simulator is: the same trace through a live engine and through its simulation, figure by figure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from engine.memory_model import GroupSpec
from engine.tunable_state import Patch
from envs.arrivals_feed import TraceFeed
from envs.latency_model import LatencyModel
from envs.ledger import Ledger, RequestRecord
from envs.signals import Targets
from envs.simulator import SimOptions, Simulator
from envs.workload.trace import Trace, from_requests

FIGURES: Final = ("tpot", "e2e", "ttft_p90", "throughput", "e2e_mean")


def figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Median TPOT, median and mean E2E and 90th percentile TTFT in seconds, output tokens per second. Raises ValueError
    when nothing was completed.
    """
    done = [record for record in records if record.status == "completed" and record.e2e_s is not None]
    if not done:
        raise ValueError("no request was completed")
    first = min(record.arrival_s for record in records)
    last = max(record.arrival_s + (record.e2e_s or 0.0) for record in done)
    ttfts = sorted(record.ttft_s or 0.0 for record in done)
    return {
        "tpot": statistics.median([record.tpot_s for record in done if record.tpot_s is not None] or [0.0]),
        "e2e": statistics.median(record.e2e_s or 0.0 for record in done),
        "e2e_mean": statistics.fmean(record.e2e_s or 0.0 for record in done),
        "ttft_p90": ttfts[max(0, math.ceil(0.9 * len(ttfts)) - 1)],
        "throughput": sum(record.output_tokens for record in done) / (last - first),
    }


def simulate(
    groups: Sequence[GroupSpec],
    model: LatencyModel,
    trace: Trace,
    options: SimOptions,
    changes: Sequence[tuple[float, Patch]] = (),
) -> tuple[list[RequestRecord], Simulator]:
    """A trace through the simulation, to its end; ``changes``: moments in seconds and what is patched then."""
    records: list[RequestRecord] = []
    simulator = Simulator(groups, model, options, TraceFeed(trace), ledger=Ledger(Targets(), records.append))
    for at_s, patch in changes:
        simulator.run_until(round(1e9 * at_s))
        simulator.apply(patch)
    simulator.drain()
    return records, simulator


def capacity_rps(groups: Sequence[GroupSpec], model: LatencyModel, trace: Trace, options: SimOptions) -> float:
    """Requests per second of a trace's lengths when all of them are there from the start."""
    at_once = from_requests(
        trace.name, [replace(r, arrival_s=0.0) for r in trace.requests], block_tokens=trace.block_tokens
    )
    records, simulator = simulate(groups, model, at_once, replace(options, max_waiting=1 << 30))
    return len(records) / (simulator.now_ns / 1e9)


def at_rate(trace: Trace, rate_rps: float, duration_s: float) -> Trace:
    """The trace stretched or squeezed to a mean rate, cut to a duration."""
    number = len(trace.requests)
    factor = (number - 1) / trace.duration_s / rate_rps if trace.duration_s else 1.0
    kept = [replace(r, arrival_s=r.arrival_s * factor) for r in trace.requests]
    cut = [r for r in kept if r.arrival_s < duration_s] or kept[:1]
    return from_requests(trace.name, cut, block_tokens=trace.block_tokens)


@dataclass(frozen=True)
class Comparison:
    """By figure: ``error_pct`` of the simulation against the median live run, ``spread_pct`` of two live runs on
    average, both relative; and the median live run and the simulation themselves.
    """

    error_pct: Mapping[str, float]
    spread_pct: Mapping[str, float]
    live: Mapping[str, float]
    simulated: Mapping[str, float]


def compare(live: Sequence[Mapping[str, float]], simulated: Mapping[str, float]) -> Comparison:
    """``live``: several runs of one trace."""
    middle = {name: statistics.median(run[name] for run in live) for name in FIGURES}
    pairs = list(itertools.combinations(live, 2))
    spread = {
        name: statistics.fmean(100 * abs(a[name] - b[name]) / middle[name] for a, b in pairs) if pairs else 0.0
        for name in FIGURES
    }
    error = {name: 100 * abs(simulated[name] / middle[name] - 1) for name in FIGURES}
    return Comparison(error, spread, middle, dict(simulated))


def kendall_tau(
    live: Sequence[float], simulated: Sequence[float], spreads: Sequence[float]
) -> tuple[float | None, int]:
    """Rank agreement over the pairs whose live values differ by more than their spreads (relative; the larger of the
    two counts), and how many there are; None without any.
    """
    score = pairs = 0
    for (a, x, spread), (b, y, other) in itertools.combinations(zip(live, simulated, spreads, strict=True), 2):
        if abs(a - b) <= max(spread, other) * min(abs(a), abs(b)):
            continue
        pairs += 1
        score += 1 if (a - b) * (x - y) > 0 else -1
    return (score / pairs if pairs else None), pairs
