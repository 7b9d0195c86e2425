"""What a replay showed: counts, latency percentiles, throughput, goodput and Apdex. numpy, no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from autotune.replay.records import Outcome, RequestRecord


@dataclass(frozen=True)
class Targets:
    """Latency targets in seconds; None: no target. A request's TBT is the ``tbt_quantile`` of its own gaps."""

    ttft_s: float | None = None
    tbt_s: float | None = None
    tbt_quantile: float = 0.95

    @property
    def are_given(self) -> bool:
        """Whether there is anything to be inside of."""
        return self.ttft_s is not None or self.tbt_s is not None

    def met(self, record: RequestRecord, tolerance: float = 1.0) -> bool:
        """Whether a completed request was inside all targets, each widened by ``tolerance``."""
        if record.outcome is not Outcome.COMPLETED:
            return False
        if self.ttft_s is not None:
            ttft_s = record.ttft_s
            if ttft_s is None or ttft_s > self.ttft_s * tolerance:
                return False
        return self.tbt_s is None or request_tbt_s(record, self.tbt_quantile) <= self.tbt_s * tolerance


@dataclass(frozen=True)
class Percentiles:
    p50_s: float
    p95_s: float
    p99_s: float
    mean_s: float
    max_s: float


@dataclass(frozen=True)
class Summary:
    """Rates are per second from the first arrival to the last answer (``duration_s``), as load tools count them.

    ``goodput_rps``: completed requests inside all targets. ``apdex``: (inside + half of those inside four times the
    targets) / (completed + failed), the satisfaction index of the Apdex Alliance; None without targets, which it is by
    definition about. None: not known. ``failed`` leaves
    out requests that the user's interrupt cancelled.
    """

    offered: int
    completed: int
    failed: int
    cancelled: int
    failures: dict[str, int]
    first_failure: str
    duration_s: float
    ttft: Percentiles | None
    tbt: Percentiles | None
    e2e: Percentiles | None
    send_delay: Percentiles | None
    prompt_tokens: int
    output_tokens: int
    cached_prompt_tokens: int | None
    request_rps: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    within_targets: int
    goodput_rps: float
    slo_attainment: float | None
    apdex: float | None
    targets: Targets
    partial: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(records: Sequence[RequestRecord], targets: Targets, *, partial: bool = False) -> Summary:
    """Summarise requests that were sent. Latencies are those of completed requests."""
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    failed = [record for record in records if record.outcome is Outcome.FAILED]
    cancelled = len(records) - len(completed) - len(failed)
    ends = [record.finished_s for record in records if record.finished_s is not None]
    start = min((record.scheduled_s for record in records), default=0.0)
    duration_s = max(max(ends, default=start) - start, 1e-9)
    prompt_tokens = sum(record.prompt_tokens for record in completed)
    output_tokens = sum(record.output_tokens for record in completed)
    within = sum(targets.met(record) for record in completed)
    tolerable = sum(targets.met(record, 4.0) for record in completed)
    judged = len(completed) + len(failed)
    cached = [record.cached_tokens for record in completed if record.cached_tokens is not None]
    return Summary(
        offered=len(records),
        completed=len(completed),
        failed=len(failed),
        cancelled=cancelled,
        failures=dict(Counter(record.failure for record in failed).most_common()),
        first_failure=failed[0].message if failed else "",
        duration_s=duration_s,
        ttft=percentiles([record.ttft_s for record in completed if record.ttft_s is not None]),
        tbt=percentiles([gap for record in completed for gap in record.gaps_s]),
        e2e=percentiles([record.e2e_s for record in completed if record.e2e_s is not None]),
        send_delay=percentiles([record.send_delay_s for record in records if record.send_delay_s is not None]),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_prompt_tokens=sum(cached) if cached else None,
        request_rps=len(completed) / duration_s,
        prompt_tokens_per_s=prompt_tokens / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        within_targets=within,
        goodput_rps=within / duration_s,
        slo_attainment=within / judged if judged else None,
        apdex=(within + tolerable) / 2 / judged if judged and targets.are_given else None,
        targets=targets,
        partial=partial,
    )


def request_tbt_s(record: RequestRecord, quantile: float) -> float:
    """The quantile of one request's gaps (nearest rank), 0 for an output of one token."""
    gaps = sorted(record.gaps_s)
    return gaps[max(0, math.ceil(quantile * len(gaps)) - 1)] if gaps else 0.0


def percentiles(values: Sequence[float]) -> Percentiles | None:
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    p50, p95, p99 = (float(value) for value in np.quantile(array, (0.5, 0.95, 0.99)))
    return Percentiles(p50, p95, p99, float(array.mean()), float(array.max()))
