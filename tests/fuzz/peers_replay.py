"""Servers of others that are replayed to, or recorded in front of."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from canned import Canned
from peer import Documents, Peer

from autotune.proxy.app import RecordingProxy, upstream_client
from autotune.replay.client import Client
from autotune.replay.handshake import ServerError, learn
from autotune.replay.records import RequestRecord
from autotune.replay.wire import Endpoint
from engine.clock import RealClock
from engine.recording import TrafficRecorder
from envs.workload.loaders import load_trace
from envs.workload.trace import Trace, TraceError


def _completion(text: str = "a") -> dict[str, Any]:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    choice = {"index": 0, "text": text, "finish_reason": "length", "token_ids": [5, 6]}
    return {"id": "x", "choices": [choice], "usage": usage}


def _stream() -> bytes:
    first = {"choices": [{"index": 0, "text": "a", "token_ids": [5], "finish_reason": None}], "usage": None}
    events = (b"data: " + json.dumps(event).encode() + b"\n\n" for event in (first, _completion()))
    return b"".join(events) + b"data: [DONE]\n\n"


def _server() -> Documents:
    models = {"data": [{"id": "m", "max_model_len": 256, "vocab_size": 300}]}
    return {
        "/v1/models": models,
        "/tokenize": {"tokens": list(range(40))},
        "/v1/completions": _completion(),
        "stream": _stream(),
    }


def _streams(server: Canned) -> None:
    """The one path that answers in two ways."""
    told = server.reply

    def by_body(method: str, path: str, body: bytes) -> bytes:
        return told(method, "stream" if b'"stream":true' in body.replace(b" ", b"") else path.partition("?")[0], body)

    server.reply = by_body


def _replay(server: Canned, _folder: Path) -> None:
    _streams(server)
    asyncio.run(_replay_one(server.url))


async def _replay_one(url: str) -> None:
    client = Client(Endpoint.parse(url), RealClock(), timeout_s=5)
    asyncio.get_running_loop().set_exception_handler(_raise)
    try:
        for text in (False, True):
            with contextlib.suppress(ServerError):
                server = await learn(client, model=None, text=text)
                server.prompts(Trace("a", ()), 1)
        record = RequestRecord(0, 0.0, 9, 2)
        await client.stream(record, b'{"stream": true}', exact_tokens=False)
        assert len(record.token_times_s) <= 1 << 24
    finally:
        client.close()


def _raise(_loop: object, context: Mapping[str, Any]) -> None:
    raise AssertionError(context.get("message"), context.get("exception"))


def _proxy(server: Canned, folder: Path) -> None:
    """The body of the request is the answer to ``asked``: a hostile client before a hostile server."""
    told = server.reply
    asked = told("POST", "asked", b"").partition(b"\r\n\r\n")[2]
    _streams(server)
    path = folder / "traffic.csv"
    for earlier in folder.glob("traffic.csv*"):
        earlier.unlink()
    recorder = TrafficRecorder(path, RealClock(), of_text=True)
    for at in ("/v1/completions", "/v1/chat/completions"):
        sent = asyncio.run(_proxied(server.url, recorder, at, asked))
        assert [message["type"] for message in sent[:1]] == ["http.response.start"], "nothing was answered"
    recorder.close()
    assert recorder.dropped == 0
    try:
        load_trace(path)
    except TraceError as error:
        if "no requests" not in str(error):
            raise


async def _proxied(url: str, recorder: TrafficRecorder, path: str, body: bytes) -> Sequence[Mapping[str, Any]]:
    sent: list[Mapping[str, Any]] = []
    first = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Mapping[str, Any]:
        message = next(first, None)
        if message is None:
            await asyncio.Event().wait()
        return message or {}

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": [(b"content-type", b"application/json")]}  # fmt: skip
    async with upstream_client() as client:
        app = RecordingProxy(Endpoint.parse(url), client, recorder, RealClock())
        await app(scope, receive, send)  # type: ignore[arg-type]  # plain mappings
    return sent


def _asked() -> Documents:
    chat = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}], "tool_calls": [{"id": "a"}]}],
        "tools": [{"type": "function"}], "prompt": [[1, 2], "a"], "n": 2, "stream": True,
    }  # fmt: skip
    return {"asked": chat, "stream": _stream(), "/v1/completions": _completion(), "/v1/chat/completions": _completion()}


def servers() -> Iterator[Peer]:
    yield Peer("a server that is replayed to", _server, _replay)
    yield Peer("a server behind the recording proxy", _asked, _proxy)
