"""The engine's Prometheus page, made from readings of EngineStats. No module-level state: the registry is passed in.

Names carry the prefix ``autotune_engine_`` and follow Prometheus: base units, ``_total`` for counters. Labels only take
values declared in this code (formats, block sizes, knobs, routes): there are at most 300 series whatever clients send.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from engine.block_lives import REASONS, BlockLives
from engine.buckets import Buckets
from engine.core_stats import Distributions
from engine.stats import EngineStats
from engine.tunables import TUNABLES

PREFIX = "autotune_engine_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_log = logging.getLogger(__name__)

# Field of engine.stats.Counters -> (metric without prefix and _total, factor to base units, help).
_COUNTERS: Mapping[str, tuple[str, float, str]] = {
    "requests_offered": ("requests_offered", 1, "Requests that arrived, rejected ones included."),
    "requests_rejected": ("requests_rejected", 1, "Requests refused at admission: queue full or can never fit."),
    "requests_admitted": ("requests_admitted", 1, "Requests scheduled for the first time."),
    "requests_completed": ("request_success", 1, "Requests that ended by stop or length."),
    "requests_aborted": ("requests_aborted", 1, "Requests whose client went away or cancelled."),
    "requests_failed": ("requests_failed", 1, "Requests that ended with an error."),
    "offered_prompt_tokens": ("offered_prompt_tokens", 1, "Prompt tokens of all arrivals."),
    "prompt_tokens": ("prompt_tokens", 1, "Prompt tokens of requests that finished prefill, cached ones included."),
    "generation_tokens": ("generation_tokens", 1, "Tokens generated."),
    "prefill_tokens_computed": ("prefill_tokens_computed", 1, "Tokens computed in prefill, recomputed ones included."),
    "decode_tokens_computed": ("decode_tokens_computed", 1, "Tokens computed in decode steps."),
    "steps": ("steps", 1, "Steps of the engine."),
    "step_time_ns": ("step_seconds", 1e-9, "Time in steps, recoding apart."),
    "prefill_time_ns": ("prefill_seconds", 1e-9, "Step time shared out to prefill by tokens."),
    "decode_time_ns": ("decode_seconds", 1e-9, "Step time shared out to decode by tokens."),
    "recode_time_ns": ("recode_seconds", 1e-9, "Time in recoding resident KV."),
    "preemptions": ("num_preemptions", 1, "Times a running request lost its KV and had to wait."),
    "recomputed_tokens": ("recomputed_tokens", 1, "Tokens computed again after a preemption."),
    "recompute_time_ns": ("recompute_seconds", 1e-9, "Step time spent on recomputed tokens."),
    "prefix_cache_queries": ("prefix_cache_queries", 1, "Prompt tokens looked up, once per request at admission."),
    "prefix_cache_hits": ("prefix_cache_hits", 1, "Prompt tokens found in the prefix cache."),
    "prefix_pins_made": ("prefix_pins_made", 1, "Prefixes pinned at a request's wish."),
    "prefix_pins_refused": ("prefix_pins_refused", 1, "Wishes for a pin that ran into the cap; the request ran."),
    "prefix_pins_broken": ("prefix_pins_broken", 1, "Pins ended early for a request that had no room even alone."),
    "recoded_tokens": ("recoded_tokens", 1, "Tokens of KV moved to another format or block size."),
    "recoded_blocks": ("recoded_blocks", 1, "Blocks moved to another format or block size."),
    "evicted_tokens": ("evicted_tokens", 1, "Tokens of running requests whose KV eviction dropped."),
    "evicted_blocks": ("evicted_blocks", 1, "Blocks of running requests that eviction dropped."),
    "evicted_by_attention_tokens": ("evicted_by_attention_tokens", 1, "Evicted tokens that were chosen by attention."),
    "swapped_out": ("swapped_out", 1, "Preempted requests that kept their KV."),
    "swapped_in": ("swapped_in", 1, "Preempted requests that went on with the KV they had kept."),
    "swap_fallbacks": ("swap_fallbacks", 1, "Preempted requests that had kept their KV and lost it for want of room."),
    "host_out_bytes": ("host_out_bytes", 1, "KV copied to host memory."),
    "host_in_bytes": ("host_in_bytes", 1, "KV copied back from host memory, streamed bytes apart."),
    "host_streamed_bytes": ("host_streamed_bytes", 1, "KV of running requests that attention read from host memory."),
    "host_stream_wait_ns": ("host_stream_wait_seconds", 1e-9, "Time that computing waited for streamed KV."),
    "host_hit_tokens": ("prefix_cache_host_hits", 1, "Prompt tokens found in the prefix cache, in host memory."),
    "host_loads": ("host_loads", 1, "Times a request waited for KV from host memory."),
    "host_load_time_ns": ("host_load_seconds", 1e-9, "Time that requests waited for KV from host memory."),
    "kv_bytes_read": ("kv_read_bytes", 1, "KV bytes that attention covered, each sequence once a step."),
    "kv_bytes_written": ("kv_written_bytes", 1, "KV bytes written for new tokens."),
    "tunable_changes": ("tunable_changes", 1, "Values of tunables that were changed."),
    "feedback_count": ("feedback", 1, "Users' scores received."),
    "feedback_sum": ("feedback_score", 1, "Sum of users' scores, each 0 to 1."),
    "invariant_violations": ("metrics_invariant_violations", 1, "Impossible figures that were dropped."),
}
_GAUGES: Mapping[str, tuple[str, str]] = {
    "running": ("num_requests_running", "Requests that hold KV and run."),
    "waiting": ("num_requests_waiting", "Requests in the queue, preempted ones included."),
    "kv_usage": ("kv_cache_usage", "Share of the KV pool in use, 0 to 1, without reusable cached blocks."),
    "kv_pool_bytes": ("kv_pool_bytes", "Bytes of KV that requests may use."),
    "kv_used_bytes": ("kv_used_bytes", "Bytes of KV in use."),
    "kv_cached_bytes": ("kv_cached_bytes", "Bytes of reusable prefix blocks that no running request holds."),
    "host_pool_bytes": ("host_pool_bytes", "Host memory for KV; 0 without a host tier."),
    "host_used_bytes": ("host_used_bytes", "Host memory that requests hold, or that is being copied."),
    "host_cached_bytes": (
        "host_cached_bytes",
        "Host memory with reusable prefixes and copies of device blocks.",
    ),
    "parked": ("num_requests_parked", "Preempted requests that keep their KV."),
    "loading": ("num_requests_loading", "Admitted requests that wait for KV from host memory."),
    "host_link_bytes_per_s": ("host_link_bytes_per_second", "Rate of the link from host memory."),
    "host_link_is_emulated": ("host_link_emulated", "1 if that link is emulated, 0 if it is a device's."),
    "kv_pinned_bytes": ("kv_pinned_bytes", "Those of them that pins keep for a while."),
    "prefix_pins": ("prefix_pins", "Pinned prefixes."),
    "converged_fraction": ("kv_converged_fraction", "Share of resident KV stored as the tunables ask."),
    "held_below_format_bytes": ("kv_held_below_format_bytes", "KV stored lossier than the present kv_format."),
    "evicted_running_tokens": ("kv_evicted_tokens", "Tokens of running requests whose KV eviction has dropped."),
    "evicted_held_bytes": ("kv_evicted_held_bytes", "Dropped parts of blocks that are held for other parts."),
    "resident_tokens": ("kv_resident_tokens", "Tokens of resident KV."),
    "memory_rss_bytes": ("memory_rss_bytes", "Resident memory of the process."),
    "device_memory_bytes": ("device_memory_bytes", "Memory allocated on the device."),
    "memory_bandwidth_bytes_per_s": ("memory_bandwidth_bytes_per_second", "Measured peak bandwidth of the memory."),
}
_HISTOGRAMS: Mapping[str, tuple[str, str]] = {
    "ttft": ("time_to_first_token_seconds", "Arrival to first token, queueing included."),
    "itl": ("inter_token_latency_seconds", "Every gap between tokens of a request."),
    "e2e": ("e2e_request_latency_seconds", "Arrival to last token of completed requests."),
    "queue": ("request_queue_time_seconds", "Arrival to the first step that ran the request."),
    "prompt_tokens": ("request_prompt_tokens", "Prompt length of arrivals."),
    "generation_tokens": ("request_generation_tokens", "Output length of completed requests."),
}
_BLOCK_HISTOGRAMS: Mapping[str, tuple[str, str]] = {
    "lifetime": ("kv_block_lifetime_seconds", "First cached to gone, of blocks that left the prefix cache."),
    "idle": ("kv_block_idle_before_eviction_seconds", "Last use to gone, of blocks that left the prefix cache."),
    "reuse_gap": ("kv_block_reuse_gap_seconds", "Time since the last use, of cached blocks at each hit."),
}
_DROPPED = "prefix_blocks_dropped"
_DROPPED_TEXT = "Blocks that left the prefix cache, by reason."
ROUTES = (
    "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/feedback", "/tokenize", "/health", "/metrics",
)  # fmt: skip


def documentation() -> list[tuple[str, str, str]]:
    """(name, type, meaning) of every metric as served, for docs/metrics.md."""
    with_labels = [
        ("http_requests_total", "counter", "HTTP exchanges, by route and class of status."),
        ("info", "gauge", "The served model; always 1."),
        ("load", "gauge", "max(KV usage, requests / max_num_seqs), 0 to 1."),
        ("tunable_revision", "gauge", "Revision of the tunables."),
        ("kv_resident_bytes", "gauge", "Allocated KV, by kv_format and block_size."),
        ("tunable_info", "gauge", "1 for the value in force of each knob, by knob and value."),
    ]
    rows = [(f"{metric}_total", "counter", text) for metric, _, text in _COUNTERS.values()]
    rows += [(metric, "gauge", text) for metric, text in _GAUGES.values()]
    rows += [(metric, "histogram", text) for metric, text in (*_HISTOGRAMS.values(), *_BLOCK_HISTOGRAMS.values())]
    reasons = "; ".join(f"{reason}: {text}" for reason, text in REASONS.items())
    rows.append((f"{_DROPPED}_total", "counter", f"{_DROPPED_TEXT} {reasons}."))
    return [(PREFIX + name, kind, text) for name, kind, text in rows + with_labels]


class EngineMetrics:
    """A collector of one engine's metrics. Feed it a reading before each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._counters: dict[str, float] = {}
        self._stats: EngineStats | None = None
        self._distributions: Distributions | None = None
        self._violations = 0
        self._http: dict[tuple[str, str], int] = {}
        registry.register(self)

    def http_request(self, route: str, status: int) -> None:
        """Count one HTTP exchange; unknown routes count as ``other``, statuses by class."""
        key = (route if route in ROUTES else "other", f"{status // 100}xx")
        self._http[key] = self._http.get(key, 0) + 1

    def update(self, stats: EngineStats, distributions: Distributions) -> None:
        """Take a reading. A counter that fell, is negative or not a number keeps its last value and is counted as a
        violation: a bad figure must not reach a scraper, nor stop the serving (case I.33).
        """
        figures = vars(stats.counters)
        for name, (metric, factor, _) in _COUNTERS.items():
            value, last = figures[name], self._counters.get(name, 0.0)
            most = self._counters["prefix_cache_queries"] if name == "prefix_cache_hits" else math.inf
            if isinstance(value, int | float) and math.isfinite(value) and last <= value * factor <= most:
                self._counters[name] = value * factor
            else:
                self._violations += 1
                _log.warning("dropped an impossible figure: %s%s_total = %r after %r", PREFIX, metric, value, last)
        self._stats, self._distributions = stats, distributions

    def page(self) -> bytes:
        """Everything in the registry in the text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._http_families()
        if self._stats is None or self._distributions is None:
            return
        yield from self._counter_families()
        yield from self._gauge_families(self._stats)
        for name, (metric, text) in _HISTOGRAMS.items():
            yield _histogram(PREFIX + metric, text, getattr(self._distributions, name))
        yield from self._block_families(self._distributions.blocks)

    @staticmethod
    def _block_families(blocks: BlockLives) -> Iterator[Metric]:
        for name, (metric, text) in _BLOCK_HISTOGRAMS.items():
            yield _histogram(PREFIX + metric, text, getattr(blocks, name))
        dropped = CounterMetricFamily(PREFIX + _DROPPED, _DROPPED_TEXT, labels=("reason",))
        for reason, count in blocks.dropped.items():
            dropped.add_metric((reason,), count)
        yield dropped

    def _http_families(self) -> Iterator[Metric]:
        family = CounterMetricFamily(PREFIX + "http_requests", "HTTP exchanges.", labels=("route", "status"))
        for (route, status), count in sorted(self._http.items()):
            family.add_metric((route, status), count)
        yield family

    def _counter_families(self) -> Iterator[Metric]:
        for name, (metric, _, text) in _COUNTERS.items():
            value = self._counters.get(name, 0.0)
            if name == "invariant_violations":
                value += self._violations
            yield CounterMetricFamily(PREFIX + metric, text, value=value)

    def _gauge_families(self, stats: EngineStats) -> Iterator[Metric]:
        info = GaugeMetricFamily(PREFIX + "info", "The served model; always 1.", labels=("model_name",))
        info.add_metric((stats.model,), 1)
        yield info
        for name, (metric, text) in _GAUGES.items():
            value = getattr(stats.gauges, name)
            if value is not None:  # unknown is absent, never 0
                yield GaugeMetricFamily(PREFIX + metric, text, value=value)
        yield GaugeMetricFamily(PREFIX + "load", "max(KV usage, requests / max_num_seqs), 0 to 1.", value=stats.load)
        revision = GaugeMetricFamily(PREFIX + "tunable_revision", "Revision of the tunables.", value=stats.revision)
        yield revision
        by_class = GaugeMetricFamily(
            PREFIX + "kv_resident_bytes", "Allocated KV by class.", labels=("kv_format", "block_size")
        )
        for row in stats.gauges.resident:
            by_class.add_metric((row.kv_format, str(row.block_size)), row.bytes)
        yield by_class
        tunables = GaugeMetricFamily(
            PREFIX + "tunable_info", "1 for the value in force of each knob.", labels=("knob", "value")
        )
        for name in TUNABLES:
            if name in stats.effective:
                tunables.add_metric((name, str(stats.effective[name])), 1)
        yield tunables


def _histogram(name: str, text: str, buckets: Buckets) -> HistogramMetricFamily:
    cumulative, rows = 0, []
    for bound, count in zip((*map(str, buckets.bounds), "+Inf"), buckets.counts, strict=True):
        cumulative += count
        rows.append((bound, float(cumulative)))
    return HistogramMetricFamily(name, text, buckets=rows, sum_value=buckets.total)
