"""HTTP over a Unix socket with the standard library alone.

The daemon asks three times a second for months, and pays for all that a general client imports and does.
"""

from __future__ import annotations

import http.client
import json
import select
import socket
from pathlib import Path
from typing import Any


class NotConnectedError(Exception):
    """Nobody takes the connection; the cause says why."""


class UnixHttp:
    """One kept connection to the server at ``path``; one request at a time. ``timeout_s``: of every wait for it."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._connection = _UnixConnection(path, timeout_s)

    def request(self, method: str, path: str, document: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and whole body.

        Raises NotConnectedError, TimeoutError, OSError or HTTPException (no HTTP, or the connection was closed), and
        ValueError for a document that is not JSON or UTF-8.
        """
        body, headers = None, {}
        if document is not None:
            body = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
            headers = {"content-type": "application/json"}
        connection = self._connection
        if connection.is_stale():
            connection.close()
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except BaseException:
            connection.close()  # what is left of this exchange is no beginning of the next one
            raise

    def close(self) -> None:
        self._connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("engine", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(str(self._path))
        except TimeoutError:
            raise
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            raise NotConnectedError(str(error)) from error

    def is_stale(self) -> bool:
        """Whether a kept connection has something to read before anything was asked: its end, most likely."""
        return self.sock is not None and bool(select.select([self.sock], [], [], 0)[0])
