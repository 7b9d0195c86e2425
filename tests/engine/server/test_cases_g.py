"""Cases of section G over HTTP: what does not fit, what is no request, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from waiting import Brake, until

from engine.memory_model import token_bytes
from kernels.layout import FORMAT_BY_NAME

Serve = Callable[..., Any]
Json = dict[str, Any]
PATH, CHAT = "/v1/completions", "/v1/chat/completions"


def control(server: Any, **changes: Any) -> None:
    """Change tunables as the daemon does."""
    transport = httpx.HTTPTransport(uds=str(server.control_path))
    with httpx.Client(transport=transport, base_url="http://engine") as http:
        body = {"changes": changes, "writer": "test", "reason": "a case", "if_revision": None}
        assert http.patch("/v1/tunables", json=body).status_code == 200


class Background:
    """Requests in threads of their own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._threads: list[threading.Thread] = []
        self.answers: dict[str, httpx.Response] = {}

    def send(self, name: str, prompt: list[int], **fields: Any) -> None:
        def post() -> None:
            body = {"prompt": prompt, "ignore_eos": True, **fields}
            self.answers[name] = httpx.post(self._url + PATH, json=body, timeout=60, trust_env=False)

        self._threads.append(threading.Thread(target=post))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


CHANGES: list[Json] = [
    {},
    {"block_size": 256},
    {"block_size": 64, "kv_format": "int4"},
    {"kv_format": "native", "block_size": 128, "max_num_seqs": 1},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_one_block_beyond_the_pool_blocks_nobody(serve: Serve, changes: Json, stream: bool) -> None:
    """vllm-project/vllm#39734: a clear 400 without a step, also just after a change of settings; then a short one."""
    server = serve(pool_tokens=768, max_model_len=8192, block_size=16)
    largest = server.engine.cache.max_sequence_tokens()
    if changes:
        control(server, **changes)
    block_size = int(changes.get("block_size", 16))
    with httpx.Client(base_url=server.url, timeout=20, trust_env=False) as http:
        body = {"prompt": [97] * (largest + block_size), "max_tokens": 1, "stream": stream}
        answer = http.post(PATH, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "can_never_fit"
        assert not server.engine.runner.plans
        short = http.post(PATH, json={"prompt": "x", "max_tokens": 3, "ignore_eos": True})
        assert short.json()["usage"]["completion_tokens"] == 3
        assert len(server.engine.runner.plans) == 3
    assert server.engine.core.stats().gauges.waiting == 0


def queue_of_three(server: Any, first: int, second: int) -> tuple[Background, Brake]:
    """One that runs, slowly, and holds up a large one, which holds up a short one."""
    brake = server.engine.runner.before = Brake()
    background = Background(server.url)
    background.send("first", [98] * first, max_tokens=300)
    until(lambda: len(server.engine.scheduler.running) == 1, "the first to run")
    for number, (name, length) in enumerate({"large": second, "short": 5}.items(), start=1):
        background.send(name, [99] * length, max_tokens=3)
        until(lambda expected=number: server.engine.scheduler.num_waiting == expected, f"{name} to wait")  # type: ignore[misc]
    return background, brake


@pytest.mark.parametrize("changes", CHANGES[1:], ids=str)
def test_the_largest_that_was_accepted_runs_whatever_is_changed_meanwhile(serve: Serve, changes: Json) -> None:
    """vllm-project/vllm#39734: accepted, then the tuner switches while it waits behind another; all three complete."""
    server = serve(pool_tokens=1024, max_model_len=8192, block_size=16)
    background, brake = queue_of_three(server, 300, server.engine.cache.max_sequence_tokens() - 2)
    control(server, **changes)
    brake.let_go()
    background.join()
    tokens = {name: answer.json()["usage"]["completion_tokens"] for name, answer in background.answers.items()}
    assert tokens == {"first": 300, "large": 3, "short": 3}


def test_what_waits_when_the_pool_shrinks_ends_at_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#39734 with a pool that became too small: an error while the first still runs, and the short one
    runs.
    """
    server = serve(pool_tokens=1024)
    background, brake = queue_of_three(server, 300, 600)
    monkeypatch.setattr(server.engine.cache, "max_sequence_tokens", lambda: 590)
    until(lambda: {"large", "short"} <= background.answers.keys(), "the other two to end")
    assert len(server.engine.scheduler.running) == 1
    assert background.answers["large"].status_code == 500
    assert "no room" in background.answers["large"].json()["error"]["message"]
    assert background.answers["short"].json()["usage"]["completion_tokens"] == 3
    brake.let_go()
    background.join()
    assert background.answers["first"].json()["usage"]["completion_tokens"] == 300


EMPTY: list[tuple[str, Json]] = [
    (PATH, {"prompt": ""}),
    (PATH, {"prompt": []}),
    (PATH, {"prompt": [""]}),
    (PATH, {"prompt": [[]]}),
    (PATH, {"prompt": "x", "max_tokens": 0}),
    (PATH, {"prompt": "x", "max_tokens": -1}),
    (PATH, {"prompt": "", "echo": True, "max_tokens": 0}),
    (PATH, {"prompt": "", "stream": True}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": -5}),
]
SPACES: list[tuple[str, Json]] = [
    (PATH, {"prompt": " "}),
    (PATH, {"prompt": "\n\t \u00a0\u3000"}),
    (PATH, {"prompt": ["  "]}),
    (CHAT, {"messages": [{"role": "user", "content": ""}]}),
    (CHAT, {"messages": [{"role": "user", "content": "   "}]}),
    (CHAT, {"messages": [{"role": "user", "content": None}]}),
]


def test_empty_prompts_harm_nobody_who_runs_meanwhile(serve: Serve) -> None:
    """vllm-project/vllm#7632: each is a 400 of its own while another request streams; whitespace is a prompt."""
    server = serve()
    brake = server.engine.runner.before = Brake(0.02)
    background = Background(server.url)
    background.send("running", [97] * 30, max_tokens=900)
    until(lambda: server.engine.runner.plans, "the first step")
    with httpx.Client(base_url=server.url, timeout=20, trust_env=False) as http:
        for path, body in EMPTY:
            answer = http.post(path, json=body)
            assert answer.status_code == 400, (path, body, answer.text)
            assert answer.json()["error"]["message"]
            assert http.get("/health").status_code == 200
        for path, body in SPACES:
            answer = http.post(path, json={**body, "max_tokens": 2, "ignore_eos": True})
            assert answer.status_code == 200, (path, body, answer.text)
            assert answer.json()["usage"]["completion_tokens"] == 2
    assert "running" not in background.answers
    brake.let_go()
    background.join()
    assert background.answers["running"].json()["usage"]["completion_tokens"] == 900
    assert server.engine.core.broken is None
    assert server.engine.stats.counters.requests_failed == 0


# Nothing creeps up


async def storm(server: Any, requests: int, concurrency: int, seed: int) -> dict[str, int]:
    """Short and long requests, whole and streamed, some of whose clients hang up; how each ended, counted."""
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(300)]
    ended: dict[str, int] = {}

    def body_of(kind: float, hangs_up: bool) -> Json:
        length = rng.randrange(1, 40) if rng.random() < 0.6 else rng.randrange(200, 700)
        prompt = [*shared[:length], rng.randrange(256)] if rng.random() < 0.5 else rng.choices(range(256), k=length)
        return {
            "prompt": prompt,
            "max_tokens": 200 if hangs_up else rng.choice([1, 3, 10, 100]),
            "ignore_eos": True,
            "stream": kind < 0.5,
            "stop": ["qq", "x"] if rng.random() < 0.2 else None,
            "use_prefix_cache": rng.random() < 0.8,
            "prompt_logprobs": 0 if rng.random() < 0.1 else None,
            "allow_eviction": rng.random() < 0.8,
        }

    async def one(http: httpx.AsyncClient, body: Json, hangs_up: bool, room: asyncio.Semaphore) -> None:
        async with room:
            status = ""
            try:
                async with http.stream("POST", PATH, json=body, timeout=0.05 if hangs_up else 60) as answer:
                    status = str(answer.status_code)
                    async for _ in answer.aiter_bytes():
                        if hangs_up:
                            break
            except httpx.TimeoutException:
                status = "hung up"
            ended[status] = ended.get(status, 0) + 1

    room = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, limits=limits) as http:
        plans = [(rng.random(), rng.random() < 0.1) for _ in range(requests)]
        await asyncio.gather(*(one(http, body_of(*plan), plan[1], room) for plan in plans))
    return ended


def check_nothing_is_left(server: Any) -> tuple[float, int]:
    """Idle and empty; the gauges, asked over HTTP, are the allocator's own figures. (cached bytes, nodes)"""
    engine = server.engine
    until(lambda: not engine.core.has_work and not engine.core.has_background_work, "an idle engine")
    page = {}
    for line in httpx.get(server.url + "/metrics", trust_env=False).text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            page[name] = float(value)
    (pool,) = engine.cache._pools
    held = sum(pool.arena.block_bytes(block.block_class) for block in pool.blocks.values() if block.holders)
    cached = sum(pool.arena.block_bytes(block.block_class) for block in pool.blocks.values())
    assert held == page["autotune_engine_kv_used_bytes"] == page["autotune_engine_kv_cache_usage"] == 0
    assert cached == page["autotune_engine_kv_cached_bytes"]
    assert page["autotune_engine_num_requests_running"] == page["autotune_engine_num_requests_waiting"] == 0
    scheduler, cache = engine.scheduler, engine.cache
    for left in (
        engine.core._live.by_id,
        scheduler._queues.requests,
        scheduler._queues.lost,
        cache._sequences,
        cache._by_request,
    ):
        assert not left
    counters = engine.stats.counters
    ended = counters.requests_completed + counters.requests_aborted + counters.requests_failed
    assert ended + counters.requests_rejected == counters.requests_offered
    cache.check_integrity()
    return cached, len(cache._prefix.nodes)


def run_rounds(serve: Serve, requests: int, concurrency: int, pool_tokens: int) -> None:
    server = serve(pool_tokens=pool_tokens, max_waiting=4 * concurrency, max_num_seqs=64, watermark=0.01)
    # Steps take a little time, so that requests pile up and fight for the pool.
    server.engine.runner.before = lambda _plan: threading.Event().wait(0.002)
    cache, spread = server.engine.cache, []
    most = cache.layout.total_bytes
    # A prefix node for each chunk of 16 tokens that the pool can hold, all in the smallest format.
    most_chunks = most / (16 * token_bytes(cache.groups[0].shape, FORMAT_BY_NAME["int4"]))
    for round_ in range(10):
        control(
            server,
            kv_format=["native", "int8", "native", "int4"][round_ % 4],
            block_size=[16, 64, 256, 32][round_ % 4],
            eviction=["none", "window", "heavy_hitter"][round_ % 3],
            keep_tokens=128,
        )
        ended = asyncio.run(storm(server, requests, concurrency, round_))
        assert ended.keys() <= {"200", "hung up"}, ended
        assert ended["200"] >= requests * 0.8
        cached, nodes = check_nothing_is_left(server)
        assert cached <= most
        assert nodes <= most_chunks
        spread.append((round(cached / most, 2), nodes))
    print(f"at most {most_chunks:.0f} chunks; cached share of the pool and prefix nodes by round: {spread}")
    counters = server.engine.stats.counters
    print(f"{counters.requests_completed} completed, {counters.requests_aborted} aborted")
    print(f"{counters.preemptions} preemptions, {counters.prefix_cache_hits} hit tokens")
    assert counters.requests_offered >= requests * 9
    assert counters.requests_aborted >= requests // 10
    assert counters.preemptions >= 1 or requests < 1000  # few requests may not coincide
    cache.drop_idle()
    (pool,) = cache._pools
    assert pool.arena.num_free_slabs == pool.arena.num_slabs
    assert not cache._prefix.nodes


def test_ten_rounds_leave_nothing_behind(serve: Serve) -> None:
    """sgl-project/sglang#6778, scaled down for every run."""
    run_rounds(serve, requests=40, concurrency=32, pool_tokens=2048)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_rounds_of_a_thousand_leave_nothing_behind(serve: Serve) -> None:
    """sgl-project/sglang#6778 in full: 1,000 short and long requests at once, ten times."""
    run_rounds(serve, requests=1000, concurrency=256, pool_tokens=8192)
