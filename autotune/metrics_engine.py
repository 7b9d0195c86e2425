"""What the daemon tells Prometheus of the engine: resource, performance and business figures."""

from __future__ import annotations

import math
from collections import Counter as Counts
from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from autotune.metrics_families import counter, gauge, histogram, or_nan
from engine.stats import HISTOGRAM_BUCKETS, EngineStats
from engine.tunables import TUNABLES, Tunable
from envs.window import StatsWindow, ratio

_PERCENTILES: Final = (50, 95, 99)
# Exact bounds of the engine's own logarithmic buckets. Of what has a target every sixth (77 % apart): TTFT from 1.6 ms
# to 14 min, gaps between tokens from 0.5 ms to 26 s. Of the rest every twelfth, from 5 ms and 1.6 ms to 15 min.
_TTFT_STEPS: Final = range(29, 168, 6)
_GAP_STEPS: Final = range(17, 133, 6)
_REQUEST_STEPS: Final = range(41, HISTOGRAM_BUCKETS - 1, 12)
_QUEUE_STEPS: Final = range(29, HISTOGRAM_BUCKETS - 1, 12)


def engine_families(
    reading: EngineStats,
    window: StatsWindow,
    ttft_target_s: float,
    tbt_target_s: float,
    tunables: Mapping[str, Tunable],
) -> Iterator[Metric]:
    """Families of one reading and of the window that ends with it. ``tunables``: the engine's knobs."""
    yield from _resource(reading, window, tunables)
    yield from _performance(reading, window)
    yield from _business(reading, window, {"ttft": ("ttft", ttft_target_s), "tbt": ("itl", tbt_target_s)})


def _resource(reading: EngineStats, window: StatsWindow, tunables: Mapping[str, Tunable]) -> Iterator[Metric]:
    gauges, counters = reading.gauges, reading.counters
    yield gauge("autotune_kv_cache_usage", "Share of the KV pool in use, 0 to 1.", gauges.kv_usage)
    pool = GaugeMetricFamily("autotune_kv_cache_bytes", "KV pool: its size, used, reusable prefix.", labels=["part"])
    for part, value in (
        ("pool", gauges.kv_pool_bytes),
        ("used", gauges.kv_used_bytes),
        ("cached", gauges.kv_cached_bytes),
    ):
        pool.add_metric([part], or_nan(value))
    yield pool
    labels = ["kv_format", "block_size"]
    stored = GaugeMetricFamily("autotune_kv_resident_bytes", "KV bytes by format and block size.", labels=labels)
    tokens = GaugeMetricFamily("autotune_kv_resident_tokens", "KV tokens by format.", labels=["kv_format"])
    bytes_of: Counts[tuple[str, str]] = Counts()
    tokens_of: Counts[str] = Counts()
    for row in gauges.resident or ():  # summed, since undeclared classes share the label "other"
        known = (_declared(TUNABLES["kv_format"], row.kv_format), _declared(TUNABLES["block_size"], row.block_size))
        names = ("other", "other") if "other" in known else known
        bytes_of[names] += row.bytes
        tokens_of[names[0]] += row.tokens
    for names, total in bytes_of.items():
        stored.add_metric(names, total)
    for name, total in tokens_of.items():
        tokens.add_metric([name], total)
    yield stored
    yield tokens
    yield gauge("autotune_kv_converged_ratio", "Share of KV already as the knobs say.", gauges.converged_fraction)
    below = gauges.held_below_format_bytes
    yield gauge("autotune_kv_held_below_format_bytes", "KV stored in a lossier format than asked for.", below)
    memory = GaugeMetricFamily("autotune_engine_memory_bytes", "The engine's memory.", labels=["kind"])
    memory.add_metric(["rss"], or_nan(gauges.memory_rss_bytes))
    memory.add_metric(["device"], or_nan(gauges.device_memory_bytes))
    yield memory
    yield counter("autotune_kv_read_bytes", "KV bytes read by attention.", counters.kv_bytes_read)
    yield counter("autotune_kv_written_bytes", "KV bytes written.", counters.kv_bytes_written)
    moved = or_nan(window.rate("kv_bytes_read")) + or_nan(window.rate("kv_bytes_written"))
    yield gauge("autotune_kv_bandwidth_bytes_per_second", "KV bytes moved per second of the window.", moved)
    peak = gauges.memory_bandwidth_bytes_per_s
    yield gauge(
        "autotune_memory_bandwidth_ratio", "That, of the device's measured peak.", moved / peak if peak else math.nan
    )
    settings = GaugeMetricFamily("autotune_tunable", "1 for the value in force.", labels=["knob", "value"])
    for knob, setting in reading.effective.items():
        if knob in tunables:
            settings.add_metric([knob, _declared(tunables[knob], setting)], 1)
    yield settings


def _performance(reading: EngineStats, window: StatsWindow) -> Iterator[Metric]:
    gauges, counters = reading.gauges, reading.counters
    histograms = (
        (
            "autotune_time_to_first_token_seconds",
            "Arrival to first token, queueing included.",
            reading.ttft,
            _TTFT_STEPS,
        ),
        ("autotune_inter_token_latency_seconds", "Every gap between two tokens.", reading.itl, _GAP_STEPS),
        ("autotune_e2e_request_latency_seconds", "Arrival to last token.", reading.e2e, _REQUEST_STEPS),
        ("autotune_request_queue_time_seconds", "Arrival to first scheduled.", reading.queue, _QUEUE_STEPS),
    )
    for name, text, values, steps in histograms:
        yield histogram(name, text, values, steps)
    for name, text, attribute in (
        ("autotune_window_ttft_seconds", "Percentiles of TTFT over the window.", "ttft"),
        ("autotune_window_tbt_seconds", "Percentiles of the gap between tokens over the window.", "itl"),
    ):
        quantiles = GaugeMetricFamily(name, text, labels=["percentile"])
        for percentile in _PERCENTILES:
            quantiles.add_metric([str(percentile)], or_nan(window.quantile(attribute, percentile / 100)))
        yield quantiles
    yield gauge("autotune_num_requests_running", "Sequences running.", gauges.running)
    yield gauge("autotune_num_requests_waiting", "Requests waiting.", gauges.waiting)
    together = or_nan(gauges.running) + or_nan(gauges.waiting)
    yield gauge("autotune_concurrent_sessions", "Running and waiting together.", together)
    load = reading.load if gauges.kv_usage is not None and reading.max_num_seqs is not None else None
    yield gauge("autotune_load", "max(KV usage, concurrency), clipped to 1.", load)
    yield counter("autotune_prefill_tokens", "Prompt tokens computed.", counters.prefill_tokens_computed)
    yield counter("autotune_decode_tokens", "Tokens decoded.", counters.decode_tokens_computed)
    rates = GaugeMetricFamily("autotune_tokens_per_second", "Over the window.", labels=["phase"])
    rates.add_metric(["prefill"], or_nan(window.rate("prefill_tokens_computed")))
    rates.add_metric(["decode"], or_nan(window.rate("decode_tokens_computed")))
    yield rates
    times = CounterMetricFamily("autotune_phase_time_seconds", "Time spent, by phase.", labels=["phase"])
    shares = GaugeMetricFamily("autotune_phase_time_ratio", "Share of the window's time, by phase.", labels=["phase"])
    for phase in ("step", "prefill", "decode", "recode", "recompute"):
        spent_ns = getattr(counters, f"{phase}_time_ns")
        if spent_ns is not None:
            times.add_metric([phase], spent_ns / 1e9)
        shares.add_metric([phase], or_nan(window.rate(f"{phase}_time_ns", 1e-9)))
    yield times
    yield shares
    yield counter("autotune_num_preemptions", "Sequences preempted.", counters.preemptions)
    yield counter("autotune_recomputed_tokens", "Tokens computed again after preemption.", counters.recomputed_tokens)
    yield counter("autotune_recoded_tokens", "Tokens recoded to another class.", counters.recoded_tokens)
    yield counter("autotune_evicted_tokens", "Tokens dropped from running sequences.", counters.evicted_tokens)
    yield counter("autotune_prefix_cache_queries", "Prompt tokens looked up.", counters.prefix_cache_queries)
    yield counter("autotune_prefix_cache_hits", "Prompt tokens found.", counters.prefix_cache_hits)
    hits = ratio(window.count("prefix_cache_hits"), window.count("prefix_cache_queries"))
    yield gauge("autotune_prefix_cache_hit_ratio", "Over the window.", or_nan(hits))


def _business(reading: EngineStats, window: StatsWindow, targets: Mapping[str, tuple[str, float]]) -> Iterator[Metric]:
    """``targets``: by label, the histogram and its target."""
    counters = reading.counters
    requests = CounterMetricFamily("autotune_requests", "Requests by what became of them.", labels=["outcome"])
    for outcome in ("offered", "admitted", "completed", "rejected", "aborted", "failed"):
        number = getattr(counters, f"requests_{outcome}")
        if number is not None:
            requests.add_metric([outcome], number)
    yield requests
    yield gauge(
        "autotune_request_success_ratio", "Completed of completed, failed and rejected.", or_nan(success_ratio(window))
    )
    apdex_scores = GaugeMetricFamily("autotune_apdex_score", "Apdex over the window, 0 to 1.", labels=["metric"])
    inside = GaugeMetricFamily("autotune_within_target_ratio", "Share inside the target.", labels=["metric"])
    for metric, (attribute, target) in targets.items():
        apdex_scores.add_metric([metric], or_nan(apdex(window, attribute, target)))
        inside.add_metric([metric], or_nan(window.share_within(attribute, target)))
    yield apdex_scores
    yield inside
    yield counter("autotune_user_feedback", "Scores that users gave.", counters.feedback_count)
    score = ratio(window.count("feedback_sum"), window.count("feedback_count"))
    yield gauge("autotune_user_score", "Mean of the users' scores in the window; unknown when none.", or_nan(score))


def success_ratio(window: StatsWindow) -> float | None:
    """Completed requests of those that ended otherwise than by their client's own wish; None when none ended."""
    ended = [window.count(f"requests_{outcome}") for outcome in ("completed", "failed", "rejected")]
    known = [count for count in ended if count is not None]
    return ratio(ended[0], sum(known)) if len(known) == len(ended) else None


def apdex(window: StatsWindow, histogram: str, target_s: float) -> float | None:
    """Apdex (apdex.org): satisfied up to the target, half a point up to four times it; None without values."""
    satisfied, tolerated = (window.share_within(histogram, factor * target_s) for factor in (1, 4))
    return None if satisfied is None or tolerated is None else (satisfied + tolerated) / 2


def _declared(tunable: Tunable, value: object) -> str:
    return str(value) if value in tunable.values else "other"
