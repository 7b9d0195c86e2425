"""The proxy as an ASGI application: bytes pass unchanged in both directions, answers as they come."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from typing import Any, Final

import httpx
from starlette.types import Receive, Scope, Send

from autotune.proxy.shapes import AnswerReader, Shape, estimated_tokens, request_shape
from autotune.replay.wire import Endpoint
from engine.clock import Clock
from engine.recording import PROBE_HEADER, Exchange, TrafficRecorder

# They belong to one connection (RFC 9110, 7.6.1), or are made anew for the next.
_HOP_BY_HOP: Final = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding "
    b"upgrade".split()
)
_CONNECT_S: Final = 10.0
_log = logging.getLogger(__name__)


def upstream_client() -> httpx.AsyncClient:
    """Connections to the target: a fresh one per request, since a kept one may close just as it is used again; no
    proxies or credentials of the environment, and as long as the server takes.
    """
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=_CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,
        follow_redirects=False,
    )


class RecordingProxy:
    """Forwards every call to ``target`` and records the completions that it answered.

    A client that hangs up ends the call to the target as well. The target not answering is a 502.
    """

    def __init__(
        self,
        target: Endpoint,
        client: httpx.AsyncClient,
        recorder: TrafficRecorder,
        clock: Clock,
        *,
        max_body_bytes: int = 64 << 20,
    ) -> None:
        self._target = target
        self._client = client
        self._recorder = recorder
        self._clock = clock
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        arrival_ns = self._clock.now_ns()
        body = await self._body(receive, send)
        if body is None:
            return
        work = asyncio.create_task(self._forward(scope, body, arrival_ns, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
            with suppress(asyncio.CancelledError):
                await work

    async def _body(self, receive: Receive, send: Send) -> bytes | None:
        """The whole body; None when the client has gone or got an answer already."""
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self._max_body_bytes:
                await _answer(send, 413, f"the request body is larger than {self._max_body_bytes} bytes")
                return None
        return b"".join(parts)

    async def _forward(self, scope: Scope, body: bytes, arrival_ns: int, send: Send) -> None:
        is_probe = any(name.lower() == PROBE_HEADER.encode() for name, _ in scope["headers"])
        shape = request_shape(scope["path"], body) if scope["method"] == "POST" and not is_probe else None
        try:
            request = self._request(scope, body)
            response = await self._client.send(request, stream=True)
        except asyncio.CancelledError:  # the client has gone, but its request was load
            if shape is not None:
                self._record(shape, AnswerReader(is_stream=False), arrival_ns, whole=False)
            raise
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            reason = str(error) or type(error).__name__
            await _answer(send, 502, f"no answer from {self._target.url}: {reason[:200]}")
            return
        shape = shape if response.is_success else None
        reader = AnswerReader(is_stream="text/event-stream" in response.headers.get("content-type", ""))
        whole = False
        try:
            headers = _end_to_end(response.headers.raw)
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            async for part in response.aiter_raw():
                if shape is not None:
                    reader.feed(part)
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            whole = True
        except httpx.HTTPError as error:
            # The answer stays unfinished, and the server closes the connection: the client sees what happened.
            _log.warning("%s broke off an answer: %s", self._target.url, error)
        finally:
            if shape is not None:
                self._record(shape, reader, arrival_ns, whole=whole)
            await response.aclose()

    def _request(self, scope: Scope, body: bytes) -> httpx.Request:
        raw_path = scope.get("raw_path") or scope["path"].encode()
        if not raw_path.startswith(b"/"):
            raise ValueError("a path must begin with /")
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        headers = [
            (name, value)
            for name, value in _end_to_end(scope["headers"])
            # An answer that is packed could not be read along.
            if name not in {b"host", b"content-length", b"accept-encoding"}
        ]
        headers.append((b"accept-encoding", b"identity"))
        url = httpx.URL(self._target.url + (raw_path + query).decode("ascii"))
        return httpx.Request(scope["method"], url, headers=headers, content=body)

    def _record(self, shape: Shape, reader: AnswerReader, arrival_ns: int, *, whole: bool) -> None:
        reader.end()
        finish = reader.finish or ("stop" if whole else "abort")
        rows = len(shape.prompts) * shape.answers
        # What the server counted is of all prompts and answers of the call together.
        prompt_known = rows == 1 and reader.prompt_tokens is not None
        output = reader.estimated_output if reader.output_tokens is None else reader.output_tokens
        output_known = rows == 1 and reader.output_tokens is not None
        for prompt in shape.prompts:
            counted = isinstance(prompt, list)
            length = reader.prompt_tokens if prompt_known else None
            unsure = [
                name for name, known in (("prompt", prompt_known or counted), ("output", output_known)) if not known
            ]
            for _ in range(shape.answers):
                self._recorder.record(
                    Exchange(
                        arrival_ns,
                        max(1, estimated_tokens(prompt) if length is None else length),
                        max(1, round(output / rows)),
                        prompt,
                        finish,
                        estimated="both" if len(unsure) > 1 else "".join(unsure),
                    )
                )


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _end_to_end(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    lower = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in lower if name == b"connection" for token in value.split(b",")}
    return [(name, value) for name, value in lower if name not in _HOP_BY_HOP and name not in named]


async def _answer(send: Send, status: int, message: str) -> None:
    body: dict[str, Any] = {"error": {"message": message, "type": "proxy_error", "param": None, "code": None}}
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": False})
