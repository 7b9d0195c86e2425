from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from engine.block_lives import BlockLives
from engine.clock import ManualClock
from engine.core_stats import Distributions
from engine.formats import BlockClass
from engine.metrics import ROUTES, EngineMetrics, documentation
from engine.pool_block import Block
from engine.stats import Counters, EngineStats, ResidentBytes
from engine.tunables import TUNABLES, default_values
from envs.features import FORMAT_NAMES


def reading(**counters: float) -> EngineStats:
    stats = EngineStats("i", "bytes", 1, 1024, 64, 0, default_values())
    stats.counters = Counters(**counters)  # type: ignore[arg-type]
    return stats


def values(page: bytes) -> dict[str, float]:
    samples = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def test_known_names_and_units() -> None:
    metrics = EngineMetrics(CollectorRegistry())
    stats = reading(step_time_ns=2_500_000_000, prefix_cache_queries=10, prefix_cache_hits=4)
    stats.gauges.kv_usage = 0.25
    stats.gauges.resident = [ResidentBytes("int8", 64, 4096, 64)]
    metrics.update(stats, Distributions())
    page = values(metrics.page())
    assert page["autotune_engine_step_seconds_total"] == 2.5
    assert page["autotune_engine_prefix_cache_hits_total"] == 4
    assert page["autotune_engine_kv_cache_usage"] == 0.25
    assert page["autotune_engine_kv_resident_bytes{block_size=64,kv_format=int8}"] == 4096
    assert page["autotune_engine_tunable_info{knob=kv_format,value=native}"] == 1
    assert "autotune_engine_tunable_info{knob=kv_format,value=int8}" not in page
    for name in ("num_requests_running", "num_requests_waiting", "num_preemptions_total"):
        assert f"autotune_engine_{name}" in page


def test_why_cached_blocks_went() -> None:
    metrics = EngineMetrics(CollectorRegistry())
    clock = ManualClock()
    lives = BlockLives(clock)
    block = Block(0, BlockClass("native", 16), 0)
    lives.cached(block)
    clock.advance_s(4)
    lives.reused(block)
    clock.advance_s(40)
    lives.gone(block, "orphaned")
    metrics.update(reading(), Distributions(blocks=lives))
    page = values(metrics.page())
    assert page["autotune_engine_prefix_blocks_dropped_total{reason=orphaned}"] == 1
    assert page["autotune_engine_prefix_blocks_dropped_total{reason=room}"] == 0
    assert page["autotune_engine_kv_block_lifetime_seconds_sum"] == 44
    assert page["autotune_engine_kv_block_idle_before_eviction_seconds_bucket{le=60.0}"] == 1
    assert page["autotune_engine_kv_block_idle_before_eviction_seconds_bucket{le=30.0}"] == 0
    assert page["autotune_engine_kv_block_reuse_gap_seconds_sum"] == 4


def test_the_engine_hands_out_a_copy_of_its_cache_s_lives(new_engine: Any) -> None:
    engine = new_engine()
    distributions = engine.core.distributions()
    engine.cache.lives.dropped["room"] += 1
    assert distributions.blocks.dropped["room"] == 0
    assert engine.core.distributions().blocks.dropped["room"] == 1


def test_unknown_is_absent_not_zero() -> None:
    metrics = EngineMetrics(CollectorRegistry())
    metrics.update(reading(), Distributions())
    assert "autotune_engine_device_memory_bytes" not in values(metrics.page())


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, 3])
def test_impossible_figures_are_dropped_and_counted(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    """Case I.33: serving goes on, the counter never falls, one log line and one violation."""
    metrics = EngineMetrics(CollectorRegistry())
    metrics.update(reading(prefix_cache_queries=99, prefix_cache_hits=7), Distributions())
    with caplog.at_level(logging.WARNING):
        metrics.update(reading(prefix_cache_queries=99, prefix_cache_hits=bad), Distributions())
    assert len(caplog.records) == 1
    page = values(metrics.page())
    assert page["autotune_engine_prefix_cache_hits_total"] == 7
    assert page["autotune_engine_metrics_invariant_violations_total"] == 1
    metrics.update(reading(prefix_cache_queries=99, prefix_cache_hits=9), Distributions())
    assert values(metrics.page())["autotune_engine_prefix_cache_hits_total"] == 9


def test_more_hits_than_queries_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    """Case I.33: hits beyond the prompt are dropped, whatever the queries say."""
    metrics = EngineMetrics(CollectorRegistry())
    metrics.update(reading(prefix_cache_queries=10, prefix_cache_hits=4), Distributions())
    with caplog.at_level(logging.WARNING):
        metrics.update(reading(prefix_cache_queries=20, prefix_cache_hits=25), Distributions())
    assert len(caplog.records) == 1
    page = values(metrics.page())
    assert page["autotune_engine_prefix_cache_queries_total"] == 20
    assert page["autotune_engine_prefix_cache_hits_total"] == 4
    assert page["autotune_engine_metrics_invariant_violations_total"] == 1


def test_series_stay_bounded() -> None:
    """Case I.35: whatever clients make up, no series follow, and all that there can be is at most 300."""
    metrics = EngineMetrics(CollectorRegistry())
    stats = reading()
    sizes = {kv_format: TUNABLES["block_size"].values[kv_format != "native" :] for kv_format in FORMAT_NAMES}
    stats.gauges.resident = [ResidentBytes(name, int(size), 1, 1) for name, row in sizes.items() for size in row]
    for name, value in vars(stats.gauges).items():
        if value is None:
            setattr(stats.gauges, name, 1)
    metrics.update(stats, Distributions())
    before = len(values(metrics.page()))
    for i in range(10_000):
        metrics.http_request(f"/v1/random/{i}", 400 + i % 5)
    metrics.http_request("/v1/completions", 200)
    page = metrics.page()
    assert len(values(page)) == before + 2
    assert values(page)["autotune_engine_http_requests_total{route=other,status=4xx}"] == 10_000
    for route in (*ROUTES, "/elsewhere"):
        for status in (200, 307, 404, 500):
            metrics.http_request(route, status)
    assert len(values(metrics.page())) <= 300


def test_the_documentation_names_exactly_what_is_served() -> None:
    metrics = EngineMetrics(CollectorRegistry())
    stats = reading()
    stats.gauges.memory_rss_bytes = stats.gauges.device_memory_bytes = 1
    stats.gauges.memory_bandwidth_bytes_per_s = stats.gauges.host_link_bytes_per_s = 1.0
    stats.gauges.host_link_is_emulated = True
    stats.gauges.evicted_running_tokens = stats.gauges.evicted_held_bytes = 0
    metrics.update(stats, Distributions())
    served = {}
    for family in text_string_to_metric_families(metrics.page().decode()):
        served[family.name + ("_total" if family.type == "counter" else "")] = family.type
    assert served == {name: kind for name, kind, _ in documentation()}


def test_two_engines_in_one_process_do_not_share_anything() -> None:
    first, second = EngineMetrics(CollectorRegistry()), EngineMetrics(CollectorRegistry())
    first.update(reading(steps=3), Distributions())
    second.update(reading(steps=5), Distributions())
    assert values(first.page())["autotune_engine_steps_total"] == 3
    assert values(second.page())["autotune_engine_steps_total"] == 5
