"""Cases of section I: what the metrics page says, through core and server."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from engine.metrics import EngineMetrics
from engine.request import CachePolicy, Request, SamplingParams

Build = Callable[..., Any]
Serve = Callable[..., Any]
PATH = "/v1/completions"
PREFIX = "autotune_engine_"


def parse(page: str) -> dict[str, float]:
    rows = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


def scrape(engine: Any, metrics: EngineMetrics) -> dict[str, float]:
    metrics.update(engine.core.stats(), engine.core.distributions())
    return parse(metrics.page().decode())


def request_of(name: str, prompt: list[int], max_tokens: int, arrival_ns: int, **cache: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, prompt, params, arrival_ns, CachePolicy(**cache))


def prefix_counts(page: dict[str, float]) -> tuple[float, ...]:
    """Queries, hits, and tokens computed again."""
    names = ("prefix_cache_queries", "prefix_cache_hits", "recomputed_tokens")
    return tuple(page[f"{PREFIX}{name}_total"] for name in names)


def test_a_request_that_needs_many_attempts_is_counted_once(new_engine: Build) -> None:
    """vllm-project/vllm#43736: ten lookups that hit and do not fit, then admission, then preemption (vllm#25780).

    Small requests end one after the other, and each end makes the scheduler look the large one up again. One of them
    goes on and in the end takes the room of the large one, which is younger.
    """
    engine = new_engine(pool_tokens=1280)  # 1024 for requests
    metrics = EngineMetrics(CollectorRegistry())
    shared = [i % 250 for i in range(64)]
    engine.core.add(request_of("warm", shared, 1, engine.clock.now_ns()))
    while engine.core.has_work:
        engine.core.step()
    before = scrape(engine, metrics)
    for i in range(15):
        engine.clock.advance_s(0.001)
        prompt, most = [i + 1, *range(40)], 1 + i if i else 400
        engine.core.add(request_of(f"small-{i}", prompt, most, engine.clock.now_ns(), use_prefix_cache=False))
    engine.core.step()
    engine.clock.advance_s(0.001)
    large = request_of("large", shared + [7] * 700, 150, engine.clock.now_ns())
    engine.core.add(large)
    attempts: list[int] = []
    look_up = engine.cache.match_prefix

    def counted(request: Request) -> int:
        found = int(look_up(request))
        if request is large:
            attempts.append(found)
        return found

    engine.cache.match_prefix = counted
    while large in engine.scheduler.waiting:
        assert prefix_counts(scrape(engine, metrics)) == prefix_counts(before)
        engine.core.step()
    print(f"{len(attempts)} attempts, {attempts[0]} tokens found in the first")
    assert len(attempts) >= 11  # ten in vain
    assert attempts == [64] * len(attempts)
    expected: tuple[float, ...] = (prefix_counts(before)[0] + len(large.prompt_ids), prefix_counts(before)[1] + 64, 0)
    assert prefix_counts(scrape(engine, metrics)) == expected

    while engine.core.has_work:
        engine.core.step()
        page = scrape(engine, metrics)
        assert 0 <= page[f"{PREFIX}prefix_cache_hits_total"] <= page[f"{PREFIX}prefix_cache_queries_total"]
    assert large.num_preemptions == page[f"{PREFIX}num_preemptions_total"] >= 1
    assert len(large.output_ids) == 150
    queries, hits, recomputed = prefix_counts(page)
    assert (queries, hits) == expected[:2]
    print(f"{large.num_preemptions} preemptions, {recomputed:.0f} tokens computed again")
    assert recomputed == large.num_recomputed_tokens > 0
    assert page[f"{PREFIX}metrics_invariant_violations_total"] == 0


@pytest.mark.parametrize("bad", [-1, -7, math.nan, math.inf, 10**9, None], ids=str)
def test_impossible_hits_stop_no_server(serve: Serve, bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    """LMCache/LMCache#2912: a delta below zero, -1 for unknown, NaN, more hits than prompt tokens; requests go on."""
    server = serve()
    with httpx.Client(base_url=server.url, timeout=20, trust_env=False) as http:

        def page() -> dict[str, float]:
            answer = http.get("/metrics")
            assert answer.status_code == 200
            return parse(answer.text)

        for _ in range(2):
            assert http.post(PATH, json={"prompt": "x" * 40, "max_tokens": 1}).status_code == 200
        hits, violations = f"{PREFIX}prefix_cache_hits_total", f"{PREFIX}metrics_invariant_violations_total"
        good = page()
        assert good[hits] == 32
        assert good[violations] == 0
        counters = server.engine.stats.counters
        real, counters.prefix_cache_hits = counters.prefix_cache_hits, bad
        with caplog.at_level(logging.WARNING):
            seen = page()
        assert (seen[hits], seen[violations]) == (32, 1)
        assert len([record for record in caplog.records if "impossible" in record.getMessage()]) == 1
        counters.prefix_cache_hits = real
        assert http.post(PATH, json={"prompt": "x" * 40, "max_tokens": 1}).status_code == 200
        after = page()
        assert (after[hits], after[violations]) == (64, 1)


def test_times_on_the_page(new_engine: Build) -> None:
    """vllm-project/vllm#6337: in seconds, _sum within 1 ms, counts per request and per gap, cumulative buckets."""
    engine = new_engine(max_num_batched_tokens=64)
    metrics = EngineMetrics(CollectorRegistry())
    for number in range(3):
        times = iter([0.10, 0.10, 0.10, *[0.05] * 9])
        engine.runner.before = lambda _plan, times=times: engine.clock.advance_s(next(times))
        prompt = [number + 1] * 150
        engine.core.add(request_of(f"r{number}", prompt, 10, engine.clock.now_ns(), use_prefix_cache=False))
        while engine.core.has_work:
            engine.core.step()
    page = scrape(engine, metrics)
    ttft, gap = PREFIX + "time_to_first_token_seconds", PREFIX + "inter_token_latency_seconds"
    assert page[f"{ttft}_sum"] == pytest.approx(0.90, abs=3e-3)
    assert page[f"{ttft}_count"] == 3
    assert page[f"{gap}_sum"] == pytest.approx(27 * 0.05, abs=3e-3)
    assert page[f"{gap}_count"] == 27
    for name, value, count in ((ttft, 0.30, 3), (gap, 0.05, 27)):
        rows = {float(row.split('"')[1]): total for row, total in page.items() if row.startswith(f"{name}_bucket")}
        assert rows == {bound: count * (value <= bound) for bound in rows}
        assert rows[math.inf] == count
        assert 2 < sum(count == 0 for count in rows.values()) < len(rows) - 2


def run_strangers(serve: Serve, requests: int) -> float:
    """Send that many requests, each under names of its own; returns the scrape's duration in seconds."""
    server = serve(max_waiting=1000)

    async def send(http: httpx.AsyncClient, number: int, room: asyncio.Semaphore) -> int:
        name = f"stranger-{number}"
        body = {"prompt": "x", "max_tokens": 1, "user": name, "cache_salt": name, "adapter": name, "lora": name}
        path = PATH
        if number % 3 == 0:
            body["model"] = name
        elif number % 3 == 1:
            path = f"/v1/{name}"
        async with room:
            answer = await http.post(path, json=body, headers={"X-Request-Id": name, "User-Agent": name})
        return answer.status_code

    async def send_all(start: int, stop: int) -> list[int]:
        room = asyncio.Semaphore(32)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as http:
            return list(await asyncio.gather(*(send(http, number, room) for number in range(start, stop))))

    asyncio.run(send_all(0, 6))
    httpx.get(server.url + "/metrics", trust_env=False)  # a scrape counts too
    before = httpx.get(server.url + "/metrics", trust_env=False).text
    statuses = asyncio.run(send_all(6, requests + 6))
    assert {status: statuses.count(status) for status in set(statuses)} == pytest.approx(
        {404: requests * 2 / 3, 200: requests / 3}, abs=1
    )
    begin = time.perf_counter()
    after = httpx.get(server.url + "/metrics", trust_env=False).text
    elapsed_s = time.perf_counter() - begin
    assert parse(after).keys() == parse(before).keys()
    assert "stranger" not in after
    print(f"{requests} requests, {len(parse(after))} series, scrape {elapsed_s * 1e3:.1f} ms")
    return elapsed_s


def test_strangers_names_make_no_series(serve: Serve) -> None:
    """llm-d/llm-d-router#1625, scaled: models, users, adapters, salts, ids and paths that nobody knows."""
    run_strangers(serve, 300)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_strangers_names_make_no_series(serve: Serve) -> None:
    """llm-d/llm-d-router#1625 in full."""
    assert run_strangers(serve, 9_999) < 0.1
