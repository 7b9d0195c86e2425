"""What really happened to simulated requests: exact figures that a live engine can only estimate. Stdlib only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from envs.signals import Targets
from envs.sim_request import SimRequest


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One ended request; times in seconds, None where they never came.

    ``arrival_s``: of the simulation's clock. ``status``: completed, rejected, aborted or failed. ``good``: completed
    inside all targets.
    """

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    status: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    good: bool = False


@dataclass
class TrueFigures:
    """Sums over an interval. ``gaps``: time between two tokens in nanoseconds, and how often it occurred.

    ``quality_charge``: sum over generated tokens of the relative loss that each was generated at. ``late``: completed
    outside a target.
    """

    offered: int = 0
    completed: int = 0
    good: int = 0
    late: int = 0
    rejected: int = 0
    aborted: int = 0
    failed: int = 0
    tokens: int = 0
    quality_charge: float = 0.0
    ttft_ns: list[int] = field(default_factory=list)
    gaps: dict[int, int] = field(default_factory=dict)

    @property
    def violations(self) -> int:
        """Requests that ended outside their targets, were refused or failed."""
        return self.late + self.rejected + self.failed

    @property
    def quality_per_token(self) -> float:
        """Mean relative loss of a generated token; 0 without tokens."""
        return self.quality_charge / self.tokens if self.tokens else 0.0

    def ttft_quantile_s(self, q: float) -> float | None:
        """The q-quantile of first-token times; None without any."""
        if not self.ttft_ns:
            return None
        return sorted(self.ttft_ns)[max(0, math.ceil(q * len(self.ttft_ns)) - 1)] / 1e9

    def tbt_quantile_s(self, q: float) -> float | None:
        """The q-quantile of gaps between tokens; None without any."""
        rank, seen = max(1, math.ceil(q * sum(self.gaps.values()))), 0
        for gap_ns in sorted(self.gaps):
            seen += self.gaps[gap_ns]
            if seen >= rank:
                return gap_ns / 1e9
        return None


class Ledger:
    """Follows every request. ``record`` gets each one that ends; without it nothing is kept, whatever the duration."""

    def __init__(self, targets: Targets, record: Callable[[RequestRecord], None] | None = None) -> None:
        self.targets = targets
        self.figures = TrueFigures()
        self._record = record
        self._ttft_ns = round(targets.ttft_s * 1e9)
        self.tbt_ns = round(targets.tbt_s * 1e9)

    def take(self) -> TrueFigures:
        """The figures since the last call."""
        figures, self.figures = self.figures, TrueFigures()
        return figures

    def token(self, request: SimRequest, now_ns: int) -> None:
        """A request got a token, its first one or another; called before the request knows."""
        figures = self.figures
        figures.tokens += 1
        last_ns = request.last_token_ns
        if last_ns is None:
            figures.ttft_ns.append(now_ns - request.arrival_ns)
            return
        gap_ns = now_ns - last_ns
        figures.gaps[gap_ns] = figures.gaps.get(gap_ns, 0) + 1
        request.late_gaps += gap_ns > self.tbt_ns

    def gaps(self, gap_ns: int, times: int) -> None:
        """As many requests got another token each; whoever calls adds to their ``late_gaps``."""
        figures = self.figures
        figures.tokens += times
        figures.gaps[gap_ns] = figures.gaps.get(gap_ns, 0) + times

    def all_gaps(self, gaps_ns: Sequence[int], times: int) -> int:
        """As many requests got another token each after every one of these gaps; returns how many of those were late,
        which whoever calls adds to ``late_gaps``.
        """
        known = self.figures.gaps
        self.figures.tokens += times * len(gaps_ns)
        for gap_ns in gaps_ns:
            known[gap_ns] = known.get(gap_ns, 0) + times
        tbt_ns = self.tbt_ns
        return sum([gap_ns > tbt_ns for gap_ns in gaps_ns]) if max(gaps_ns) > tbt_ns else 0

    def rejected(self, request: SimRequest) -> None:
        """Refused at admission."""
        self.figures.rejected += 1
        self._keep(request, "rejected", good=False)

    def ended(self, request: SimRequest, status: str) -> None:
        """A request ended: completed, aborted or failed."""
        figures, good = self.figures, False
        if status == "completed":
            good = self._is_good(request)
            figures.completed += 1
            figures.good += good
            figures.late += not good
        elif status == "aborted":
            figures.aborted += 1
        else:
            figures.failed += 1
        self._keep(request, status, good=good)

    def _is_good(self, request: SimRequest) -> bool:
        """First token in time, and so many of its gaps as the quantile asks for (a request's own tail)."""
        if request.first_token_ns is None or request.first_token_ns - request.arrival_ns > self._ttft_ns:
            return False
        gaps = len(request.output_ids) - 1
        return request.late_gaps <= gaps - math.ceil(self.targets.quantile * gaps)

    def _keep(self, request: SimRequest, status: str, *, good: bool) -> None:
        if self._record is None:
            return
        first, last, output = request.first_token_ns, request.last_token_ns, len(request.output_ids)
        ended = status == "completed" and first is not None and last is not None
        self._record(
            RequestRecord(
                request.trace_index,
                request.arrival_ns / 1e9,
                len(request.prompt_ids),
                output,
                status,
                None if first is None else (first - request.arrival_ns) / 1e9,
                (last - first) / (output - 1) / 1e9 if ended and first and last and output > 1 else None,
                (last - request.arrival_ns) / 1e9 if ended and last is not None else None,
                request.num_cached_tokens,
                request.num_preemptions,
                good,
            )
        )
