"""The recording proxy: bytes pass unchanged and as they come; what is recorded has counts and no text."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from autotune.cli import app
from autotune.cli._shared import fail_with
from autotune.proxy.app import RecordingProxy, upstream_client
from autotune.proxy.serve import _Server
from autotune.proxy.shapes import AnswerReader, Shape, estimated_tokens, request_shape
from autotune.replay.wire import Endpoint
from engine.clock import RealClock
from engine.recording import TrafficRecorder
from engine.serve import bind_tcp
from envs.workload.loaders import load_trace

SECRET = "a secret that is long enough for a chunk of sixty-four bytes, and for some more of it"


def event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


class Upstream:
    """An OpenAI-like ASGI app; ``mode`` picks what it does. ``calls`` are what it got."""

    def __init__(self) -> None:
        self.mode = "usage"
        self.calls: list[tuple[str, str, dict[bytes, bytes], bytes]] = []
        self.go_on = threading.Event()
        self.cancelled = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        path = scope["raw_path"].decode() + (f"?{scope['query_string'].decode()}" if scope["query_string"] else "")
        self.calls.append((scope["method"], path, dict(scope["headers"]), body))
        if self.mode == "refuse":
            await self._send(send, 429, b'{"error": {"message": "full"}}', b"application/json")
        elif self.mode == "hang":
            message = await receive()
            assert message["type"] == "http.disconnect"
            self.cancelled.set()
        elif json.loads(body or b"{}").get("stream"):
            await self._stream(send)
        else:
            usage = {"prompt_tokens": 21, "completion_tokens": 9} if self.mode == "usage" else None
            choices = [{"message": {"content": SECRET[:40]}, "text": SECRET[:40], "finish_reason": "length"}]
            document = {"choices": choices, "usage": usage}
            await self._send(send, 200, json.dumps(document).encode(), b"application/json")

    async def _stream(self, send: Any) -> None:
        head = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-own", b"kept"), (b"connection", b"x-hop")]
        await send({"type": "http.response.start", "status": 200, "headers": [*head, (b"x-hop", b"1")]})
        for number in range(4):
            data = event({"choices": [{"delta": {"content": "word "}, "finish_reason": None}]})
            await send({"type": "http.response.body", "body": data, "more_body": True})
            if number == 0 and self.mode == "slow":
                await asyncio.to_thread(self.go_on.wait, 30)
        end = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        if self.mode == "usage":
            end += event({"choices": [], "usage": {"prompt_tokens": 33, "completion_tokens": 4}})
        await send({"type": "http.response.body", "body": end + b"data: [DONE]\n\n", "more_body": False})

    @staticmethod
    async def _send(send: Any, status: int, body: bytes, kind: bytes) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": body, "more_body": False})


class Rig:
    """Both servers in one event loop, in a thread."""

    def __init__(self, path: Path, target: str | None = None) -> None:
        self.upstream = Upstream()
        self.path = path
        self._target = target
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._ready.wait(60)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        above, below = bind_tcp("127.0.0.1", 0), bind_tcp("127.0.0.1", 0)
        self.direct = f"http://127.0.0.1:{above.getsockname()[1]}"
        self.url = f"http://127.0.0.1:{below.getsockname()[1]}"
        recorder = TrafficRecorder(self.path, RealClock(), of_text=True)
        target = Endpoint.parse(self._target or self.direct + "/v1")
        async with upstream_client() as client:
            proxy = RecordingProxy(target, client, recorder, RealClock(), max_body_bytes=1 << 20)
            common: dict[str, Any] = {"log_config": None, "lifespan": "off", "ws": "none"}
            servers = [
                (_Server(uvicorn.Config(asgi, **common)), bound)
                for asgi, bound in ((self.upstream, above), (proxy, below))
            ]
            tasks = [asyncio.create_task(server.serve(sockets=[bound])) for server, bound in servers]
            self._ready.set()
            await self._stop.wait()
            for server, _ in reversed(servers):
                server.should_exit = True
            await asyncio.gather(*tasks)
        recorder.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(60)
            assert not self._thread.is_alive()

    def rows(self) -> list[dict[str, str]]:
        """What was recorded, once everything has been written."""
        self.close()
        header, *lines = self.path.read_text().splitlines()
        assert SECRET[:12] not in self.path.read_text()
        return [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "own.csv")
    yield made
    made.close()


def counts(row: dict[str, str]) -> tuple[int, int, str, str]:
    return int(row["prompt_tokens"]), int(row["output_tokens"]), row["finish"], row["estimated"]


CHAT = {"messages": [{"role": "user", "content": SECRET}]}


def test_calls_pass_unchanged_and_usage_is_recorded(rig: Rig) -> None:
    headers = {"authorization": "Bearer key", "x-own": "1", "connection": "x-hop", "x-hop": "2"}
    body = json.dumps(CHAT).encode()
    answers = [
        httpx.post(f"{base}/v1/chat/completions?a=%2Fb", content=body, headers=headers)
        for base in (rig.direct, rig.url)
    ]
    assert answers[0].content == answers[1].content
    (_, path, seen, got) = rig.upstream.calls[1]
    assert (path, got) == ("/v1/chat/completions?a=%2Fb", body)
    assert seen[b"authorization"] == b"Bearer key"
    assert seen[b"host"] == rig.direct.removeprefix("http://").encode()
    assert b"x-hop" not in seen
    assert httpx.get(f"{rig.url}/v1/models").status_code == 200
    (row,) = rig.rows()
    assert counts(row) == (21, 9, "length", "")


@pytest.mark.parametrize(
    ("mode", "expected"), [("usage", (33, 4, "stop", "")), ("plain", (-(-(len(SECRET) + 6) // 4), 4, "stop", "both"))]
)
def test_a_stream_is_counted_as_it_passes(rig: Rig, mode: str, expected: tuple[int, int, str, str]) -> None:
    rig.upstream.mode = mode
    answers = [
        httpx.post(f"{base}/v1/chat/completions", json={**CHAT, "stream": True}) for base in (rig.direct, rig.url)
    ]
    assert answers[0].content == answers[1].content
    assert answers[1].headers["x-own"] == "kept"
    assert "x-hop" not in answers[1].headers
    (row,) = rig.rows()
    assert counts(row) == expected


def test_the_first_event_passes_before_the_second_exists(rig: Rig) -> None:
    rig.upstream.mode = "slow"
    with httpx.stream("POST", f"{rig.url}/v1/completions", json={"prompt": [1, 2, 3], "stream": True}) as answer:
        lines = answer.iter_lines()
        assert "word" in next(lines)
        rig.upstream.go_on.set()
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    (row,) = rig.rows()
    assert counts(row) == (3, 4, "stop", "output")  # ids are counted, not estimated


def test_a_client_that_hangs_up_ends_the_call_above(rig: Rig) -> None:
    rig.upstream.mode = "hang"
    body = json.dumps({"prompt": SECRET}).encode()
    target = httpx.URL(rig.url)
    with socket.create_connection((target.host, target.port)) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        until(lambda: rig.upstream.calls, "the call to get through")
    assert rig.upstream.cancelled.wait(60)
    (row,) = rig.rows()
    assert counts(row)[2:] == ("abort", "both")


def test_a_hang_up_in_the_middle_of_a_stream_is_recorded(rig: Rig) -> None:
    rig.upstream.mode = "slow"
    with httpx.stream("POST", f"{rig.url}/v1/completions", json={"prompt": SECRET, "stream": True}) as answer:
        next(answer.iter_lines())
    until(lambda: rig.path.read_text().count("\n") == 2, "the row of the request that was given up")
    rig.upstream.go_on.set()
    (row,) = rig.rows()
    assert counts(row)[1:] == (1, "abort", "both")


def test_refusals_and_other_calls_pass_and_are_not_recorded(rig: Rig) -> None:
    rig.upstream.mode = "refuse"
    answer = httpx.post(f"{rig.url}/v1/completions", json={"prompt": SECRET})
    assert (answer.status_code, answer.json()) == (429, {"error": {"message": "full"}})
    rig.upstream.mode = "usage"
    assert httpx.post(f"{rig.url}/v1/embeddings", json={"input": SECRET}).status_code == 200
    too_large = httpx.post(f"{rig.url}/v1/completions", content=b"x" * (2 << 20))
    assert too_large.status_code == 413
    assert rig.rows() == []


def test_a_probe_passes_with_its_mark_and_is_not_recorded(rig: Rig) -> None:
    headers = {"X-Autotune-Probe": "1"}
    assert httpx.post(f"{rig.url}/v1/completions", json={"prompt": SECRET}, headers=headers).status_code == 200
    assert rig.upstream.calls[0][2][b"x-autotune-probe"] == b"1"
    assert rig.rows() == []


def test_a_batch_of_prompts_is_one_row_each(rig: Rig) -> None:
    httpx.post(f"{rig.url}/v1/completions", json={"prompt": [SECRET, SECRET + " more"], "n": 2})
    rows = rig.rows()
    assert len(rows) == 4
    assert {row["estimated"] for row in rows} == {"both"}
    assert len({row["hash_ids_b64bytes"] for row in rows}) == 1
    trace = load_trace(rig.path)
    assert trace.block_tokens == 16
    assert trace.notes[-1] == "4 requests have estimated lengths"


def test_a_target_that_is_not_there_is_a_502(tmp_path: Path) -> None:
    closed = bind_tcp("127.0.0.1", 0)
    port = closed.getsockname()[1]
    closed.close()
    rig = Rig(tmp_path / "own.csv", f"http://127.0.0.1:{port}")
    try:
        answer = httpx.post(f"{rig.url}/v1/completions", json={"prompt": SECRET})
        assert answer.status_code == 502
        assert "no answer from" in answer.json()["error"]["message"]
        assert rig.rows() == []
    finally:
        rig.close()


def test_a_chat_grows_at_its_end() -> None:
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "s" * 100},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    first = request_shape("/v1/chat/completions", json.dumps({"messages": turns}).encode())
    turns += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
    second = request_shape("/v1/chat/completions", json.dumps({"messages": turns}).encode())
    assert first is not None
    assert second is not None
    assert isinstance(first.prompts[0], bytes)
    assert isinstance(second.prompts[0], bytes)
    assert second.prompts[0].startswith(first.prompts[0])


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", b'{"prompt": "abc"}', Shape((b"abc",))),
        ("/v1/completions", b'{"prompt": [1, 2], "n": 3}', Shape(([1, 2],), 3)),
        ("/v1/completions", b'{"prompt": [[1, 2], [3]]}', Shape(([1, 2], [3]))),
        ("/v1/completions", b'{"prompt": ["a", "b"], "n": true}', Shape((b"a", b"b"))),
        ("/v1/completions", b'{"prompt": [1.5]}', None),
        ("/v1/completions", b'{"prompt": [-1]}', None),
        ("/v1/completions", b"{", None),
        ("/v1/completions", b"[]", None),
        ("/v1/chat/completions", b'{"messages": [7]}', None),
        ("/v1/embeddings", b'{"prompt": "abc"}', None),
    ],
)
def test_shapes_of_requests(path: str, body: bytes, expected: Shape | None) -> None:
    assert request_shape(path, body) == expected


def test_estimates() -> None:
    assert estimated_tokens(b"12345") == 2
    assert estimated_tokens([1, 2, 3]) == 3


@given(st.lists(st.integers(0, 400), max_size=8), st.sampled_from([b"\n", b"\r\n"]))
def test_events_are_counted_however_they_are_cut(cuts: list[int], newline: bytes) -> None:
    data = b"".join(event({"choices": [{"text": f"w{i}", "finish_reason": None}]}) for i in range(5))
    data += b": comment\n\ndata: not json\n\n" + event({"choices": [{"text": "", "finish_reason": "a b,c\n"}]})
    data = (data + event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})).replace(
        b"\n", newline
    )
    reader = AnswerReader(is_stream=True)
    edges = [0, *sorted(cuts), len(data)]
    for start, end in pairwise(edges):
        reader.feed(data[start:end])
    reader.end()
    assert (reader.content_events, reader.prompt_tokens, reader.output_tokens) == (5, 7, 5)
    assert reader.finish == "other"  # a server's own words do not reach the file


def test_endless_events_and_answers_take_bounded_memory() -> None:
    from autotune.proxy import shapes

    reader = AnswerReader(is_stream=True)
    for _ in range(40):
        reader.feed(b"data: " + b"x" * (1 << 17))
        assert len(reader._rest) <= shapes.MAX_EVENT_BYTES + (1 << 18)
    reader.feed(b"\n" + event({"choices": [{"text": "y"}]}))
    assert reader.content_events == 1
    whole = AnswerReader(is_stream=False)
    for _ in range(20):
        whole.feed(b"x" * (1 << 20))
    whole.end()
    assert len(whole._rest) <= shapes.MAX_ANSWER_BYTES
    assert whole.estimated_output == (20 << 20) // 4


@pytest.mark.parametrize(
    ("code", "words", "arguments"),
    [
        (2, "expected HOST:PORT", ["--listen", "8100"]),
        (2, "is not the address of a server", ["--target", "ftp://x"]),
        (2, "is not a size", ["--record-max", "much"]),
        (1, "room for at least", ["--record-max", "1K", "--listen", "127.0.0.1:0"]),
    ],
)
def test_wrong_usage_is_one_line(
    tmp_path: Path, code: int, words: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["record-proxy", "--target", "http://127.0.0.1:1", "--record", str(tmp_path / "r.csv"), *arguments]
    assert fail_with(lambda: app(line, standalone_mode=False)) == code
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert words in errors[0]
