"""Between the engine thread and asyncio: one wake-up of the event loop per step, however many requests it moved."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from engine.clock import Clock
from engine.core import EngineCore
from engine.core_stats import Distributions
from engine.core_thread import EngineThread
from engine.request import Request
from engine.request_delta import RequestDelta
from engine.stats import EngineStats

STALL_S: Final = 60.0
_T = TypeVar("_T")


class ClientGone(Exception):  # noqa: N818 - not an error of ours
    """The client of this stream has closed its connection."""


class RequestStream:
    """The deltas of one request, in order. One consumer."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._deltas: deque[RequestDelta] = deque()
        self._ready = asyncio.Event()
        self._gone = False

    def push(self, delta: RequestDelta) -> None:
        self._deltas.append(delta)
        self._ready.set()

    def abandon(self) -> None:
        """Wake the consumer with ClientGone."""
        self._gone = True
        self._ready.set()

    async def take(self) -> list[RequestDelta]:
        """Wait for deltas and return all that have come. Raises ClientGone."""
        await self._ready.wait()
        if self._gone:
            raise ClientGone
        self._ready.clear()
        taken = list(self._deltas)
        self._deltas.clear()
        return taken


class AsyncEngine:
    """The engine as the event loop sees it. Construct and start it inside the running loop.

    ``stall_s``: a step, or a command between two, that has taken longer counts as a freeze.
    """

    def __init__(self, core: EngineCore, clock: Clock | None = None, stall_s: float = STALL_S) -> None:
        self._core = core
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, RequestStream] = {}
        self._thread = EngineThread(core, self._deliver, clock)
        self._last: tuple[EngineStats, Distributions] | None = None
        self.draining = False

    def start(self) -> None:
        self._thread.start()

    @property
    def unavailable_because(self) -> str | None:
        """Why no request can be served, or None. Read without waiting for a step."""
        if self.draining:
            return "the engine is shutting down"
        if self._core.broken is not None:
            return f"the engine has stopped: {self._core.broken}"
        if not self._thread.is_alive:
            return "the engine has not started"
        busy_s = self._thread.busy_s
        return f"no step has ended for {busy_s:.0f} s" if busy_s > self._stall_s else None

    async def submit(self, request: Request) -> RequestStream:
        """Hand a request over and wait until it is admitted to the queue.

        Raises what :meth:`EngineCore.add` does. When the caller is cancelled the request is given up.
        """
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is in use")
        stream = self._streams[request.request_id] = RequestStream(request.request_id)
        try:
            await self.call(lambda core: core.add(request))
        except asyncio.CancelledError:
            self.release(request.request_id)
            raise
        except Exception:
            self._streams.pop(request.request_id, None)
            raise
        return stream

    def release(self, request_id: str, *, complete: bool = False) -> None:
        """The consumer is done. A request that still runs ends: as complete (stop string) or as aborted."""
        self._streams.pop(request_id, None)
        if complete:
            self._thread.call(lambda core: core.finish(request_id))
        else:
            self._thread.call(lambda core: core.abort(request_id))

    def forget(self, request_id: str) -> None:
        """The consumer has seen the last delta."""
        self._streams.pop(request_id, None)

    async def call(self, function: Callable[[EngineCore], _T]) -> _T:
        """Run ``function(core)`` at the next step boundary."""
        return await asyncio.wrap_future(self._thread.call(function))

    async def reading(self, timeout_s: float = 2.0) -> tuple[EngineStats, Distributions]:
        """Stats and histograms now; the last reading (see its stamp) while a step takes longer than the timeout.

        Raises TimeoutError when there has been none.
        """
        try:
            async with asyncio.timeout(timeout_s):
                self._last = await self.call(lambda core: (core.stats(), core.distributions()))
        except TimeoutError:
            if self._last is None:
                raise
        return self._last

    async def stop(self, grace_s: float, timeout_s: float = 10.0) -> bool:
        """Refuse new requests, let running ones go on for ``grace_s``, end the rest; False if a step hangs."""
        self.draining = True
        deadline = self._loop.time() + grace_s
        while self._streams and self._loop.time() < deadline:  # noqa: ASYNC110 - a few turns, once in a life
            await asyncio.sleep(0.02)
        return await asyncio.to_thread(self._thread.stop, timeout_s)

    def _deliver(self, deltas: list[RequestDelta]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._dispatch, deltas)
        except RuntimeError:
            return  # the loop has closed: nobody is left to tell

    def _dispatch(self, deltas: list[RequestDelta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream.push(delta)
