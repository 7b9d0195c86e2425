from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from waiting import Brake, until

Serve = Callable[..., Any]
PATH = "/v1/completions"


def open_stream(url: str, body: dict[str, Any]) -> socket.socket:
    """A raw connection that has sent a request and read nothing."""
    target = urlsplit(url)
    connection = socket.create_connection((target.hostname, target.port), timeout=60)
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def counters(server: Any) -> Any:
    return server.engine.stats.counters


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_aborts_and_frees(serve: Serve, stream: bool) -> None:
    server = serve()
    brake = server.engine.runner.before = Brake()
    connection = open_stream(server.url, {"prompt": "x" * 200, "max_tokens": 800, "stream": stream, "ignore_eos": True})
    until(lambda: counters(server).generation_tokens > 3, "tokens")
    connection.close()
    until(lambda: counters(server).requests_aborted == 1, "the abort")
    brake.let_go()
    assert counters(server).generation_tokens < 700
    page = httpx.get(server.url + "/metrics", trust_env=False).text
    assert "autotune_engine_kv_used_bytes 0.0" in page
    assert "autotune_engine_num_requests_running 0.0" in page


def test_a_client_that_does_not_read_slows_nobody_down(serve: Serve) -> None:
    server = serve()
    idle = open_stream(server.url, {"prompt": "x", "max_tokens": 900, "stream": True, "ignore_eos": True})
    answer = httpx.post(server.url + PATH, json={"prompt": "y", "max_tokens": 20}, trust_env=False, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 20
    idle.close()


def test_streams_equal_whole_answers_under_preemption_and_switches(serve: Serve) -> None:
    """Case D.13 over HTTP, with format and block size switched all the while: nothing lost, repeated or reordered."""
    server = serve(pool_tokens=1536, max_num_seqs=8)
    prompts = [[10 + i] * (40 + 9 * i) for i in range(8)]
    base = {"max_tokens": 150, "ignore_eos": True, "use_prefix_cache": False, "return_token_ids": True}
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
        alone = [http.post(PATH, json={"prompt": p, **base}).json()["choices"][0]["token_ids"] for p in prompts]
    stop = threading.Event()

    def switch() -> None:
        transport = httpx.HTTPTransport(uds=str(server.control_path))
        with httpx.Client(transport=transport, base_url="http://engine") as control:
            for turn in range(10_000):
                changes = {
                    "kv_format": ["native", "int8", "k8v4", "int4"][turn % 4],
                    "block_size": [16, 64, 256, 32, 128][turn % 5],
                }
                body = {"changes": changes, "writer": "test", "reason": "turn", "if_revision": None}
                assert control.patch("/v1/tunables", json=body).status_code == 200
                if stop.wait(0.01):
                    return

    results: list[list[int]] = [[] for _ in prompts]

    def send(index: int) -> None:
        body = {"prompt": prompts[index], **base, "stream": True}
        with httpx.stream("POST", server.url + PATH, json=body, trust_env=False, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    results[index] += json.loads(line[6:])["choices"][0]["token_ids"]

    # Steps slow enough that all eight run at once and fight for the pool.
    before = counters(server).requests_offered
    server.engine.runner.before = Brake()
    switcher = threading.Thread(target=switch)
    switcher.start()
    threads = [threading.Thread(target=send, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    until(lambda: counters(server).requests_offered == before + len(prompts), "all requests to arrive")
    server.engine.runner.before = Brake(0.003)
    for thread in threads:
        thread.join(60)
    stop.set()
    switcher.join(60)
    assert results == alone
    assert counters(server).preemptions >= 2
    assert counters(server).tunable_changes >= 2


def test_shutdown_ends_streams_with_an_error_event(serve: Serve) -> None:
    server = serve()
    server.engine.runner.before = Brake()
    body = {"prompt": "x", "max_tokens": 900, "stream": True, "ignore_eos": True}
    lines: list[str] = []
    stopping = threading.Thread(target=server.stop)
    with httpx.stream("POST", server.url + PATH, json=body, trust_env=False, timeout=60) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            if len(lines) == 4:
                stopping.start()
    stopping.join(60)
    data = [line for line in lines if line]
    assert data[-1] == "data: [DONE]"
    assert "shutting down" in json.loads(data[-2][6:])["error"]["message"]


def test_many_requests_then_idle_leaves_nothing(serve: Serve) -> None:
    """Case G.27 over HTTP, scaled: some complete, some hang up; then nothing is held and the gauge says so."""
    server = serve(pool_tokens=4096, max_waiting=256)
    for _ in range(10):
        connections = [
            open_stream(server.url, {"prompt": "ab" * (i + 1), "max_tokens": 1 + 7 * i, "stream": True})
            for i in range(12)
        ]
        for connection in connections[::3]:
            connection.close()
        for connection in connections:
            if connection.fileno() >= 0:
                received = b""
                while b"[DONE]" not in received:
                    received += connection.recv(65536)
                connection.close()
    until(lambda: not server.engine.core.has_work, "an idle engine")
    page = httpx.get(server.url + "/metrics", trust_env=False).text
    assert "autotune_engine_kv_used_bytes 0.0" in page
    assert counters(server).requests_completed + counters(server).requests_aborted == 120
