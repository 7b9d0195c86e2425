"""A closed loop of streamed completions over HTTP that costs little itself: it counts events and parses hardly any.

Every answer comes over a connection of its own, as each server does that best.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import time
from dataclasses import dataclass

_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
_EVENT = b"data: {"
_KEPT = len(_EVENT) - 1


@dataclass(frozen=True)
class Target:
    """A server. ``extra``: fields that it needs beside the usual."""

    host: str
    port: int
    model: str
    extra: tuple[tuple[str, object], ...] = ()

    def body(self, prompt: list[int], output: int) -> bytes:
        document: dict[str, object] = {
            "model": self.model, "prompt": prompt, "max_tokens": output, "temperature": 0, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True}, **dict(self.extra),
        }  # fmt: skip
        return json.dumps(document).encode()


@dataclass(frozen=True)
class Answer:
    """Seconds, and tokens as the server counts them."""

    ttft_s: float
    after_s: float
    tokens: int


class _Exchange(asyncio.Protocol):
    """One request. ``answer`` is set when the server has closed the connection."""

    def __init__(self, request: bytes, answer: asyncio.Future[Answer]) -> None:
        self._request = request
        self._answer = answer
        self._begin_s = self._first_s = self._last_s = 0.0
        self._events = 0
        self._head = b""
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._begin_s = time.perf_counter()
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if len(self._head) < 16:
            self._head += data[:16]
        found = (self._tail[-_KEPT:] + data).count(_EVENT)
        if found:
            self._last_s = time.perf_counter()
            self._first_s = self._first_s or self._last_s
            self._events += found
        self._tail = (self._tail + data)[-2048:]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer.done():
            return
        usage = _USAGE.findall(self._tail)
        if exc is not None or b" 200" not in self._head or not usage or not self._first_s:
            self._answer.set_exception(RuntimeError(f"no answer: {exc or (self._head + self._tail)[:500]!r}"))
            return
        self._answer.set_result(Answer(self._first_s - self._begin_s, self._last_s - self._first_s, int(usage[-1])))


async def ask(target: Target, prompt: list[int], output: int) -> Answer:
    """One completion. Raises RuntimeError when it fails, OSError when nobody listens."""
    loop = asyncio.get_running_loop()
    body = target.body(prompt, output)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {target.host}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    answer: asyncio.Future[Answer] = loop.create_future()
    await loop.create_connection(lambda: _Exchange(head.encode() + body, answer), target.host, target.port)
    return await answer


@dataclass(frozen=True)
class LoopResult:
    """``tokens_per_s`` over the whole loop, medians of the requests' own times."""

    tokens_per_s: float
    ttft_p50_s: float
    tpot_p50_s: float
    wall_s: float
    tokens: int

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 5) for name, value in self.__dict__.items()}


def prompts(number: int, tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, vocab_size - 10) for _ in range(tokens)] for _ in range(number)]


async def closed_loop(target: Target, concurrency: int, waiting: list[list[int]], output: int) -> LoopResult:
    """Answers to all prompts, so many at a time."""
    queue, answers = list(waiting), list[Answer]()

    async def worker() -> None:
        while queue:
            answers.append(await ask(target, queue.pop(), output))

    begin_s = time.perf_counter()
    await asyncio.gather(*[worker() for _ in range(concurrency)])
    wall_s = time.perf_counter() - begin_s
    tokens = sum(answer.tokens for answer in answers)
    return LoopResult(
        tokens / wall_s,
        statistics.median(answer.ttft_s for answer in answers),
        statistics.median(answer.after_s for answer in answers) / max(1, output - 1),
        wall_s,
        tokens,
    )
