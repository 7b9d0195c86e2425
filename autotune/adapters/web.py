"""A few requests to an engine's HTTP port: short, bounded, never by way of a proxy."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from autotune.adapters.page import MOST_BYTES
from engine.control_client import EngineUnreachable
from engine.json_text import load_json
from engine.text import one_line, trouble


class Web:
    """The server at ``url`` (scheme, host, port, perhaps a path before the usual ones). Raises ValueError for what is
    no such address.
    """

    def __init__(self, url: str, timeout_s: float = 2.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{url!r}: must be an address such as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/metrics")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def text(self, path: str) -> str:
        """The body of a GET. Raises EngineUnreachable, for any status but 200 too."""
        return self._ask("GET", path).decode("utf-8", errors="replace")

    def json(self, path: str) -> Mapping[str, Any]:
        """The same, a JSON object."""
        try:
            body = load_json(self.text(path))
        except ValueError as error:
            raise EngineUnreachable(f"{self.url}{path}: not JSON") from error
        if not isinstance(body, dict):
            raise EngineUnreachable(f"{self.url}{path}: not a JSON object")
        return body

    def is_ok(self, path: str) -> bool:
        """Whether a GET is answered 200."""
        try:
            self._ask("GET", path)
        except EngineUnreachable:
            return False
        return True

    def post(self, path: str) -> bool:
        """Whether a POST without a body is answered 200."""
        try:
            self._ask("POST", path)
        except EngineUnreachable:
            return False
        return True

    def _ask(self, method: str, path: str) -> bytes:
        data = b"" if method == "POST" else None
        request = urllib.request.Request(f"{self.url}{path}", data=data, method=method)  # noqa: S310  # checked above
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                body = self._body(answer)
        except urllib.error.HTTPError as error:
            error.close()
            raise EngineUnreachable(f"{self.url}{path}: answered {error.code}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise EngineUnreachable(one_line(f"no engine answers at {self.url} ({trouble(error)})")) from error
        if len(body) > MOST_BYTES:
            raise EngineUnreachable(f"{self.url}{path}: more than {MOST_BYTES} bytes")
        return body

    def _body(self, answer: HTTPResponse) -> bytes:
        """All of it, up to one byte more than may be; the whole has to come in time, not only each part of it."""
        body, announced = b"", answer.length
        most = MOST_BYTES + 1 if announced is None else min(announced, MOST_BYTES + 1)
        ends_s = time.monotonic() + self._timeout_s
        while len(body) < most and (part := answer.read1(most - len(body))):
            body += part
            if time.monotonic() > ends_s:
                raise TimeoutError("it takes too long to answer")
        if announced is not None and len(body) < most:  # the last figure of a page may be a part of one
            raise HTTPException("the answer was cut off")
        return body
