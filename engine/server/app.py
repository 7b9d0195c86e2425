"""The HTTP application: routes, limits, request ids, errors. No CORS: other origins have no business here."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.admission import AdmissionError
from engine.clock import Clock
from engine.json_text import load_json
from engine.metrics import CONTENT_TYPE, EngineMetrics
from engine.recording import PROBE_HEADER, Exchange, TrafficRecorder
from engine.request import FinishReason
from engine.server.bridge import AsyncEngine
from engine.server.errors import ApiError, BadRequest, client_gone, from_admission, unavailable
from engine.server.intake import Ask, Intake, ServedModel
from engine.server.openai import ChatShape, CompletionShape
from engine.server.output import Answer
from engine.server.protocol import ChatRequest, CompletionRequest, FeedbackRequest, TokenizeRequest, parse
from engine.server.streaming import Delivery

_REMEMBERED_REQUESTS = 10_000
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,96}")


@dataclass(frozen=True)
class AppOptions:
    """``max_body_bytes`` and ``body_timeout_s`` bound what is read of any request and for how long."""

    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 60.0
    retry_after_s: int = 1


class Api:
    """The endpoints over one engine. ``new_id`` gives ids to requests that bring none; ``recorder`` is told of every
    request that was admitted, once it has ended.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        served: ServedModel,
        metrics: EngineMetrics,
        clock: Clock,
        new_id: Callable[[], str],
        options: AppOptions | None = None,
        recorder: TrafficRecorder | None = None,
    ) -> None:
        self._engine = engine
        self._served = served
        self._metrics = metrics
        self._clock = clock
        self._new_id = new_id
        self._options = options or AppOptions()
        self._recorder = recorder
        self._intake = Intake(served)
        # Scores by request id, so that feedback about an answer counts once and only for answers that were given.
        self._scores: OrderedDict[str, float | None] = OrderedDict()
        self._token_texts: dict[int, str] = {}

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/feedback", self.feedback, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.metrics_page),
        ]
        handlers: dict[Any, Any] = {
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: client_gone,
            Exception: _internal_error,
        }
        return Edge(Starlette(routes=routes, exception_handlers=handlers), self._metrics, self._new_id)

    async def completions(self, http: HttpRequest) -> Response:
        arrival_ns = self._clock.now_ns()
        body = parse(CompletionRequest, await self._document(http))
        self._served.check_name(body.model)
        ask = await self._intake.completion(body, _request_id(http), arrival_ns)
        return await self._generate(http, ask, CompletionShape)

    async def chat(self, http: HttpRequest) -> Response:
        arrival_ns = self._clock.now_ns()
        body = parse(ChatRequest, await self._document(http))
        self._served.check_name(body.model)
        ask = await self._intake.chat(body, _request_id(http), arrival_ns)
        return await self._generate(http, ask, ChatShape)

    async def models(self, _http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, http: HttpRequest) -> Response:
        self._served.check_name(http.path_params["name"])
        return JSONResponse(self._model_card())

    async def tokenize(self, http: HttpRequest) -> Response:
        body = parse(TokenizeRequest, await self._document(http))
        self._served.check_name(body.model)
        if (body.prompt is None) == (not body.messages):
            raise BadRequest("give either prompt or messages", "prompt")
        if body.messages:
            text = self._intake.render(body.messages, add_generation_prompt=body.add_generation_prompt is not False)
            ids = await self._intake.encode(text, add_special_tokens=body.add_special_tokens is True)
        else:
            ids = await self._intake.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        answer = {"count": len(ids), "max_model_len": self._served.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [self._served.tokenizer.id_to_token(token_id) for token_id in ids]
        return JSONResponse(answer)

    async def feedback(self, http: HttpRequest) -> Response:
        body = parse(FeedbackRequest, await self._document(http))
        request_id = body.request_id.removeprefix("cmpl-").removeprefix("chatcmpl-")
        if request_id not in self._scores:
            message = f"no answer with the id {body.request_id[:100]!r} is remembered"
            raise ApiError(404, message, param="request_id", code="request_not_found")
        known = self._scores[request_id]
        if known is not None and known != body.score:
            raise ApiError(409, f"{request_id} was scored {known} before", param="score", code="already_scored")
        if known is None:
            self._scores[request_id] = body.score
            await self._engine.call(lambda core: core.feedback(body.score))
        return JSONResponse({"request_id": request_id, "score": body.score})

    async def health(self, _http: HttpRequest) -> Response:
        reason = self._engine.unavailable_because
        if reason is not None:
            raise unavailable(reason)
        return JSONResponse({"status": "ok"})

    async def metrics_page(self, _http: HttpRequest) -> Response:
        try:
            self._metrics.update(*await self._engine.reading())
        except TimeoutError:
            raise unavailable("the first step takes long; try again") from None
        return Response(self._metrics.page(), media_type=CONTENT_TYPE)

    async def _generate(self, http: HttpRequest, ask: Ask, shape: type[CompletionShape | ChatShape]) -> Response:
        reason = self._engine.unavailable_because
        if reason is not None:
            raise unavailable(reason)
        try:
            stream = await self._engine.submit(ask.request)
        except AdmissionError as error:
            raise from_admission(error, self._options.retry_after_s) from error
        except ValueError as error:
            raise ApiError(409, str(error), param="X-Request-Id", code="request_id_in_use") from error
        self._remember(ask.request.request_id)
        answer = Answer(
            ask, self._served.new_detokenizer(ask.request.prompt_ids), self._served.eos_token_ids.__contains__
        )
        shown = shape(ask, self._served.name, int(self._clock.wall_s()), self._token_text)
        delivery = Delivery(self._engine, stream, answer, shown, self._when_ended(http, ask, answer))
        if ask.stream:
            return delivery.events(include_usage=ask.include_usage)
        return await delivery.whole(http)

    def _when_ended(self, http: HttpRequest, ask: Ask, answer: Answer) -> Callable[[], None] | None:
        recorder, request = self._recorder, ask.request
        if recorder is None or PROBE_HEADER in http.headers:
            return None

        def record() -> None:
            recorder.record(
                Exchange(
                    request.arrival_ns,
                    answer.prompt_tokens,
                    answer.completion_tokens,
                    request.prompt_ids,
                    answer.finish_reason or FinishReason.ABORT.value,
                    request.cache.salt,
                )
            )

        return record

    async def _document(self, http: HttpRequest) -> object:
        """The JSON of a body.

        Raises ApiError 413 for one that is too large, 408 for one that does not end, 400 for one that is no JSON.
        """
        limit, parts, size = self._options.max_body_bytes, [], 0
        try:
            async with asyncio.timeout(self._options.body_timeout_s):
                async for part in http.stream():
                    size += len(part)
                    if size > limit:
                        raise ApiError(413, f"the request body is larger than {limit} bytes", code="body_too_large")
                    parts.append(part)
        except TimeoutError:
            message = f"the request body did not come within {self._options.body_timeout_s:g} s"
            raise ApiError(408, message, code="body_too_slow", headers={"Connection": "close"}) from None
        try:
            return load_json(b"".join(parts))
        except ValueError as error:
            raise BadRequest(f"the request body is not JSON: {error}") from error

    def _remember(self, request_id: str) -> None:
        self._scores[request_id] = None
        self._scores.move_to_end(request_id)
        while len(self._scores) > _REMEMBERED_REQUESTS:
            self._scores.popitem(last=False)

    def _token_text(self, token_id: int) -> str:
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._served.tokenizer.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text  # at most the vocabulary
        return text

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._served.created_s,
            "owned_by": "kv-autotune",
            "max_model_len": self._served.max_model_len,
        }


class Edge:
    """Outermost: gives every exchange an id that its response carries, and counts it."""

    def __init__(self, app: ASGIApp, metrics: EngineMetrics, new_id: Callable[[], str]) -> None:
        self._app = app
        self._metrics = metrics
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else self._new_id()
        scope["request_id"] = request_id
        status, started = 500, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            # The server does so at its end to what will not finish, mostly bodies that never came whole.
            if not started:
                await unavailable("the engine is shutting down").response()(scope, receive, send_with_id)
        finally:
            self._metrics.http_request(scope["path"], status)


def _request_id(http: HttpRequest) -> str:
    return str(http.scope["request_id"])


async def _api_error(_http: HttpRequest, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise TypeError(f"not an ApiError: {error!r}")
    return error.response()


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise TypeError(f"not an HTTPException: {error!r}")
    message = f"{http.method} {http.url.path[:200]}: {error.detail}"
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _internal_error(_http: HttpRequest, _error: Exception) -> Response:
    return ApiError(500, "internal error", kind="server_error").response()
