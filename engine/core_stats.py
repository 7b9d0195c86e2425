"""What the step loop counts. Every duration comes from the injected clock; no torch, no threads."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.block_lives import BlockLives
from engine.buckets import Buckets
from engine.plan import StepPlan
from engine.request import Request
from engine.stats import Counters, Histogram

_log = logging.getLogger(__name__)

TTFT_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BOUNDS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.5, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
E2E_BOUNDS_S = (
    0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
)  # fmt: skip
LENGTH_BOUNDS = (
    1.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100000.0,
)  # fmt: skip


@dataclass
class Distributions:
    """The histograms of the metrics page, seconds or tokens. ``blocks``: of cached blocks, kept by the cache."""

    ttft: Buckets = field(default_factory=lambda: Buckets(TTFT_BOUNDS_S))
    itl: Buckets = field(default_factory=lambda: Buckets(ITL_BOUNDS_S))
    e2e: Buckets = field(default_factory=lambda: Buckets(E2E_BOUNDS_S))
    queue: Buckets = field(default_factory=lambda: Buckets(E2E_BOUNDS_S))
    prompt_tokens: Buckets = field(default_factory=lambda: Buckets(LENGTH_BOUNDS))
    generation_tokens: Buckets = field(default_factory=lambda: Buckets(LENGTH_BOUNDS))
    blocks: BlockLives = field(default_factory=BlockLives)

    def copy(self) -> Distributions:
        return Distributions(
            self.ttft.copy(), self.itl.copy(), self.e2e.copy(), self.queue.copy(), self.prompt_tokens.copy(),
            self.generation_tokens.copy(), self.blocks.copy(),
        )  # fmt: skip


@dataclass(eq=False)
class LiveRequest:
    """What the core remembers of a request until it ends. ``high_water``: one past the last position ever computed."""

    request: Request
    high_water: int = 0
    is_scheduled: bool = False
    last_token_ns: int | None = None


class CoreStats:
    """Times and distributions of one engine. Used from the engine thread only.

    ``counters`` are shared with scheduler and cache, which count everything but times, bytes, feedback and violations.
    """

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self.distributions = Distributions()
        self.ttft, self.itl, self.e2e, self.queue = Histogram(), Histogram(), Histogram(), Histogram()
        self.prompt_lengths, self.output_lengths = Histogram(), Histogram()

    def offered(self, request: Request) -> None:
        """An arrival, whatever becomes of it."""
        prompt_tokens = len(request.prompt_ids)
        self.prompt_lengths.observe(prompt_tokens / 1000)
        self.distributions.prompt_tokens.observe(prompt_tokens)

    def scheduled(self, live: LiveRequest, now_ns: int) -> None:
        """In a plan for the first time."""
        live.is_scheduled = True
        waited_s = self._duration_s(live.request.arrival_ns, now_ns)
        self.queue.observe(waited_s)
        self.distributions.queue.observe(waited_s)

    def step(self, plan: StepPlan, live: Sequence[LiveRequest], elapsed_ns: int) -> None:
        """Share the step's time out by tokens computed."""
        total = prefill = recomputed = 0
        for sequence, record in zip(plan.sequences, live, strict=True):
            start, number, known = sequence.start, sequence.num_tokens, record.high_water
            total += number
            if number > 1 or start < len(sequence.request.prompt_ids):
                prefill += number
            if known > start:
                recomputed += min(known, start + number) - start
            if known < start + number:
                record.high_water = start + number
        counters = self.counters
        counters.step_time_ns += elapsed_ns
        counters.prefill_time_ns += elapsed_ns * prefill // total
        counters.decode_time_ns += elapsed_ns - elapsed_ns * prefill // total
        counters.recompute_time_ns += elapsed_ns * recomputed // total

    def token(self, live: LiveRequest, now_ns: int) -> None:
        """One token left the model: a first one (TTFT from arrival, queueing included) or a gap (ITL)."""
        if live.last_token_ns is None:
            value = self._duration_s(live.request.arrival_ns, now_ns)
            self.ttft.observe(value)
            self.distributions.ttft.observe(value)
        else:
            value = self._duration_s(live.last_token_ns, now_ns)
            self.itl.observe(value)
            self.distributions.itl.observe(value)
        live.last_token_ns = now_ns

    def tokens(self, live: Sequence[LiveRequest], now_ns: int) -> None:
        """The same for several requests: those that had their last tokens together are counted together."""
        gaps: dict[int, int] = {}
        for record in live:
            last_ns = record.last_token_ns
            if last_ns is None or last_ns > now_ns:
                self.token(record, now_ns)
            else:
                gaps[last_ns] = gaps.get(last_ns, 0) + 1
                record.last_token_ns = now_ns
        for last_ns, times in gaps.items():
            self.gaps(now_ns - last_ns, times)

    def gaps(self, gap_ns: int, times: int) -> None:
        """As many requests had a token each, after equal gaps."""
        value = gap_ns / 1e9
        self.itl.observe(value, times)
        self.distributions.itl.observe(value, times)

    def all_gaps(self, gaps_ns: Sequence[int], times: int) -> None:
        """As many requests had a token after each of these gaps."""
        low_s, high_s = min(gaps_ns) / 1e9, max(gaps_ns) / 1e9
        total_s, number = sum(gaps_ns) / 1e9 * times, times * len(gaps_ns)
        distribution = self.distributions.itl
        if self.itl.is_one(low_s, high_s) and distribution.is_one(low_s, high_s):  # the usual case
            self.itl.observe_all(low_s, total_s, number)
            distribution.observe_all(low_s, total_s, number)
            return
        for gap_ns in gaps_ns:
            self.gaps(gap_ns, times)

    def completed(self, request: Request, now_ns: int) -> None:
        """Ended by stop or length."""
        value, length = self._duration_s(request.arrival_ns, now_ns), len(request.output_ids)
        self.e2e.observe(value)
        self.distributions.e2e.observe(value)
        self.output_lengths.observe(length / 1000)
        self.distributions.generation_tokens.observe(length)

    def _duration_s(self, start_ns: int, end_ns: int) -> float:
        """Seconds between two stamps; a negative span is a violation and counts as 0."""
        if end_ns < start_ns:
            self.counters.invariant_violations += 1
            _log.warning("dropped an impossible figure: a duration of %d ns", end_ns - start_ns)
            return 0.0
        return (end_ns - start_ns) / 1e9
