"""The host tier in the step loop: copies beside the steps, waiting for them, and what is said about them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from engine.core_thread import EngineThread
from engine.metrics import EngineMetrics
from engine.request import CachePolicy, FinishReason, Request, SamplingParams
from engine.stats import EngineStats
from engine.tunable_state import Patch

Build = Callable[..., Any]


def ask(name: str, prompt_tokens: int = 200, max_tokens: int = 100, **cache: Any) -> Request:
    prompt = [(len(name) * 7 + i * 13 + ord(name[0])) % 256 for i in range(prompt_tokens)]
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), 0, CachePolicy(**cache))


def tight(new_engine: Build, **options: Any) -> Any:
    """Three requests of 300 tokens do not fit together."""
    return new_engine(**{"pool_tokens": 1024, "host_pool_tokens": 4096, "host_offload": "on"} | options)


def run(engine: Any, limit: int = 20_000) -> list[int]:
    """Step until nothing is left, as the engine's thread does; pauses in nanoseconds."""
    pauses = []
    for _ in range(limit):
        pause_s = engine.core.pause_s
        if pause_s is None:
            return pauses
        if pause_s:
            pauses.append(round(pause_s * 1e9))
            engine.clock.advance_s(pause_s)
        if engine.core.has_work:
            engine.core.step()
            engine.clock.advance_s(0.001)
        else:
            engine.core.background()
        engine.cache.check_integrity()
    raise AssertionError(f"not idle after {limit} steps")


def test_preempted_requests_are_swapped_and_an_idle_engine_finishes_its_copies(new_engine: Build) -> None:
    engine = tight(new_engine)
    requests = [ask(name, use_prefix_cache=False) for name in "abcd"]
    for request in requests:
        engine.core.add(request)
    run(engine)
    counters = engine.core.stats().counters
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)
    assert counters.swapped_out == counters.swapped_in > 0
    assert counters.recomputed_tokens == 0
    assert counters.requests_failed == 0
    assert engine.cache.num_transfers == 0


def test_waiting_for_a_slow_link_is_no_reason_to_fail_and_no_spinning(new_engine: Build) -> None:
    engine = tight(new_engine, link_bytes_per_s=20_000.0)  # a request's KV takes half a second
    requests = [ask(name, use_prefix_cache=False) for name in "abc"]
    for request in requests:
        engine.core.add(request)
    steps = len(engine.runner.plans)
    pauses = run(engine)
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)
    assert pauses
    assert min(pauses) >= 100_000  # never a busy loop
    assert len(engine.runner.plans) - steps < 1000


def test_a_prefix_from_the_host_is_waited_for_and_counted(new_engine: Build) -> None:
    engine = tight(new_engine)
    for name in "abcdefgh":
        engine.core.add(ask(name, max_tokens=2))
        run(engine)
    again = ask("a", max_tokens=2)
    engine.core.add(again)
    run(engine)
    counters = engine.core.stats().counters
    assert again.num_cached_tokens == 192
    assert counters.host_hit_tokens == 192
    assert counters.host_loads == 1
    assert counters.host_load_time_ns > 0
    assert counters.prefix_cache_hits == 192


def test_failing_copies_cost_no_request(new_engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tight(new_engine)
    for name in "abcdefgh":
        engine.core.add(ask(name, max_tokens=2))
        run(engine)
    tried = []

    def fail(transfers: object) -> None:
        tried.append(transfers)
        raise RuntimeError("link down")

    monkeypatch.setattr(engine.core._copies.mover, "submit", fail)
    again = [ask(name, max_tokens=100) for name in "abcd"]
    for request in again:
        engine.core.add(request)
    run(engine)
    assert all(request.finish_reason is FinishReason.LENGTH for request in again)
    assert any(tried)
    assert engine.core.broken is None
    monkeypatch.undo()
    outcome = engine.core.patch(Patch({"host_offload": "on"}, "operator"))
    assert "failed" in outcome.results["host_offload"].why


def test_the_knob_says_why_it_cannot_and_what_is_left_to_do(new_engine: Build) -> None:
    plain = new_engine()
    outcome = plain.core.patch(Patch({"host_offload": "on"}, "operator"))
    assert outcome.http_status == 422
    assert "--host-pool-bytes" in outcome.results["host_offload"].why
    engine = tight(new_engine, link_bytes_per_s=100_000.0)
    for name in "abcd":
        engine.core.add(ask(name, use_prefix_cache=False))
    while engine.cache.usage().host_used_bytes == 0:
        engine.core.step()
        engine.clock.advance_s(0.001)
    outcome = engine.core.patch(Patch({"host_offload": "off"}, "operator"))
    assert outcome.results["host_offload"].status == "converging"
    run(engine)
    assert engine.cache.usage().host_used_bytes == 0
    assert engine.core.stats().counters.requests_failed == 0


def test_figures_say_that_the_link_is_emulated(new_engine: Build) -> None:
    engine = tight(new_engine, link_bytes_per_s=5e5)
    stats = EngineStats.from_json(engine.core.stats().to_json())
    assert stats.gauges.host_link_is_emulated is True
    assert stats.gauges.host_link_bytes_per_s == 5e5
    assert stats.gauges.host_pool_bytes == 4096 * 32
    metrics = EngineMetrics(CollectorRegistry())
    metrics.update(stats, engine.core.distributions())
    assert b"autotune_engine_host_link_emulated 1.0" in metrics.page()
    assert new_engine().core.stats().gauges.host_link_is_emulated is None


def test_the_thread_sleeps_while_copies_are_made(new_engine: Build) -> None:
    engine = tight(new_engine, real_clock=True, link_bytes_per_s=100_000.0)  # 0.1 s for one request's KV
    done = threading.Event()
    ended: list[str] = []

    def deliver(deltas: list[Any]) -> None:
        ended.extend(delta.request_id for delta in deltas if delta.finish_reason is not None)
        if len(ended) == 4:
            done.set()

    thread = EngineThread(engine.core, deliver)
    thread.start()
    for name in "abcd":
        thread.call(lambda core, name=name: core.add(ask(name))).result(10)
    assert done.wait(60)
    thread.call(lambda _core: None).result(10)
    clock = time.pthread_getcpuclockid(thread._thread.ident)
    before = time.clock_gettime(clock)
    threading.Event().wait(0.2)
    assert time.clock_gettime(clock) - before < 0.05
    assert thread.stop(10)
    assert engine.core.stats().counters.requests_completed == 4
