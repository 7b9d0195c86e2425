"""Delivers one answer, whole or as server-sent events, and gives the request up when its client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from engine.request import FinishReason
from engine.server.bridge import AsyncEngine, ClientGone, RequestStream
from engine.server.errors import CLIENT_CLOSED, ApiError, unavailable
from engine.server.openai import Json, Shape
from engine.server.output import Answer, Piece


def event(document: Json) -> bytes:
    return text_event(json.dumps(document, ensure_ascii=False, separators=(",", ":")))


def text_event(document: str) -> bytes:
    return f"data: {document}\n\n".encode()


class Delivery:
    """One submitted request on its way to its client. ``on_end`` is called once, however it ends."""

    def __init__(
        self,
        engine: AsyncEngine,
        stream: RequestStream,
        answer: Answer,
        shape: Shape,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._stream = stream
        self._answer = answer
        self._shape = shape
        self._on_end = on_end

    async def whole(self, http: HttpRequest) -> Response:
        """The answer in one document; an error document for a request that failed."""
        piece = Piece()
        try:
            async with self._watched(http.receive):
                while piece.finish_reason is None:
                    piece.extend(await self._next())
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED)
        error = _failure(piece)
        if error is not None:
            return error.response()
        return JSONResponse(self._shape.whole(self._answer, piece))

    def close(self) -> None:
        """Whatever became of the delivery, the engine keeps nothing of the request. May be called again."""
        if self._answer.finish_reason is None:
            self._engine.release(self._stream.request_id)
        else:
            self._engine.forget(self._stream.request_id)
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def events(self, *, include_usage: bool) -> EventStream:
        return EventStream(self, include_usage=include_usage)

    async def chunks(self, receive: Receive, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """Events up to ``[DONE]``. A request that fails midway ends with an error event."""
        async with self._watched(receive):
            first = self._shape.first_chunk(self._answer)
            if first is not None:
                yield event(first)
            while self._answer.finish_reason is None:
                piece = await self._next()
                error = _failure(piece)
                if error is not None:
                    yield event(error.body())
                    break
                yield text_event(self._shape.chunk_text(self._answer, piece))
            else:
                if include_usage:
                    yield event(self._shape.usage_chunk(self._answer))
            yield b"data: [DONE]\n\n"

    async def _next(self) -> Piece:
        """The next piece with something to show: a token, its text (perhaps held back) or the end."""
        waiting = Piece()
        while True:
            piece = self._answer.feed_all(await self._stream.take())
            waiting.extend(piece)
            if piece.needs_stop:
                self._engine.release(self._stream.request_id, complete=True)
            # Log-probabilities of the prompt come in parts, one per chunk of prefill; clients get them with a token.
            if waiting.token_ids or waiting.finish_reason is not None:
                return waiting

    @asynccontextmanager
    async def _watched(self, receive: Receive) -> AsyncIterator[None]:
        """Notice a disconnect at once, so that the engine stops working for nobody."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            yield
        finally:
            watcher.cancel()
            self.close()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.close()
        self._stream.abandon()


class EventStream(Response):
    """Server-sent events straight onto the connection: one ASGI message per step, no task group in between."""

    media_type = "text/event-stream"

    def __init__(self, delivery: Delivery, *, include_usage: bool) -> None:
        self._delivery = delivery
        self._include_usage = include_usage
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        chunks = self._delivery.chunks(receive, include_usage=self._include_usage)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except ClientGone:
            return
        finally:
            await chunks.aclose()
            self._delivery.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _failure(piece: Piece) -> ApiError | None:
    if piece.finish_reason == FinishReason.ERROR.value:
        return ApiError(500, piece.error or "the request failed", kind="server_error", code="request_failed")
    if piece.finish_reason == FinishReason.ABORT.value:
        return unavailable(piece.error or "the request was cancelled")
    return None
