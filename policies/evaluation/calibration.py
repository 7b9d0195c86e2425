"""Fixed before any policy plays: targets from the unloaded engine, rates from what native storage can serve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

import numpy as np

from envs.arrivals_feed import TraceFeed
from envs.fidelity import simulate
from envs.ledger import Ledger, RequestRecord
from envs.profile import Profile
from envs.signals import Targets
from envs.simulator import SimOptions, Simulator
from envs.workload.trace import Trace, from_requests
from policies.evaluation.scenarios import Scenario, Span, own_rate_rps, sample

TTFT_FACTOR: Final = 5.0
TBT_FACTOR: Final = 2.5
_ALONE: Final = 25  # requests that are served one at a time
TOGETHER: Final = 300  # requests that are all there from the start, some of which also come alone
_APART_S: Final = 36_000.0


@dataclass(frozen=True)
class Calibration:
    """Of one source: ``targets``; what native storage serves, and what the source sends, in requests per second."""

    targets: Targets
    capacity_rps: float
    own_rps: float

    def rate_scale(self, scenario: Scenario) -> float:
        """What the source's own rate is multiplied by."""
        return scenario.factor if scenario.load is None else scenario.load * self.capacity_rps / self.own_rps

    def to_json(self) -> dict[str, Any]:
        return {
            "ttft_target_s": self.targets.ttft_s,
            "tbt_target_s": self.targets.tbt_s,
            "capacity_rps": self.capacity_rps,
            "own_rps": self.own_rps,
        }


def calibrate(
    profile: Profile, scenarios: Iterable[Scenario], span: Span, *, pool_bytes: int | None = None
) -> Mapping[str, Calibration]:
    """By source; see :func:`unloaded_targets` and :func:`sustained_rps`."""
    options = _options(profile, pool_bytes)
    result: dict[str, Calibration] = {}
    for scenario in scenarios:
        if scenario.source in result:
            continue
        requests = sample(scenario, span, TOGETHER)
        result[scenario.source] = Calibration(
            unloaded_targets(profile, requests, options),
            sustained_rps(profile, requests, options),
            own_rate_rps(scenario, span),
        )
    return result


def usual_targets(profile: Profile, requests: Trace) -> Targets:
    """What :func:`calibrate` fixes, of requests that are at hand. Raises ValueError when none can be served."""
    return unloaded_targets(profile, requests, _options(profile, None))


def unloaded_targets(profile: Profile, requests: Trace, options: SimOptions) -> Targets:
    """Targets from some of these requests, each alone in the engine. Raises ValueError when none can be served.

    TTFT 5 times and TBT 2.5 times the median, and a TTFT that 95 % of them reach: where prompts differ by a factor of
    ten, 5 times the median would count an idle engine as failing.
    """
    step = max(1, len(requests.requests) // _ALONE)
    alone = [replace(r, arrival_s=_APART_S * i) for i, r in enumerate(requests.requests[::step])]
    records: list[RequestRecord] = []
    trace = from_requests(requests.name, alone, block_tokens=requests.block_tokens)
    ledger = Ledger(Targets(), records.append)
    Simulator(profile.groups(), profile.latency_model(), options, TraceFeed(trace), ledger=ledger).drain()
    first = [record.ttft_s for record in records if record.ttft_s is not None]
    gaps = [record.tpot_s for record in records if record.tpot_s is not None]
    if not first or not gaps:
        raise ValueError(f"{requests.name}: no request of it fits this engine alone; divide its lengths")
    return Targets(max(TTFT_FACTOR * median(first), float(np.quantile(first, 0.95))), TBT_FACTOR * median(gaps))


def _options(profile: Profile, pool_bytes: int | None) -> SimOptions:
    return SimOptions(
        pool_bytes or profile.pool_bytes, profile.model.max_model_len, prefix_cache=False, max_waiting=1 << 30
    )


def sustained_rps(profile: Profile, requests: Trace, options: SimOptions) -> float:
    """Requests per second that native storage completes while there is always one waiting.

    All are there from the start; the beginning (a pool that fills) and the end (one that empties) do not count.
    """
    at_once = from_requests(
        requests.name, [replace(r, arrival_s=0.0) for r in requests.requests], block_tokens=requests.block_tokens
    )
    records, _ = simulate(profile.groups(), profile.latency_model(), at_once, options)
    ends = sorted(record.e2e_s for record in records if record.e2e_s is not None)
    if not ends:
        raise ValueError(f"{requests.name}: no request of it fits this engine; divide its lengths")
    if not ends[-1]:
        raise ValueError(f"{requests.name}: by this profile serving it takes no time at all")
    first, last = len(ends) // 5, 7 * len(ends) // 10
    span_s = ends[last] - ends[first]
    return (last - first) / span_s if span_s > 0 else len(ends) / ends[-1]
