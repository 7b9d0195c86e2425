"""The client of the engine's control socket: how daemon and command line read and change an engine. No torch."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, cast

from engine.control_wire import NotConnectedError, UnixHttp
from engine.json_text import load_json
from engine.paths import MAX_SOCKET_PATH_BYTES
from engine.shapes import fits
from engine.stats import EngineStats
from engine.text import one_line
from engine.tunables import TunableValue


class EngineUnreachable(Exception):  # noqa: N818 - a state of the world that callers handle, not a mistake
    """No engine answers on the socket, or what answers is not one. The message is one line for people."""


class KnobWriter(TypedDict):
    """Who set a knob last."""

    writer: str
    reason: str
    revision: int
    stamp_ns: int


class ResidentRow(TypedDict):
    """A row of :class:`engine.stats.ResidentBytes`."""

    kv_format: str
    block_size: int
    bytes: int
    tokens: int


class Progress(TypedDict):
    """How far resident KV has followed, and shares."""

    resident: list[ResidentRow]
    converged_fraction: float
    held_below_format_bytes: int


class TunablesView(TypedDict):
    """Answer of ``GET /v1/tunables``."""

    instance: str
    revision: int
    desired: dict[str, TunableValue]
    effective: dict[str, TunableValue]
    writers: dict[str, KnobWriter]
    progress: Progress


class KnobResult(TypedDict):
    """What became of one change: ``applied | converging | rejected | conflict`` and why."""

    status: str
    why: str


class PatchAnswer(TypedDict):
    """Answer of ``PATCH /v1/tunables``, also when it was refused (409 conflict, 422 rejected)."""

    revision: int
    results: dict[str, KnobResult]


class PinRow(TypedDict):
    """One pinned prefix. ``bytes`` are shared with other pins and requests."""

    id: int
    request_id: str
    num_tokens: int
    bytes: int
    ttl_s: float
    expires_in_s: float


class PinsView(TypedDict):
    """Answer of ``GET /v1/pins``, soonest to end first; ``bytes`` of all, each block once, of at most ``max_bytes``."""

    pins: list[PinRow]
    bytes: int
    max_bytes: int


class AuditView(TypedDict):
    """Answer of ``GET /v1/audit``: what contradicts what in the cache's books, None when they agree; seconds taken."""

    problem: str | None
    took_s: float


_REFUSALS = (200, 409, 422)


class ControlClient:
    """Blocking client of one engine's control socket; use it from one thread at a time.

    Every method raises EngineUnreachable when the engine is away, slow beyond ``timeout_s``, closes the connection
    (peer not allowed), or answers something else than the control API does.
    """

    def __init__(self, socket: str | Path, *, timeout_s: float = 5.0) -> None:
        self.socket = Path(socket)
        self._http = UnixHttp(self.socket, timeout_s)

    def tunables(self) -> TunablesView:
        """Revision, desired and effective values, progress, and who wrote last."""
        body = self._json(self._request("GET", "/v1/tunables"))
        if not fits(body, TunablesView):
            raise EngineUnreachable(f"{self.socket}: not the control API of an engine")
        return cast("TunablesView", body)

    def patch(
        self,
        changes: Mapping[str, TunableValue],
        *,
        writer: str,
        reason: str = "",
        if_revision: int | None = None,
    ) -> PatchAnswer:
        """Ask for changes: all are taken or none. A refusal is an answer, not an exception.

        Raises ValueError for a request that the engine finds malformed (an empty writer, say).
        """
        document = {"if_revision": if_revision, "changes": dict(changes), "writer": writer, "reason": reason}
        answer = self._request("PATCH", "/v1/tunables", document)
        body = self._json(answer)
        if answer[0] not in _REFUSALS or not fits(body, PatchAnswer):
            message = _message(body, f"status {answer[0]}")
            raise ValueError(f"{self.socket}: {message}")
        return cast("PatchAnswer", body)

    def stats(self) -> EngineStats:
        """One reading of the engine."""
        body = self._json(self._request("GET", "/v1/stats"))
        try:
            return EngineStats.from_json(body)
        except ValueError as error:
            raise EngineUnreachable(f"{self.socket}: {error}") from error

    def pins(self) -> PinsView:
        """The pinned prefixes."""
        body = self._json(self._request("GET", "/v1/pins"))
        if not fits(body, PinsView):
            raise EngineUnreachable(f"{self.socket}: this engine knows no pins")
        return cast("PinsView", body)

    def unpin(self, pin_id: int | None = None) -> int:
        """End one pin, or all; returns how many that were. Raises ValueError when there is no such pin."""
        answer = self._request("DELETE", "/v1/pins" if pin_id is None else f"/v1/pins/{pin_id}")
        body = self._json(answer)
        if answer[0] != 200 or not fits(body.get("ended"), int):
            raise ValueError(_message(body, f"status {answer[0]}"))
        return int(body["ended"])

    def audit(self) -> AuditView:
        """Have the cache's books recounted, between two steps. Takes as long as the cache is large."""
        body = self._json(self._request("GET", "/v1/audit"))
        if not fits(body, AuditView):
            raise EngineUnreachable(f"{self.socket}: this engine knows no audit")
        return cast("AuditView", body)

    def about(self) -> dict[str, str]:
        """Version, torch and device of the engine; empty for one that is too old to tell."""
        answer = self._request("GET", "/v1/about")
        body = self._json(answer)
        return {str(name): str(value) for name, value in body.items()} if answer[0] == 200 else {}

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, method: str, path: str, document: dict[str, Any] | None = None) -> tuple[int, bytes]:
        if len(str(self.socket).encode()) > MAX_SOCKET_PATH_BYTES:
            raise EngineUnreachable(f"{self.socket}: longer than the {MAX_SOCKET_PATH_BYTES} bytes a socket may have")
        try:
            return self._http.request(method, path, document)
        except TimeoutError as error:
            doubt = "" if method == "GET" else "; it may still take the change"
            raise EngineUnreachable(f"{self.socket}: no answer within {self._http.timeout_s} s{doubt}") from error
        except NotConnectedError as error:
            reason = "no engine listens here; start one with `autotune engine`, or name its socket with --control"
            if _is_backlog_full(error):
                reason = "the engine is there but takes no more connections: it is still starting, or hangs; try again"
            # That nothing is there is what the reason says already.
            usual = isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError)
            raise EngineUnreachable(f"{self.socket}: {reason}" + ("" if usual else f" ({error})")) from error
        except (OSError, HTTPException) as error:
            raise EngineUnreachable(f"{self.socket}: connection closed (is this user allowed?)") from error

    def _json(self, answer: tuple[int, bytes]) -> dict[str, Any]:
        status, data = answer
        try:
            body = load_json(data)
        except ValueError as error:
            raise EngineUnreachable(f"{self.socket}: answered no JSON (status {status})") from error
        if not isinstance(body, dict) or status >= 500:
            message = _message(body, "") if isinstance(body, dict) else ""
            raise EngineUnreachable(f"{self.socket}: status {status} {message}".rstrip())
        return body


def _message(body: dict[str, Any], otherwise: str) -> str:
    """What an answer says is wrong."""
    error = body.get("error")
    return one_line(error.get("message", otherwise)) if isinstance(error, dict) else otherwise


def _is_backlog_full(error: NotConnectedError) -> bool:
    """A Unix socket whose queue of connections is full answers as if a call would have to wait."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.EAGAIN
