"""Requests of a workload in order of arrival: a trace in memory, or a stream that is never held whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

from envs.workload.trace import Trace, TraceRequest


class Feed(Protocol):
    """Arrivals in order. Picklable, and a copy goes on where the original was."""

    @property
    def block_tokens(self) -> float:
        """Prompt tokens per hash id, 0 without ids."""
        ...

    @property
    def next_ns(self) -> int | None:
        """When the next request arrives, None when there are no more."""
        ...

    def pop(self) -> tuple[int, TraceRequest]:
        """The next request and its index. Raises IndexError when there are no more."""
        ...


class TraceFeed:
    """A trace, again and again if ``repeats``: then ``period_s`` (its duration and one mean gap) apart."""

    def __init__(self, trace: Trace, *, repeats: bool = False) -> None:
        self._trace = trace
        self._index = 0
        self._repeats = repeats
        number = len(trace.requests)
        self._period_ns = round(1e9 * (trace.duration_s + trace.duration_s / max(1, number - 1))) or 10**9
        self.next_ns: int | None = None
        self._advance()

    @property
    def block_tokens(self) -> float:
        return self._trace.block_tokens

    def _advance(self) -> None:
        turn, place = divmod(self._index, len(self._trace.requests))
        if turn and not self._repeats:
            self.next_ns = None
        else:
            self.next_ns = turn * self._period_ns + round(1e9 * self._trace.requests[place].arrival_s)

    def pop(self) -> tuple[int, TraceRequest]:
        if self.next_ns is None:
            raise IndexError("the trace has no more requests")
        index = self._index
        self._index += 1
        self._advance()
        return index, self._trace.requests[index % len(self._trace.requests)]


class StreamFeed:
    """Requests from ``make()``, which gives the same ones at every call: of a week, say, made as they are needed.

    A copy makes them anew and skips those that are past.
    """

    def __init__(self, make: Callable[[], Iterable[TraceRequest]], *, block_tokens: float = 0.0) -> None:
        self.block_tokens = block_tokens
        self._make = make
        self._index = 0
        self._stream: Iterator[TraceRequest] = iter(make())
        self._next = next(self._stream, None)

    @property
    def next_ns(self) -> int | None:
        return None if self._next is None else round(1e9 * self._next.arrival_s)

    def pop(self) -> tuple[int, TraceRequest]:
        if self._next is None:
            raise IndexError("the stream has no more requests")
        index, request = self._index, self._next
        self._index += 1
        self._next = next(self._stream, None)
        return index, request

    def __getstate__(self) -> dict[str, Any]:
        return {"make": self._make, "index": self._index, "block_tokens": self.block_tokens}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["make"], block_tokens=state["block_tokens"])  # type: ignore[misc]
        if state["index"]:
            self._index = state["index"]
            self._stream = islice(iter(self._make()), self._index, None)
            self._next = next(self._stream, None)
