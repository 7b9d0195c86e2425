"""How a demonstration is ended from outside: signals, and what they cut short."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from autotune.supervisor import Supervisor

T = TypeVar("T")


class Interrupted(Exception):  # noqa: N818  # a wish of the user's, not an error
    """Whoever started the demonstration wants it to end."""


class Stopping:
    """Whether and by which signal the demonstration was asked to end. Used inside one event loop."""

    def __init__(self) -> None:
        self.signal = signal.SIGINT  # the first one that came
        self.event = asyncio.Event()
        self.running: Supervisor | None = None  # told to stop at once, whatever it waits for

    def listen(self) -> None:
        """Take signals from now on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt, number)

    def check(self) -> None:
        """Raises Interrupted once a signal has come."""
        if self.event.is_set():
            raise Interrupted

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``. Raises Interrupted, with ``work`` cancelled, when a signal comes first."""
        task = asyncio.create_task(work)
        stopping = asyncio.create_task(self.event.wait())
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            raise Interrupted
        return task.result()

    def _interrupt(self, number: signal.Signals) -> None:
        if not self.event.is_set():
            self.signal = number
        self.event.set()
        if self.running is not None:
            self.running.request_stop()
