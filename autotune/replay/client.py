"""Send one request and record every token of its stream, with as little work per token as can be."""

from __future__ import annotations

import asyncio
import json
import ssl
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autotune.replay.records import Outcome, RequestRecord
from autotune.replay.wire import Endpoint, EventParser, ResponseParser, WireError
from engine.clock import Clock
from engine.json_text import load_json
from engine.text import trouble

DONE = b"[DONE]"
_MOST_TOKENS = 1 << 24  # of one request: more than any model has


@dataclass(frozen=True)
class Answer:
    """A whole answer that is not a stream."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The decoded body, or None when it is not JSON."""
        try:
            return load_json(self.body)
        except ValueError:
            return None

    def error(self) -> str:
        """The server's words, in OpenAI's error format or raw, on one line."""
        body = self.json()
        error = body.get("error", body.get("message", body.get("detail"))) if isinstance(body, dict) else None
        text = error.get("message") if isinstance(error, dict) else error
        return " ".join(str(text or self.body[:200].decode("utf-8", "replace")).split())[:200]


def token_count(value: object) -> int | None:
    """How many tokens a server says there are; None for what cannot be a number of them."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_TOKENS:
        return None
    return value


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time; ``on_body`` runs in the callback that received the bytes."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.parser = ResponseParser()
        self.on_body: Callable[[bytes], None] = lambda _: None
        self.done: asyncio.Future[None] | None = None
        self.received = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # a TCP or TLS transport, both of this class

    def exchange(self, request: bytes, on_body: Callable[[bytes], None]) -> asyncio.Future[None]:
        if self.transport is None:
            raise RuntimeError("not connected")
        self.parser, self.on_body, self.received = ResponseParser(), on_body, False
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        if self.done is None or self.done.done():
            self.close()  # bytes that nobody asked for
            return
        self.received = True
        try:
            body = self.parser.feed(data)
            if body:
                self.on_body(body)
        except WireError as error:
            self.done.set_exception(error)
        else:
            if self.parser.complete:
                self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.done is not None and not self.done.done():
            if self.parser.end():
                self.done.set_result(None)
            else:
                self.done.set_exception(ConnectionResetError(str(exc or "closed by the server")))

    @property
    def usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class Client:
    """Talks to one server. Connections are kept and reused; at most ``max_connections`` are open at once.

    A request past that bound fails at once as ``connection_limit``: waiting for a free connection would thin out the
    arrivals and flatter the server. ``start_ns`` is the zero of all recorded times.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        clock: Clock,
        *,
        max_connections: int = 1024,
        timeout_s: float = 300.0,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.endpoint = endpoint
        self.clock = clock
        self._max_connections = max_connections
        self._timeout_s = timeout_s
        self._headers = headers
        self._idle: list[_Connection] = []
        self._open = 0
        self._tls = ssl.create_default_context() if endpoint.tls else None
        self.start_ns = clock.now_ns()

    def now_s(self) -> float:
        return (self.clock.now_ns() - self.start_ns) / 1e9

    async def call(
        self, method: str, path: str, document: dict[str, Any] | None = None, headers: tuple[tuple[str, str], ...] = ()
    ) -> Answer:
        """One request with a whole answer. Raises ConnectionError, TimeoutError or WireError."""
        body = b"" if document is None else json.dumps(document).encode()
        pieces: list[bytes] = []
        connection = await self._send(
            self.endpoint.request(method, path, body, (*self._headers, *headers)), pieces.append
        )
        self._release(connection)
        return Answer(connection.parser.status, b"".join(pieces))

    async def stream(self, record: RequestRecord, body: bytes, *, exact_tokens: bool) -> None:
        """POST ``body`` to ``/v1/completions`` and fill in the record. Raises only CancelledError.

        ``exact_tokens``: fewer or more tokens than asked for is a failure (the server was told to ignore the end).
        """
        if self._open >= self._max_connections and not self._idle:
            message = f"{self._max_connections} connections already open"
            record.fail("connection_limit", message, self.now_s())
            return
        reader = _StreamReader(record, self.now_s)
        request = self.endpoint.request("POST", "/v1/completions", body, self._headers)
        record.sent_s = self.now_s()
        try:
            connection = await self._send(request, reader.feed)
        except asyncio.CancelledError:
            record.outcome, record.finished_s = Outcome.CANCELLED, self.now_s()
            raise
        except TimeoutError:
            record.fail("timeout", f"no end within {self._timeout_s:g} s", self.now_s())
        except WireError as error:
            record.fail("bad_response", str(error), self.now_s())
        except OSError as error:
            kind = "connect" if isinstance(error, ConnectionRefusedError) else "disconnected"
            record.fail(kind, trouble(error), self.now_s())
        else:
            self._release(connection)
            record.status = connection.parser.status
            reader.close(exact_tokens=exact_tokens)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _send(self, request: bytes, on_body: Callable[[bytes], None]) -> _Connection:
        """One exchange, on a kept connection if there is one; a kept one that proves stale is replaced once."""
        async with asyncio.timeout(self._timeout_s):
            while self._idle:
                connection = self._idle.pop()
                if not connection.usable:
                    self._open -= 1
                    continue
                try:
                    await self._exchange(connection, request, on_body)
                except ConnectionError:
                    if connection.received:
                        raise
                else:
                    return connection
            self._open += 1
            try:
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(
                    _Connection, self.endpoint.host, self.endpoint.port, ssl=self._tls
                )
            except BaseException:
                self._open -= 1
                raise
            await self._exchange(connection, request, on_body)
            return connection

    async def _exchange(self, connection: _Connection, request: bytes, on_body: Callable[[bytes], None]) -> None:
        try:
            await connection.exchange(request, on_body)
        except BaseException:
            self._open -= 1
            connection.close()
            raise

    def _release(self, connection: _Connection) -> None:
        if connection.parser.reusable and connection.usable:
            self._idle.append(connection)
        else:
            self._open -= 1
            connection.close()


class _StreamReader:
    """The body of one streamed completion: counts tokens per event and keeps their times."""

    def __init__(self, record: RequestRecord, now_s: Callable[[], float]) -> None:
        self._record = record
        self._now_s = now_s
        self._events = EventParser()
        self._head = b""  # the first bytes, for an error that is not a stream
        self._any_event = False
        self._done = False
        self._reported: int | None = None

    def feed(self, body: bytes) -> None:
        if len(self._head) < 4096 and not self._any_event:
            self._head += body
        now_s = self._now_s()
        for data in self._events.feed(body):
            self._any_event = True
            if data.strip() == DONE:
                self._done = True
                continue
            try:
                event = load_json(data)
            except ValueError:
                raise WireError(f"an event that is not JSON: {data[:60]!r}") from None
            if not isinstance(event, dict):
                raise WireError(f"an event that is not an object: {data[:60]!r}")
            self._take(event, now_s)

    def _take(self, event: dict[str, Any], now_s: float) -> None:
        record = self._record
        error = event.get("error")
        if error:
            record.fail("stream_error", str(error.get("message") if isinstance(error, dict) else error), now_s)
            return
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        ids, usage = choice.get("token_ids"), event.get("usage")
        counted = None
        if isinstance(usage, dict) and (told := token_count(usage.get("completion_tokens"))) is not None:
            counted = self._reported = told
            details = usage.get("prompt_tokens_details")
            if isinstance(details, dict) and (cached := token_count(details.get("cached_tokens"))) is not None:
                record.cached_tokens = cached
        seen = len(record.token_times_s)
        if isinstance(ids, list):
            new = len(ids)
        elif counted is not None and choice:
            new = counted - seen
        else:
            new = 1 if choice.get("text") else 0
        if new > 0:
            record.token_times_s.extend(array("d", [now_s]) * new)
        reason = choice.get("finish_reason")
        if reason is not None:
            record.finish_reason = str(reason)

    def close(self, *, exact_tokens: bool) -> None:
        """The exchange ended properly: decide what it was."""
        record, now_s = self._record, self._now_s()
        # The server's own count is right where text cannot be told from tokens (one event may hold several).
        record.output_tokens = len(record.token_times_s) if self._reported is None else self._reported
        if record.outcome is not Outcome.PENDING:
            return
        if record.status != 200:
            record.fail(f"http_{record.status}", Answer(record.status or 0, self._head).error(), now_s)
        elif record.finish_reason is None or not self._done:
            record.fail("incomplete", "the stream ended without a finish reason and [DONE]", now_s)
        elif record.finish_reason in {"error", "abort"}:
            record.fail("aborted", f"finish reason {record.finish_reason}", now_s)
        elif exact_tokens and record.output_tokens != record.asked_tokens:
            message = f"{record.output_tokens} tokens instead of {record.asked_tokens}"
            record.fail("wrong_length", message, now_s)
        elif not record.output_tokens:
            record.fail("no_tokens", "the answer holds no token", now_s)
        else:
            record.outcome, record.finished_s = Outcome.COMPLETED, now_s
