"""The control API: HTTP over a Unix socket whose peers are known by their credentials.

Only the engine's own user, root and the uids it was told of get an answer; for anyone else the connection closes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.json_text import load_json
from engine.server.bridge import AsyncEngine
from engine.server.errors import client_gone, encodable
from engine.tunable_state import Patch

_MAX_BODY_BYTES = 64 << 10

# A bound makes pydantic look into the text, which refuses lone surrogates: the answer repeats the names.
KnobName = Annotated[str, Field(max_length=64)]


class PatchBody(BaseModel):
    """Body of ``PATCH /v1/tunables``; an unknown key is an error, since it may be a misspelt condition."""

    model_config = ConfigDict(extra="forbid")

    changes: dict[KnobName, Any] = Field(min_length=1, max_length=64)
    writer: str = Field(min_length=1, max_length=64)
    reason: str = Field("", max_length=500)
    if_revision: StrictInt | None = None


def control_app(engine: AsyncEngine, about: Mapping[str, str] | None = None) -> Starlette:
    """``GET`` and ``PATCH /v1/tunables``, ``GET /v1/stats``, ``/v1/audit``, ``/v1/about``, ``GET`` and ``DELETE
    /v1/pins[/ID]``. ``about``: what the engine is, in words.
    """

    async def tunables(_http: HttpRequest) -> Response:
        return JSONResponse(await engine.call(lambda core: core.tunables_json()))

    async def patch(http: HttpRequest) -> Response:
        body = await _patch_body(http)
        wish = Patch(body.changes, body.writer, body.reason, body.if_revision)
        outcome = await engine.call(lambda core: core.patch(wish))
        return JSONResponse(outcome.to_json(), outcome.http_status)

    async def stats(_http: HttpRequest) -> Response:
        try:
            reading, _ = await engine.reading()
        except TimeoutError:
            return _error(503, "the first step takes long; try again")
        return JSONResponse(reading.to_json())

    async def audit(_http: HttpRequest) -> Response:
        return JSONResponse(await engine.call(lambda core: core.audit_json()))

    async def tell(_http: HttpRequest) -> Response:
        return JSONResponse(dict(about or {}))

    async def pins(_http: HttpRequest) -> Response:
        return JSONResponse(await engine.call(lambda core: core.pins_json()))

    async def unpin(http: HttpRequest) -> Response:
        pin_id: int | None = http.path_params.get("pin_id")
        ended, view = await engine.call(lambda core: (core.unpin(pin_id), core.pins_json()))
        if pin_id is not None and not ended:
            ids = sorted(row["id"] for row in view["pins"])
            there = f"those that exist: {', '.join(map(str, ids))}" if ids else "there are none"
            return _error(404, f"there is no pin {pin_id}, it may have ended by itself; {there}")
        return JSONResponse({"ended": ended})

    routes = [
        Route("/v1/tunables", _by_method({"GET": tunables, "PATCH": patch}), methods=["GET", "PATCH"]),
        Route("/v1/stats", stats),
        Route("/v1/audit", audit),
        Route("/v1/about", tell),
        Route("/v1/pins", _by_method({"GET": pins, "DELETE": unpin}), methods=["GET", "DELETE"]),
        Route("/v1/pins/{pin_id:int}", unpin, methods=["DELETE"]),
    ]
    handlers: dict[Any, Any] = {HTTPException: _http_error, ClientDisconnect: client_gone, RuntimeError: _ended}
    return Starlette(routes=routes, exception_handlers=handlers)


def _by_method(handlers: dict[str, Callable[[HttpRequest], Any]]) -> Callable[[HttpRequest], Any]:
    async def dispatch(http: HttpRequest) -> Response:
        handler = handlers.get("GET" if http.method == "HEAD" else http.method)
        return cast("Response", await handler(http)) if handler else _error(405, "method not allowed")

    return dispatch


async def _patch_body(http: HttpRequest) -> PatchBody:
    raw = b""
    async for part in http.stream():
        raw += part
        if len(raw) > _MAX_BODY_BYTES:
            raise HTTPException(413, f"the request body is larger than {_MAX_BODY_BYTES} bytes")
    try:
        return PatchBody.model_validate(load_json(raw))
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in details["loc"])
        raise HTTPException(400, f"{field}: {details['msg']}") from error
    except ValueError as error:
        raise HTTPException(400, f"the request body is not JSON: {error}") from error


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": encodable(message)}}, status)


async def _http_error(_http: HttpRequest, error: Exception) -> Response:
    return _error(getattr(error, "status_code", 500), str(getattr(error, "detail", error)))


async def _ended(_http: HttpRequest, error: Exception) -> Response:
    return _error(503, str(error))
