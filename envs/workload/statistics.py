"""What a trace is like, in the figures that sources publish: rates, burstiness, length percentiles, shared prefixes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from envs.workload.prefixes import shared_fraction
from envs.workload.splits import sources
from envs.workload.trace import Trace

PERCENTILES: Final = (50, 90, 95, 99)
WINDOWS_S: Final = (1, 10, 60)


@dataclass(frozen=True)
class Summary:
    """Of one trace. None: cannot be told, because the trace is too short or says nothing of it.

    ``peak_rps`` (of the busiest window, wherever it begins) and ``dispersion`` (variance over mean of the requests per
    window, 1 for Poisson) are keyed by window in seconds, ``prompt`` and ``output`` by percentile and ``mean`` and
    ``max``, in tokens. ``gap_cv``: coefficient of variation of the gaps between arrivals. ``hit_ratio``: share of
    prompt tokens that an endless cache would hit.
    """

    name: str
    requests: int
    duration_s: float
    mean_rps: float | None
    gap_cv: float | None
    peak_rps: dict[str, float]
    dispersion: dict[str, float]
    prompt: dict[str, float]
    output: dict[str, float]
    prompt_tokens: int
    output_tokens: int
    block_tokens: float
    hit_ratio: float | None
    sources: int
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(trace: Trace) -> Summary:
    """The figures of a trace of one request or more."""
    times = arrival_times(trace)
    gaps = np.diff(times)
    span = trace.duration_s
    prompts = np.asarray([request.prompt_tokens for request in trace.requests])
    outputs = np.asarray([request.output_tokens for request in trace.requests])
    # The trace goes on for about a gap after its last request.
    whole = span * len(times) / (len(times) - 1) if len(times) > 1 else 0.0
    peaks, dispersion = {}, {}
    for window in WINDOWS_S:
        if whole >= 2 * window:
            peaks[str(window)] = _busiest(times, window) / window
            dispersion[str(window)] = _dispersion(times, whole, window)
    return Summary(
        name=trace.name,
        requests=len(trace.requests),
        duration_s=span,
        mean_rps=len(gaps) / span if span > 0 else None,
        gap_cv=float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else None,
        peak_rps=peaks,
        dispersion=dispersion,
        prompt=_lengths(prompts),
        output=_lengths(outputs),
        prompt_tokens=int(prompts.sum()),
        output_tokens=int(outputs.sum()),
        block_tokens=trace.block_tokens,
        hit_ratio=shared_fraction(trace) if trace.block_tokens else None,
        sources=len(sources(trace)),
        notes=trace.notes,
    )


def arrival_times(trace: Trace) -> NDArray[np.float64]:
    """Arrival of every request, in seconds."""
    return np.asarray([request.arrival_s for request in trace.requests], dtype=np.float64)


def _busiest(times: NDArray[np.float64], window_s: float) -> int:
    """Most requests in any window of this length, wherever it begins."""
    return int((np.searchsorted(times, times + window_s, side="left") - np.arange(len(times))).max())


def _dispersion(times: NDArray[np.float64], whole_s: float, window_s: float) -> float:
    """Variance over mean of the requests per window. The whole is cut into equal windows of about this length: one
    that is cut short would look calm, and one left out may be the busiest.
    """
    number = round(whole_s / window_s)
    # Only windows with requests are listed: a file with one wrong date has more empty ones than memory has room for.
    windows, counts = np.unique((times * (number / whole_s) + 1e-9).astype(np.int64), return_counts=True)
    number = max(number, int(windows[-1]) + 1)
    mean = len(times) / number
    return float((np.square(counts - mean).sum() / number + (1 - len(counts) / number) * mean**2) / mean)


def _lengths(tokens: NDArray[np.int64]) -> dict[str, float]:
    figures = {f"p{share}": float(value) for share, value in zip(PERCENTILES, np.percentile(tokens, PERCENTILES))}  # noqa: B905
    return {**figures, "mean": float(tokens.mean()), "max": float(tokens.max())}
