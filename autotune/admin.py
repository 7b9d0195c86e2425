"""HTTP for people and Prometheus: metrics, recent decisions, status; on loopback unless told otherwise.

What it shows needs no token and changes nothing; the page for people is :mod:`autotune.dashboard`, what can be ordered
is in :mod:`autotune.admin_actions`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from autotune.decisions import DecisionLog
from autotune.jsonable import finite

_MAX_DECISIONS = 500
_MAX_DIGITS = 20


class AdminError(Exception):
    """The admin port cannot be had, in one line."""


def admin_app(
    registry: CollectorRegistry,
    decisions: DecisionLog,
    status: Callable[[], Mapping[str, Any]],
    more: Sequence[Route] = (),
) -> Starlette:
    """The application: ``/metrics``, ``/decisions?limit=N``, ``/status``, ``/healthz``, and ``more``.

    ``status()`` returns the daemon's state as JSON-able values with a key ``healthy``; it is called in another thread
    than the loop's.
    """

    def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    def recent(request: Request) -> Response:
        text = request.query_params.get("limit", "50")
        # The length first: Python refuses to read thousands of digits.
        if not text.isdecimal() or len(text) > _MAX_DIGITS or not 1 <= int(text) <= _MAX_DECISIONS:
            shown = text if len(text) <= _MAX_DIGITS else text[:_MAX_DIGITS] + "…"
            return JSONResponse({"error": f"limit must be 1 to {_MAX_DECISIONS}, got {shown!r}"}, status_code=400)
        return _json({"decisions": [record.to_json() for record in decisions.recent(int(text))]})

    def state(_: Request) -> Response:
        return _json(status())

    def health(_: Request) -> Response:
        healthy = bool(status().get("healthy"))
        return JSONResponse({"healthy": healthy}, status_code=200 if healthy else 503)

    routes = [("/metrics", metrics), ("/decisions", recent), ("/status", state), ("/healthz", health)]
    return Starlette(routes=[Route(path, endpoint, methods=["GET"]) for path, endpoint in routes] + [*more])


class AdminServer:
    """Serves an application from a thread of its own. The port is taken at once, so a busy one is an error here.

    Raises AdminError when the address cannot be bound.
    """

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        self._socket = _bind(host, port)
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=2,
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="admin", daemon=True)

    @property
    def address(self) -> str:
        """``http://host:port``, with the real port when 0 was asked for."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.end()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._socket.close()


class _Server(uvicorn.Server):
    """Waits for its end instead of looking for it ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        if not self.should_exit:
            await self._ended.wait()

    def end(self) -> None:
        """Have it end soon. For any thread, before it has begun, too."""
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._ended.set)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise AdminError(f"admin address {host}: {error.strerror or error}; set admin.host") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(64)
    except OSError as error:
        bound.close()
        hint = "set admin.port to a free one, or 0"
        raise AdminError(f"admin port {port} on {host}: {error.strerror or error}; {hint}") from error
    return bound


def _json(value: object) -> Response:
    return Response(json.dumps(finite(value)), media_type="application/json")
