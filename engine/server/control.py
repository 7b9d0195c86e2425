"""The control API: HTTP over a Unix socket whose peers are known by their credentials.

Only the engine's own user, root and the uids it was told of get an answer; for anyone else the connection closes.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import stat
import struct
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.errors import EngineError
from engine.paths import MAX_SOCKET_PATH_BYTES
from engine.server.bridge import AsyncEngine
from engine.server.errors import client_gone, encodable
from engine.tunable_state import Patch

_MAX_BODY_BYTES = 64 << 10
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


# A bound makes pydantic look into the text, which refuses lone surrogates: the answer repeats the names.
KnobName = Annotated[str, Field(max_length=64)]


class PatchBody(BaseModel):
    """Body of ``PATCH /v1/tunables``; an unknown key is an error, since it may be a misspelt condition."""

    model_config = ConfigDict(extra="forbid")

    changes: dict[KnobName, Any] = Field(min_length=1, max_length=64)
    writer: str = Field(min_length=1, max_length=64)
    reason: str = Field("", max_length=500)
    if_revision: StrictInt | None = None


class ControlSocket:
    """A bound, listening Unix socket. Two engines cannot share a path: a lock file beside it decides races, and a
    socket left behind by a dead engine is replaced.
    """

    def __init__(self, path: Path, *, mode: int = 0o600) -> None:
        """Raises EngineError when the path is too long, in use, not ours, or cannot be made."""
        self.path = path
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise EngineError(
                f"control socket path {path} has {len(os.fsencode(path))} bytes, more than the {MAX_SOCKET_PATH_BYTES} "
                "that a Unix socket may have; name a shorter one with --control"
            )
        self._lock = -1
        try:
            _private_folder(path.parent)
            self._take_lock()
            self._remove_stale()
            self.socket = self._bind(mode)
        except OSError as error:
            self._drop_lock()
            raise EngineError(f"cannot create the control socket {path}: {error.strerror or error}") from error
        except EngineError:
            self._drop_lock()
            raise
        self._inode = path.stat().st_ino

    def close(self) -> None:
        """Close, and remove the path if it is still this socket."""
        self.socket.close()
        try:
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
        except OSError:
            pass  # gone already
        self._drop_lock()

    def _take_lock(self) -> None:
        self._lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use() from None

    def _drop_lock(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _remove_stale(self) -> None:
        try:
            kind = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(kind):
            raise EngineError(f"{self.path} exists and is not a socket; remove it or name another with --control")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            try:
                probe.connect(str(self.path))
            except (ConnectionRefusedError, FileNotFoundError):
                self.path.unlink(missing_ok=True)
                return
            except OSError:
                pass  # something holds it, even if it does not answer us
        raise self._in_use()

    def _in_use(self) -> EngineError:
        return EngineError(f"another engine listens on {self.path}; stop it or name another socket with --control")

    def _bind(self, mode: int) -> socket.socket:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The folder is private, and the mode is set before anything is accepted.
            bound.bind(str(self.path))
            self.path.chmod(mode)
            bound.listen(64)
            bound.setblocking(False)
        except OSError:
            bound.close()
            raise
        return bound


def peer_checked_protocol(allowed_uids: Collection[int]) -> type[asyncio.Protocol]:
    """A uvicorn protocol that closes connections of peers with another uid than these."""
    allowed = frozenset(allowed_uids)

    class PeerCheckedProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            peer = cast("socket.socket", transport.get_extra_info("socket"))
            raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, uid, _ = _CREDENTIALS.unpack(raw)
            super().connection_made(transport)
            if uid not in allowed:
                transport.abort()

    return PeerCheckedProtocol


def allowed_uids(extra: Collection[int] = ()) -> frozenset[int]:
    """The engine's own user, root, and those configured."""
    return frozenset({os.geteuid(), 0, *extra})


def control_app(engine: AsyncEngine) -> Starlette:
    """``GET`` and ``PATCH /v1/tunables``, ``GET /v1/stats``, ``/v1/audit``, ``GET`` and ``DELETE /v1/pins[/ID]``."""

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
        return PatchBody.model_validate(json.loads(raw))
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in details["loc"])
        raise HTTPException(400, f"{field}: {details['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the request body is not JSON: {error}") from error


def _private_folder(folder: Path) -> None:
    """Make the folder 0700, or accept one that others can neither own nor write to."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid not in {os.geteuid(), 0}:
        raise EngineError(f"{folder} belongs to another user; name another control socket with --control")
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise EngineError(f"{folder} is writable for everyone; name another control socket with --control")


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": encodable(message)}}, status)


async def _http_error(_http: HttpRequest, error: Exception) -> Response:
    return _error(getattr(error, "status_code", 500), str(getattr(error, "detail", error)))


async def _ended(_http: HttpRequest, error: Exception) -> Response:
    return _error(503, str(error))
