"""What the engine tells about itself. Stdlib only: the daemon reads it without torch.

Counters are cumulative since the engine started and gauges instantaneous, both under one monotonic stamp, so a window
is a difference of two readings and a missed poll loses nothing. Unknown is None, never 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from itertools import accumulate
from typing import Any, get_type_hints

from engine.shapes import fits
from engine.text import one_line

HISTOGRAM_START_S = 1e-4
HISTOGRAM_GROWTH = 1.1
HISTOGRAM_BUCKETS = 176  # up to about 1,750 s; the last one also takes everything beyond
# Upper bounds of all but the last, a hair wider, so that a value computed to lie on a bound lies under it.
_EDGES_S = [HISTOGRAM_START_S * HISTOGRAM_GROWTH ** (index + 1e-9) for index in range(HISTOGRAM_BUCKETS - 1)]
# Geometric middles of all buckets.
_MIDDLES_S = [HISTOGRAM_START_S * HISTOGRAM_GROWTH**i / math.sqrt(HISTOGRAM_GROWTH) for i in range(HISTOGRAM_BUCKETS)]


@dataclass
class Histogram:
    """Durations in logarithmic buckets 10 % apart: fine enough that window quantiles err by under 5 %.

    ``counts[i]`` counts values in (bound(i - 1), bound(i)].
    """

    counts: list[int] = field(default_factory=lambda: [0] * HISTOGRAM_BUCKETS)
    sum_s: float = 0.0

    @staticmethod
    def bound_s(index: int) -> float:
        """Upper bound of a bucket in seconds."""
        return float(HISTOGRAM_START_S * HISTOGRAM_GROWTH**index)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value_s: float, times: int = 1) -> None:
        """Add a duration. Raises ValueError for a negative or non-finite one."""
        if not 0 <= value_s < math.inf:
            raise ValueError(f"a duration must be finite and >= 0 s, got {value_s}")
        self.counts[bisect_left(_EDGES_S, value_s)] += times
        self.sum_s += value_s * times

    def is_one(self, low_s: float, high_s: float) -> bool:
        """Whether both durations fall into the same bucket."""
        return bisect_left(_EDGES_S, low_s) == bisect_left(_EDGES_S, high_s)

    def observe_all(self, value_s: float, total_s: float, times: int) -> None:
        """Add durations that sum up to ``total_s``, all of the bucket of ``value_s``; for those that cannot be bad."""
        self.counts[bisect_left(_EDGES_S, value_s)] += times
        self.sum_s += total_s

    def since(self, earlier: Histogram) -> Histogram:
        """The values added after ``earlier`` was read."""
        counts = [now - before for now, before in zip(self.counts, earlier.counts, strict=True)]
        return Histogram(counts, self.sum_s - earlier.sum_s)

    def quantile_s(self, q: float) -> float | None:
        """The q-quantile in seconds (geometric middle of its bucket), or None without values."""
        seen = list(accumulate(self.counts))
        if not seen or seen[-1] == 0:
            return None
        return _MIDDLES_S[bisect_left(seen, max(1, math.ceil(q * seen[-1])))]

    def share_within(self, limit_s: float) -> float | None:
        """Share of values whose bucket ends at or below ``limit_s`` (to bucket resolution), None without values."""
        total = self.count
        if total == 0:
            return None
        return sum(self.counts[: bisect_right(_MIDDLES_S, limit_s)]) / total


@dataclass
class Counters:
    """Cumulative since start. ``offered`` counts every arrival, rejected ones too."""

    requests_offered: int = 0
    requests_rejected: int = 0  # refused at admission: queue full (429) or can never fit (4xx)
    requests_admitted: int = 0  # first scheduled
    requests_completed: int = 0  # finished by stop or length
    requests_aborted: int = 0
    requests_failed: int = 0
    offered_prompt_tokens: int = 0
    prompt_tokens: int = 0  # of prompts that finished prefill, cached ones included
    generation_tokens: int = 0
    prefill_tokens_computed: int = 0
    decode_tokens_computed: int = 0
    steps: int = 0
    step_time_ns: int = 0
    prefill_time_ns: int = 0  # step time, shared out by tokens computed
    decode_time_ns: int = 0
    recode_time_ns: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    recompute_time_ns: int = 0
    prefix_cache_queries: int = 0  # tokens, counted once per request at admission
    prefix_cache_hits: int = 0  # tokens
    prefix_pins_made: int = 0  # prefixes pinned
    prefix_pins_refused: int = 0  # beyond the cap: the request ran unpinned
    prefix_pins_broken: int = 0  # ended early for a request that ran alone and had no other room
    recoded_tokens: int = 0
    recoded_blocks: int = 0
    evicted_tokens: int = 0
    evicted_blocks: int = 0
    evicted_by_attention_tokens: int = 0  # of evicted_tokens, those chosen by attention mass
    swapped_out: int = 0  # preempted requests that kept their KV
    swapped_in: int = 0  # those of them that went on with it
    swap_fallbacks: int = 0  # those of them that had to compute it again
    host_out_bytes: int = 0  # KV copied to the host
    host_in_bytes: int = 0  # and back, streamed bytes apart
    host_streamed_bytes: int = 0  # KV of running requests read from the host by attention
    host_stream_wait_ns: int = 0  # how long computing waited for those
    host_hit_tokens: int = 0  # prefix hits, the part that came from the host
    host_loads: int = 0  # times a request waited for KV from the host
    host_load_time_ns: int = 0  # how long they waited
    kv_bytes_read: int = 0  # by attention
    kv_bytes_written: int = 0
    tunable_changes: int = 0
    feedback_count: int = 0
    feedback_sum: float = 0.0
    invariant_violations: int = 0


@dataclass
class ResidentBytes:
    """Bytes of allocated KV blocks of one class."""

    kv_format: str
    block_size: int
    bytes: int
    tokens: int


@dataclass
class Gauges:
    """Instantaneous values. ``kv_usage``: 0 to 1 of the pool that requests may use, without reusable cached blocks."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    kv_pool_bytes: int = 0
    kv_used_bytes: int = 0
    kv_cached_bytes: int = 0  # reusable prefix blocks that no running request holds
    host_pool_bytes: int = 0  # host memory for KV; 0: there is no host tier
    host_used_bytes: int = 0  # held by requests there, or being copied
    host_cached_bytes: int = 0  # prefixes nobody holds, and copies of blocks that are on the device as well
    parked: int = 0  # preempted requests that keep their KV, on the host or on their way
    loading: int = 0  # admitted requests that wait for KV from the host
    host_link_bytes_per_s: float | None = None  # from the host; None without a host tier
    host_link_is_emulated: bool | None = None  # a configured rate on a machine without a GPU: no device was measured
    kv_pinned_bytes: int = 0  # those of them that pins keep
    prefix_pins: int = 0
    resident: list[ResidentBytes] = field(default_factory=list)
    converged_fraction: float = 1.0  # share of resident quantisable bytes already in the class they should have
    held_below_format_bytes: int = 0  # stored lossier than the current kv_format asks for
    resident_tokens: int = 0  # computed by requests that run now; shared ones for each of them, evicted ones too
    evicted_running_tokens: int | None = None  # tokens seen by requests that run now, whose KV eviction has dropped
    evicted_held_bytes: int | None = None  # dropped parts of blocks that are held for other parts, until they are split
    kv_bytes_per_token: dict[str, float] = field(default_factory=dict)  # by format, all groups, full blocks; {} unknown
    memory_rss_bytes: int | None = None
    device_memory_bytes: int | None = None
    memory_bandwidth_bytes_per_s: float | None = None  # measured peak of the device, for shares of it


@dataclass
class EngineStats:
    """One reading of the engine. ``instance`` changes when the engine restarts, so counters start again at 0."""

    instance: str
    model: str
    stamp_ns: int
    max_model_len: int
    max_num_seqs: int
    revision: int
    effective: dict[str, str | int]
    counters: Counters = field(default_factory=Counters)
    gauges: Gauges = field(default_factory=Gauges)
    ttft: Histogram = field(default_factory=Histogram)  # arrival to first token, queueing included
    itl: Histogram = field(default_factory=Histogram)  # every gap between tokens (TBT)
    e2e: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)  # arrival to first scheduled
    prompt_lengths: Histogram = field(default_factory=Histogram)  # tokens / 1000 in place of seconds
    output_lengths: Histogram = field(default_factory=Histogram)  # tokens / 1000 in place of seconds

    @property
    def load(self) -> float:
        """max(KV usage, (running + waiting) / max_num_seqs), clipped to 1."""
        concurrency = (self.gauges.running + self.gauges.waiting) / max(1, self.max_num_seqs)
        return min(1.0, max(self.gauges.kv_usage, concurrency))

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EngineStats:
        """Inverse of :meth:`to_json`. Raises ValueError for missing or ill-typed parts; unknown keys are ignored."""
        try:
            values = {name: data[name] for name in _NAMES[EngineStats]}
            values["counters"] = Counters(**_known(Counters, data["counters"]))
            gauges = _known(Gauges, data["gauges"])
            gauges["resident"] = [ResidentBytes(**_known(ResidentBytes, row)) for row in gauges["resident"]]
            values["gauges"] = Gauges(**gauges)
            for name in ("ttft", "itl", "e2e", "queue", "prompt_lengths", "output_lengths"):
                histogram = Histogram(list(data[name]["counts"]), float(data[name]["sum_s"]))
                if len(histogram.counts) != HISTOGRAM_BUCKETS:
                    raise ValueError(f"{name}: expected {HISTOGRAM_BUCKETS} buckets, got {len(histogram.counts)}")
                values[name] = histogram
        except (ArithmeticError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(one_line(f"not an engine stats reading: {error!r}")) from error
        wrong = [name for name, kind in _PLAIN.items() if not fits(values[name], kind)]
        if wrong:
            raise ValueError(one_line(f"not an engine stats reading: {wrong[0]} is {values[wrong[0]]!r}", 200))
        return cls(**values)


def _known(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    names = _NAMES[kind]
    return {name: value for name, value in data.items() if name in names}


# Once: every daemon asks for them twice a second.
_NAMES: Mapping[type[Any], frozenset[str]] = {
    kind: frozenset(item.name for item in fields(kind)) for kind in (EngineStats, Counters, Gauges, ResidentBytes)
}
_PLAIN: Mapping[str, Any] = {name: kind for name, kind in get_type_hints(EngineStats).items() if not is_dataclass(kind)}
