"""Servers on loopback: one that answers whatever it is told to, the other end of every client of the product, and one
that leads to a Unix socket, for tools that know no other than TCP. Stdlib only.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

Reply = Callable[[str, str, bytes], bytes]
"""From method, path and body of a request to the bytes that are sent before the connection is closed."""


class _Server(ABC):
    """Accepts connections in ``with``, each served by a thread; on loopback, or at a Unix socket's ``path``.

    ``url`` says where, empty for a Unix socket.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(path))
            self._listener.listen(64)
            self.url = ""

    def __enter__(self) -> Self:
        _in_background(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                stream, _ = self._listener.accept()
                _in_background(self._serve, stream)

    @abstractmethod
    def _serve(self, stream: socket.socket) -> None: ...


class Canned(_Server):
    """Set :attr:`reply`."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path)
        self.reply: Reply = lambda _method, _path, _body: ok(b"")

    def _serve(self, stream: socket.socket) -> None:
        with stream, contextlib.suppress(OSError, ValueError), stream.makefile("rb") as file:
            method, path, *_ = file.readline().decode("latin-1").split()
            size = 0
            while (line := file.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    size = int(line.partition(b":")[2])
            stream.sendall(self.reply(method, path, file.read(size)))
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)


class Forward(_Server):
    """Leads to the Unix socket ``target``."""

    def __init__(self, target: Path) -> None:
        super().__init__()
        self._target = target

    def _serve(self, stream: socket.socket) -> None:
        with stream, socket.socket(socket.AF_UNIX) as far, contextlib.suppress(OSError):
            far.connect(str(self._target))
            back = _in_background(_copy, far, stream)
            _copy(stream, far)
            back.join()


def _in_background(work: Callable[..., None], *given: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=given, daemon=True)
    thread.start()
    return thread


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def answer(status: int, body: bytes, kind: str = "application/json") -> bytes:
    """A whole HTTP answer."""
    head = f"HTTP/1.1 {status} Word\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


def ok(body: bytes) -> bytes:
    return answer(200, body, kind_of(body))


def kind_of(body: bytes) -> str:
    """What a server would call it."""
    return "text/event-stream" if body.startswith(b"data:") else "application/json"


def pages(documents: Mapping[str, Any]) -> Reply:
    """Answers by the path's first part before ``?``: bytes as they are, everything else as JSON; 404 for others."""

    def reply(_method: str, path: str, _body: bytes) -> bytes:
        name = path.partition("?")[0]
        if name not in documents:
            return answer(404, b"{}")
        found = documents[name]
        return ok(found if isinstance(found, bytes) else json.dumps(found).encode())

    return reply
