"""Cut a trace by time and by source, so that what a policy learns on and what it is judged on share nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from envs.workload.trace import Trace, TraceError, TraceRequest, from_requests


def window(trace: Trace, start_s: float, end_s: float = math.inf) -> Trace:
    """The requests that arrive in [start, end), moved so that ``start`` becomes 0 s.

    Silence at the beginning of a window stays. Raises TraceError when the window is empty.
    """
    kept = tuple(
        replace(request, arrival_s=request.arrival_s - start_s)
        for request in trace.requests
        if start_s <= request.arrival_s < end_s
    )
    if not kept:
        raise TraceError(f"{trace.name}: no request arrives from {start_s:g} s to {end_s:g} s")
    note = f"window from {start_s:g} s to {end_s:g} s: {len(kept)} of {len(trace.requests)} requests"
    return replace(trace, requests=kept, notes=(*trace.notes, note))


def split_by_time(trace: Trace, shares: Sequence[float]) -> tuple[Trace, ...]:
    """Consecutive windows of these shares of the trace's duration, such as (0.7, 0.3): the later for judging.

    Raises ValueError unless the shares are positive and sum to 1, TraceError when a window is empty.
    """
    if not shares or min(shares) <= 0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-9):
        raise ValueError(f"shares must be > 0 and sum to 1, got {', '.join(f'{share:g}' for share in shares)}")
    ends = [trace.duration_s * sum(shares[: i + 1]) for i in range(len(shares) - 1)]
    return tuple(window(trace, start, end) for start, end in zip((0.0, *ends), (*ends, math.inf), strict=True))


def sources(trace: Trace) -> dict[str, int]:
    """Who sent how many requests, the busiest first; requests without a source are not counted."""
    counts: dict[str, int] = {}
    for request in trace.requests:
        if request.source:
            counts[request.source] = counts.get(request.source, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def split_by_source(trace: Trace, share: float, seed: int = 0) -> tuple[Trace, Trace]:
    """Two traces of whole sources: about ``share`` of the sources (drawn under ``seed``, at least one) and the others.

    Arrival times stay. Raises ValueError for a share outside (0, 1), TraceError with fewer than two sources or with
    requests that have none.
    """
    if not 0 < share < 1:
        raise ValueError(f"a share must be between 0 and 1, got {share:g}")
    names = sorted(sources(trace))
    if len(names) < 2 or not all(request.source for request in trace.requests):
        raise TraceError(f"{trace.name}: to split by source, every request needs one, and two must differ")
    number = min(len(names) - 1, max(1, round(share * len(names))))
    chosen = {names[i] for i in np.random.default_rng(seed).permutation(len(names))[:number]}
    return _of_sources(trace, chosen), _of_sources(trace, set(names) - chosen)


def by_source(trace: Trace) -> dict[str, Trace]:
    """One trace per source, each beginning at 0 s; requests without a source are in none."""
    groups: dict[str, list[TraceRequest]] = {name: [] for name in sources(trace)}
    for request in trace.requests:
        if request.source:
            groups[request.source].append(request)
    return {
        name: from_requests(f"{trace.name}:{name}", group, block_tokens=trace.block_tokens, notes=trace.notes)
        for name, group in groups.items()
    }


def _of_sources(trace: Trace, names: set[str]) -> Trace:
    kept = tuple(request for request in trace.requests if request.source in names)
    note = f"{len(names)} of its sources: {len(kept)} of {len(trace.requests)} requests"
    return replace(trace, requests=kept, notes=(*trace.notes, note))
