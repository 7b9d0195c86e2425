"""HTTP over a Unix socket with the standard library alone.

The daemon asks three times a second for months, and pays for all that a general client imports and does.
"""

from __future__ import annotations

import http.client
import json
import math
import select
import socket
import time
from pathlib import Path
from typing import Any, Final

from engine.text import trouble

_MOST_BYTES: Final = 16 << 20


class NotConnectedError(Exception):
    """Nobody takes the connection; the cause says why."""


class UnixHttp:
    """One kept connection to the server at ``path``; one request at a time. ``timeout_s``: of a whole call, so that a
    server that answers a byte at a time holds nobody up either.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._connection = _UnixConnection(path, timeout_s)

    def request(self, method: str, path: str, document: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and whole body.

        Raises NotConnectedError, TimeoutError, OSError or HTTPException (no HTTP, no whole answer, far too much of one,
        or the connection was closed), and ValueError for a document that is not JSON or UTF-8.
        """
        body, headers = None, {}
        if document is not None:
            body = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
            headers = {"content-type": "application/json"}
        connection = self._connection
        if connection.is_stale():
            connection.close()
        connection.begin()
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            found = answer.read(_MOST_BYTES)
        except BaseException:
            connection.close()  # what is left of this exchange is no beginning of the next one
            raise
        if not answer.isclosed():
            connection.close()
            raise http.client.HTTPException("less than was announced, or far too much")
        return answer.status, found

    def close(self) -> None:
        self._connection.close()


class _UnixConnection(http.client.HTTPConnection):
    sock: _PatientSocket | None

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("engine", timeout=timeout_s)
        self._path, self._timeout_s = path, timeout_s
        self._ends_s = math.inf

    def begin(self) -> None:
        """A call begins, which has so long."""
        self._ends_s = time.monotonic() + self._timeout_s
        if self.sock is not None:
            self.sock.ends_s = self._ends_s
            self.sock.settimeout(self._timeout_s)

    def connect(self) -> None:
        self.sock = _PatientSocket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.ends_s = self._ends_s
        self.sock.settimeout(self._timeout_s)
        try:
            self.sock.connect(str(self._path))
        except TimeoutError:
            raise
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            raise NotConnectedError(trouble(error)) from error

    def is_stale(self) -> bool:
        """Whether a kept connection has something to read before anything was asked: its end, most likely."""
        return self.sock is not None and bool(select.select([self.sock], [], [], 0)[0])


class _PatientSocket(socket.socket):
    """Everything that is read from it has to come by ``ends_s``, seconds of the monotonic clock."""

    ends_s = math.inf

    def recv_into(self, *given: Any, **options: Any) -> int:
        left_s = self.ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no whole answer in time")
        self.settimeout(min(left_s, 1e6))
        return super().recv_into(*given, **options)
