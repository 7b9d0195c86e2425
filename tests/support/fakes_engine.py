"""A fake engine: figures that a test sets by hand, and its control API over a real Unix socket."""

from __future__ import annotations

import json
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Self

from autotune.bench.figure_engine import FigureEngine
from engine.clock import Clock
from engine.stats import EngineStats, ResidentBytes

POOL_BYTES = 64 * 2**20


class FakeEngine(FigureEngine):
    """Figures that a test sets by hand. ``alive`` False: nobody answers."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, "fake", POOL_BYTES)
        self.frozen = False  # answers with an old stamp

    @property
    def alive(self) -> bool:
        return not self.is_away

    @alive.setter
    def alive(self, alive: bool) -> None:
        self.is_away = not alive

    def restart(self) -> None:
        super().restart()
        self.set_usage(0.1)

    def stats(self) -> EngineStats:
        stamp_ns = self.figures.stamp_ns
        reading = super().stats()
        if self.frozen:
            self.figures.stamp_ns = reading.stamp_ns = stamp_ns
        return reading

    def set_usage(self, share: float, running: int = 8, waiting: int = 0) -> None:
        """So much of the pool is in use, natively, at 1 KiB a token."""
        used = int(share * POOL_BYTES)
        gauges = self.figures.gauges
        gauges.kv_usage, gauges.kv_used_bytes, gauges.running, gauges.waiting = share, used, running, waiting
        gauges.resident_tokens = used // 1024
        gauges.resident = [ResidentBytes("native", 16, used, used // 1024)]

    def serve_requests(self, number: int, *, ttft_s: float = 0.2, gap_s: float = 0.02, tokens: int = 32) -> None:
        """So many requests arrived, were served and finished since the last reading."""
        counters = self.figures.counters
        counters.requests_offered += number
        counters.requests_admitted += number
        counters.requests_completed += number
        counters.generation_tokens += number * tokens
        counters.prompt_tokens += number * 100
        for histogram, value, times in (
            (self.figures.ttft, ttft_s, number),
            (self.figures.itl, gap_s, number * (tokens - 1)),
            (self.figures.prompt_lengths, 0.1, number),
            (self.figures.output_lengths, tokens / 1000, number),
        ):
            histogram.observe(value, times)


class FakeControlServer:
    """Serves a FakeEngine's control API over a Unix socket from a thread, for tests of whole processes."""

    def __init__(self, engine: FakeEngine, socket: Path) -> None:
        self.engine = engine
        self.pins: list[dict[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/v1/stats":
                    self._answer(200, server.engine.stats().to_json())
                elif self.path == "/v1/pins":
                    self._answer(200, {"pins": server.pins, "bytes": 4096 * len(server.pins), "max_bytes": 1 << 20})
                elif self.path == "/v1/tunables":
                    self._answer(200, server.engine.tunables())
                else:
                    self._answer(404, {"error": {"message": "no such page"}})

            def do_DELETE(self) -> None:
                name = self.path.removeprefix("/v1/pins").removeprefix("/")
                ended = [pin for pin in server.pins if name in {"", str(pin["id"])}]
                server.pins = [pin for pin in server.pins if pin not in ended]
                known = bool(ended) or not name
                self._answer(
                    200 if known else 404, {"ended": len(ended)} if known else {"error": {"message": "no pin"}}
                )

            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                answer = server.engine.patch(
                    body["changes"], writer=body["writer"], reason=body["reason"], if_revision=body["if_revision"]
                )
                statuses = {result["status"] for result in answer["results"].values()}
                self._answer(409 if "conflict" in statuses else 422 if "rejected" in statuses else 200, answer)

            def _answer(self, status: int, document: Any) -> None:
                text = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def address_string(self) -> str:
                return "uds"

            def log_message(self, *_: object) -> None:
                pass

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True

        self._server = Server(str(socket), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
