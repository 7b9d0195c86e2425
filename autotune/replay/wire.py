"""HTTP/1.1 responses and server-sent events as incremental parsers, without input or output. Stdlib only.

A load generator that shares the machine with the server must cost little per token: bytes are parsed as they arrive,
in the protocol's callback, with no task switch per event.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

MAX_HEAD_BYTES = 64 * 1024
_MOST_DIGITS = 15  # of a size
_HEXADECIMAL = frozenset(b"0123456789abcdefABCDEF")


class WireError(Exception):
    """The peer does not speak HTTP/1.1 as expected; one line."""


@dataclass(frozen=True)
class Endpoint:
    """Where an OpenAI-compatible server listens; ``base`` is the path before ``/v1``."""

    host: str
    port: int
    tls: bool
    base: str

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """From ``http://host:port`` with or without ``/v1``. Raises ValueError in one line."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in {"http", "https"} or not parts.hostname or port == -1:
            raise ValueError(f"{url!r} is not the address of a server: expected http://HOST:PORT")
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(parts.hostname, port or (443 if tls else 80), tls, base)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.base}"

    def request(self, method: str, path: str, body: bytes, headers: tuple[tuple[str, str], ...] = ()) -> bytes:
        """The bytes of one request on a connection that is kept alive."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.base}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "User-Agent: kv-autotune-replay",
            "Accept: text/event-stream, application/json",
        ]
        if body:
            lines.append("Content-Type: application/json")
        lines.append(f"Content-Length: {len(body)}")
        lines += [f"{name}: {value}" for name, value in headers]
        if any(character in line for line in lines for character in "\r\n"):
            raise ValueError("a request line or header may not contain a line break")
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class ResponseParser:
    """One response, fed in pieces of any size: status, headers, and the body with transfer coding undone."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self._buffer = b""
        self._body = ""  # "", "chunked", "length" or "close"
        self._left = 0  # bytes left of the body or of the chunk
        self._chunk = "size"  # what comes next in a chunked body: size, data, end, trailer
        self._keep_alive = True

    @property
    def reusable(self) -> bool:
        """Whether the connection may carry another request."""
        return self.complete and self._keep_alive and self._body != "close" and not self._buffer

    def feed(self, data: bytes) -> bytes:
        """Body bytes that became known. Raises WireError for something that is not an HTTP/1.1 response."""
        self._buffer += data
        while not self._body:
            if not self._read_head():
                return b""
        if self._body == "chunked":
            return self._feed_chunks()
        body, self._buffer = self._buffer, b""
        if self._body == "length":
            body, self._buffer = body[: self._left], body[self._left :]
            self._left -= len(body)
            self.complete = self._left == 0
        return body

    def end(self) -> bool:
        """The peer closed; returns whether the response is whole."""
        if self._body == "close":
            self.complete = True
        return self.complete

    def _read_head(self) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            if len(self._buffer) > MAX_HEAD_BYTES or not self._buffer.startswith(b"HTTP/1."[: len(self._buffer)]):
                raise WireError(f"not an HTTP/1.1 answer: {self._buffer[:40]!r}")
            return False
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not _is_number(words[1]):
            raise WireError(f"not an HTTP/1.1 answer: {lines[0][:40]!r}")
        self._buffer = rest
        status = int(words[1])
        if 100 <= status < 200:
            return bool(rest)  # an interim answer; the real one follows
        self.status = status
        pairs = (line.partition(":") for line in lines[1:])
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        connection = self.headers.get("connection", "").lower()
        self._keep_alive = "close" not in connection and (words[0] != "HTTP/1.0" or "keep-alive" in connection)
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._body = "chunked"
        elif status in {204, 304}:
            self._body, self.complete = "length", True
        elif "content-length" in self.headers:
            length = self.headers["content-length"]
            if not _is_number(length):
                raise WireError(f"bad content-length {length[:20]!r}")
            self._body, self._left = "length", int(length)
            self.complete = self._left == 0
        else:
            self._body = "close"
        return True

    def _feed_chunks(self) -> bytes:
        pieces = []
        while self._buffer and not self.complete:
            if self._chunk == "data":
                piece, self._buffer = self._buffer[: self._left], self._buffer[self._left :]
                self._left -= len(piece)
                pieces.append(piece)
                if self._left == 0:
                    self._chunk = "end"
                continue
            line, found, rest = self._buffer.partition(b"\r\n")
            if not found:
                if len(line) > MAX_HEAD_BYTES:
                    raise WireError("a chunk header without an end")
                break
            self._buffer = rest
            self._chunk_line(line)
        return b"".join(pieces)

    def _chunk_line(self, line: bytes) -> None:
        if self._chunk == "end":
            if line:
                raise WireError(f"expected the end of a chunk, got {line[:20]!r}")
            self._chunk = "size"
        elif self._chunk == "trailer":
            self.complete = not line
        else:
            size = line.split(b";", 1)[0].strip()
            if not 0 < len(size) <= _MOST_DIGITS or not set(size) <= _HEXADECIMAL:
                raise WireError(f"expected the size of a chunk, got {line[:20]!r}")
            self._left = int(size, 16)
            self._chunk = "data" if self._left else "trailer"


def _is_number(text: str) -> bool:
    """Whether it is a whole number as HTTP writes one: a sign, or a digit of another script, is none."""
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


class EventParser:
    """Server-sent events, fed in pieces of any size; yields the data of each event."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []

    def feed(self, body: bytes) -> list[bytes]:
        """Data of the events that became whole (several ``data:`` lines are joined by a newline)."""
        self._buffer += body
        *lines, self._buffer = self._buffer.split(b"\n")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events
