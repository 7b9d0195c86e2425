"""Telling the service manager how a service is: readiness, status, watchdog, reload and stop.

The protocol is a datagram of ``KEY=value`` lines to the Unix socket in ``NOTIFY_SOCKET`` (sd_notify(3)); an address
that starts with ``@`` is in the abstract namespace. Without a socket everything here does nothing.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping

from engine.clock import Clock
from engine.text import one_line


class Notifier:
    """Sends notifications; a lost one is counted in ``failures`` and never raised, since it must not stop a service.

    ``address`` is the value of ``NOTIFY_SOCKET``, or None to do nothing. Safe to call from several threads.
    """

    def __init__(self, address: str | None, clock: Clock) -> None:
        if address is not None and not address.startswith(("/", "@")):
            address = None  # vsock and others are for virtual machines, not for us
        self._address = "\0" + address[1:] if address and address.startswith("@") else address
        self._clock = clock
        self.failures = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], clock: Clock) -> Notifier:
        return cls(environment.get("NOTIFY_SOCKET") or None, clock)

    @property
    def enabled(self) -> bool:
        return self._address is not None

    def ready(self, status: str) -> None:
        """Start-up or a reload is over, whatever the reload's outcome: without it systemd kills the service."""
        self._send(f"READY=1\nSTATUS={one_line(status)}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={one_line(status)}")

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def reloading(self) -> None:
        """A reload begins. The stamp is CLOCK_MONOTONIC in µs, which ``Type=notify-reload`` insists on."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={self._clock.now_ns() // 1000}")

    def stopping(self, status: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={one_line(status)}")

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.connect(self._address)
                sender.send(message.encode())
        except OSError:
            self.failures += 1


def watchdog_interval_s(environment: Mapping[str, str], pid: int) -> float | None:
    """Seconds between pings, a third of ``WATCHDOG_USEC``; None when no watchdog watches this process.

    A third, because sd_watchdog_enabled(3) advises half and a ping that is late once must not be fatal.
    """
    try:
        usec = int(environment.get("WATCHDOG_USEC", "0"))
        watched = int(environment.get("WATCHDOG_PID", str(pid)))
    except ValueError:
        return None
    return usec / 3e6 if usec > 0 and watched == pid else None


class Watchdog:
    """Pings from a thread of its own for as long as ``alive()`` says that the control loop still turns.

    A thread, because one turn of the loop may take longer than a short watchdog allows; ``alive``, because a watchdog
    that pings for a dead loop guards nothing.
    """

    def __init__(self, notifier: Notifier, interval_s: float, alive: Callable[[], bool]) -> None:
        self._notifier = notifier
        self._interval_s = interval_s
        self._alive = alive
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            if self._alive():
                self._notifier.watchdog()
            if self._stop.wait(self._interval_s):
                return
