"""What a scrape shows: exact figures, unknown as unknown, and a bounded number of series."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from autotune.metrics import DaemonMetrics, Snapshot
from autotune.metrics_decisions import writer_class
from engine.clock import ManualClock
from engine.stats import ResidentBytes
from engine.tunables import TUNABLES
from envs.window import StatsWindow


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> DaemonMetrics:
    return DaemonMetrics(registry)


def scrape(registry: CollectorRegistry) -> dict[Any, float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [((s.name, frozenset(s.labels.items())), s.value) for family in families for s in family.samples]
    assert len(dict(samples)) == len(samples), "a series is given twice"
    return dict(samples)


def value(registry: CollectorRegistry, name: str, **labels: Any) -> float:
    return scrape(registry)[name, frozenset(labels.items())]


def window(fakes: Any, *, seconds: Any = 10.0) -> StatsWindow:
    clock = ManualClock(start_ns=10**9)
    engine = fakes.FakeEngine(clock)
    before = engine.stats()
    engine.serve_requests(6, ttft_s=0.3, gap_s=0.05, tokens=11)
    engine.serve_requests(3, ttft_s=0.9, gap_s=0.05, tokens=11)
    engine.serve_requests(1, ttft_s=30, gap_s=0.0004, tokens=11)
    counters = engine.figures.counters
    counters.requests_failed, counters.requests_rejected, counters.requests_aborted = 1, 1, 5
    counters.prefix_cache_queries, counters.prefix_cache_hits = 1000, 250
    counters.prefill_tokens_computed, counters.prefill_time_ns = 750, 2_000_000_000
    counters.kv_bytes_read, counters.kv_bytes_written = 9_000_000_000, 1_000_000_000
    engine.figures.gauges.memory_bandwidth_bytes_per_s = 1e10
    clock.advance_s(seconds)
    return StatsWindow.between(before, engine.stats())


def test_figures_of_all_three_groups(fakes: Any, metrics: DaemonMetrics, registry: CollectorRegistry) -> None:
    seen = window(fakes)
    metrics.snapshot = Snapshot(reading=seen.after, window=seen, ttft_target_s=0.5, tbt_target_s=0.1)
    assert value(registry, "autotune_memory_bandwidth_ratio") == pytest.approx(0.1)
    assert value(registry, "autotune_kv_resident_bytes", kv_format="native", block_size="16") > 0
    assert value(registry, "autotune_tokens_per_second", phase="prefill") == pytest.approx(75)
    assert value(registry, "autotune_phase_time_ratio", phase="prefill") == pytest.approx(0.2)
    assert value(registry, "autotune_prefix_cache_hit_ratio") == 0.25
    assert value(registry, "autotune_request_success_ratio") == pytest.approx(10 / 12)
    # six satisfied, three tolerated (0.9 s <= 4 x 0.5 s), one frustrated
    assert value(registry, "autotune_apdex_score", metric="ttft") == pytest.approx((6 + 3 / 2) / 10)
    assert value(registry, "autotune_within_target_ratio", metric="tbt") == 1
    assert value(registry, "autotune_window_ttft_seconds", percentile="50") == pytest.approx(0.3, rel=0.06)


def test_histograms_are_in_seconds_with_exact_cumulative_buckets(
    fakes: Any, metrics: DaemonMetrics, registry: CollectorRegistry
) -> None:
    seen = window(fakes)
    metrics.snapshot = Snapshot(reading=seen.after, window=seen)
    samples = scrape(registry)
    assert value(registry, "autotune_time_to_first_token_seconds_sum") == pytest.approx(6 * 0.3 + 3 * 0.9 + 30)
    assert value(registry, "autotune_time_to_first_token_seconds_count") == 10
    buckets = {
        float(dict(labels)["le"]): count
        for (name, labels), count in samples.items()
        if name == "autotune_inter_token_latency_seconds_bucket"
    }
    assert min(buckets) == pytest.approx(0.0005, rel=0.02), "the gap between tokens is told from half a millisecond"
    assert buckets[math.inf] == 100
    assert list(buckets.values()) == sorted(buckets.values())
    for bound, count in buckets.items():
        if bound < 0.04:
            assert count == 10  # the ten gaps of 0.4 ms are below every bound
        elif bound > 0.06:
            assert count == 100


def test_unknown_is_nan_or_absent_and_never_zero(
    fakes: Any, metrics: DaemonMetrics, registry: CollectorRegistry
) -> None:
    metrics.snapshot = Snapshot(mode="active")
    names = {name for name, _ in scrape(registry)}
    assert "autotune_kv_cache_usage" not in names
    assert "autotune_requests_total" not in names
    engine = fakes.FakeEngine(ManualClock(start_ns=1))
    metrics.snapshot = Snapshot(reading=engine.stats())
    for name, labels in (
        ("autotune_user_score", {}),
        ("autotune_request_success_ratio", {}),
        ("autotune_prefix_cache_hit_ratio", {}),
        ("autotune_apdex_score", {"metric": "ttft"}),
        ("autotune_engine_memory_bytes", {"kind": "device"}),
        ("autotune_memory_bandwidth_ratio", {}),
    ):
        assert math.isnan(value(registry, name, **labels)), name


def test_series_are_bounded_whatever_names_come_in(
    fakes: Any, metrics: DaemonMetrics, registry: CollectorRegistry
) -> None:
    rng = random.Random(1)
    engine = fakes.FakeEngine(ManualClock(start_ns=1))
    for number in range(10_000):
        noise = f'x{rng.random()}\n"{number}'
        metrics.count_decision(noise, noise, noise, noise, "applied")
        metrics.count_decision("kv_format", noise, "rule", f"operator:{noise}", "applied")
        metrics.count_decision("kv_format", "int8", "rule", "autotune", "applied")
        metrics.count_decision("kv_format", "int8", f"rule {number % 90}", "autotune", "applied")
        metrics.count_decision("kv_format", "int8", "rule", "autotune", noise)
    sizes = TUNABLES["block_size"].values  # blocks of 16 tokens are native only
    classes = [(name, n) for name in TUNABLES["kv_format"].values for n in sizes if n != 16 or name == "native"]
    engine.figures.gauges.resident = [ResidentBytes(str(name), int(size), 1, 1) for name, size in classes]
    engine.figures.gauges.resident += [ResidentBytes(f"f{n}", n, 1, 1) for n in range(1000)]
    reading = engine.stats()
    reading.effective |= {f"k{n}": n for n in range(1000)}
    metrics.snapshot = Snapshot(reading=reading)
    samples = scrape(registry)
    decisions = {labels: count for (name, labels), count in samples.items() if name == "autotune_decisions_total"}
    assert len(decisions) > 60, "all of them count as other"
    folded = ("kv_format", "other", "other", "autotune", "applied")
    assert decisions[frozenset(zip(("knob", "to", "scenario", "writer", "verdict"), folded, strict=True))] > 1000
    assert sum(decisions.values()) == 50_000
    # The daemon makes none of the library's times of creation.
    assert len([name for name, _ in samples if not name.endswith("_created")]) <= 300


def test_writers_are_classes() -> None:
    assert writer_class("operator:anna") == "operator"
    assert writer_class("autotune") == "autotune"
    assert writer_class("somebody") == "other"


def test_two_registries_do_not_meet() -> None:
    DaemonMetrics(CollectorRegistry())
    DaemonMetrics(CollectorRegistry())


def test_names_follow_the_conventions(fakes: Any, metrics: DaemonMetrics, registry: CollectorRegistry) -> None:
    seen = window(fakes)
    metrics.snapshot = Snapshot(reading=seen.after, window=seen)
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        assert family.documentation, family.name
        assert family.name.startswith(("autotune_", "process_")), family.name
        if family.type == "counter":
            assert all(s.name.endswith(("_total", "_created")) for s in family.samples)
