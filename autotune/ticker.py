"""When the next control tick is due, on the monotonic clock; and waiting for it in a way that signals can cut short."""

from __future__ import annotations

import contextlib
import os
import select
from typing import Protocol

from engine.clock import Clock


class Ticker:
    """Ticks at ``start + k * period``: no drift, and after a stall one tick rather than a burst of missed ones.

    Pure: it never reads a clock. Times are monotonic nanoseconds.
    """

    def __init__(self, period_s: float, start_ns: int) -> None:
        self._period_ns = _period_ns(period_s)
        self._next_ns = start_ns
        self.missed = 0

    @property
    def next_ns(self) -> int:
        """When the next tick is due."""
        return self._next_ns

    def take(self, now_ns: int) -> bool:
        """True when a tick is due, which uses it up; ticks that a stall skipped are counted in ``missed``."""
        if now_ns < self._next_ns:
            return False
        skipped = (now_ns - self._next_ns) // self._period_ns
        self.missed += skipped
        self._next_ns += (skipped + 1) * self._period_ns
        return True

    def set_period(self, period_s: float, now_ns: int) -> None:
        """Change the period from the next tick on, which comes at most one new period from now."""
        self._period_ns = _period_ns(period_s)
        self._next_ns = min(self._next_ns, now_ns + self._period_ns)


def _period_ns(period_s: float) -> int:
    if not period_s > 0:
        raise ValueError(f"a tick needs a period above 0 s, got {period_s}")
    return max(1, round(period_s * 1e9))


class Waiter(Protocol):
    """Lets time pass until a deadline or a wake-up."""

    def wait_until(self, deadline_ns: int) -> None:
        """Return at ``deadline_ns`` of the clock or earlier when woken. Spurious early returns are allowed."""
        ...

    def wake(self) -> None:
        """End the current or the next wait at once. Safe in signal handlers and other threads."""
        ...


class PipeWaiter:
    """The real waiter: select on a pipe of its own. An Event would not do, its lock can deadlock in a handler."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wait_until(self, deadline_ns: int) -> None:
        timeout_s = max(0, deadline_ns - self._clock.now_ns()) / 1e9
        ready, _, _ = select.select([self._read_fd], [], [], timeout_s)
        if ready:
            os.read(self._read_fd, 4096)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes too
            os.write(self._write_fd, b"\0")

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self._write_fd)
