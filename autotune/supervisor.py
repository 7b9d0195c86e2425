"""Engine and daemon as child processes of one parent, restarted with back-off; neither falls with the other.

Children get process groups of their own, so that Ctrl-C reaches the supervisor alone and the stop is orderly: the
daemon first (it lets go of the engine), then the engine. A supervisor that is killed outright takes its children with
it by :func:`die_with_parent`, which the ``autotune`` verbs call when supervised.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from autotune.child import SUPERVISOR_PID, BackOff, Child, ChildSpec, SupervisorError
from engine.clock import Clock

_PR_SET_PDEATHSIG: Final = 1
_POLL_S: Final = 0.05


class Supervisor:
    """Starts ``children`` in order and stops them in reverse order. Use as a context manager, or start() and stop().

    ``report`` gets one line per event (a child exited, is restarted, was killed).
    """

    def __init__(
        self,
        children: Sequence[ChildSpec],
        clock: Clock,
        *,
        back_off: BackOff | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        back_off = back_off or BackOff()
        self._children = [Child(spec, clock, back_off, report or (lambda _: None)) for spec in children]
        self._clock = clock
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._started = threading.Event()
        # One thread does all the starting: the kernel's parent-death signal follows the thread that forked.
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start every child. Raises SupervisorError when a command cannot be run at all."""
        self._thread.start()
        self._started.wait()
        for child in self._children:
            if child.start_error:
                self.stop()
                raise SupervisorError(child.start_error)

    def wait_ready(self, timeout_s: float, advice: str = "") -> None:
        """Return once every child is ready. Raises SupervisorError when one dies first or the time is up, with
        ``advice`` for whoever reads that.

        Everything is stopped before the error is raised.
        """
        deadline_ns = self._clock.now_ns() + round(timeout_s * 1e9)
        for child in self._children:
            while not child.is_ready():
                error = next((other.failure for other in self._children if other.failure is not None), None)
                if error is None and self._clock.now_ns() >= deadline_ns:
                    late = f"{child.spec.name} was not ready after {timeout_s:g} s"
                    error = SupervisorError("; ".join(filter(None, (late, advice))), child.last_words("; it said last"))
                if error is None and self._stopping.is_set():
                    error = SupervisorError("stopped while starting")
                if error is not None:
                    self.stop()
                    raise error
                self._stopping.wait(_POLL_S)

    def wait(self) -> None:
        """Return when a stop was asked for. Raises SupervisorError when a child is given up; everything is stopped."""
        self._ended.wait()
        error = next((child.failure for child in self._children if child.failure is not None), None)
        if error is not None and not self._stopping.is_set():
            self.stop()
            raise error

    def pid(self, name: str) -> int | None:
        """Process id of a running child. Raises KeyError for an unknown name."""
        for child in self._children:
            if child.spec.name == name:
                return child.pid
        raise KeyError(name)

    def request_stop(self) -> None:
        """Ask for the end without waiting: for signal handlers, followed by :meth:`stop`."""
        self._stopping.set()
        self._ended.set()

    def stop(self) -> None:
        """Stop every child, last started first, and wait for them. May be called twice."""
        self.request_stop()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            for child in self._children:
                child.start()
        finally:
            self._started.set()
        while not self._stopping.wait(_POLL_S):
            for child in self._children:
                child.keep_up()
                if child.failure is not None:
                    self._ended.set()
        for child in reversed(self._children):
            child.stop()


def die_with_parent(environment: Mapping[str, str]) -> None:
    """Have the kernel end this process with SIGTERM when its supervisor dies; nothing without a supervisor.

    Raises SystemExit when the supervisor died before this could be arranged.
    """
    supervisor = environment.get(SUPERVISOR_PID, "")
    if not supervisor.isdigit():
        return
    if os.getppid() == int(supervisor):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # Another parent than the supervisor either started us in its place, or got us when it died while we were starting.
    if os.getppid() != int(supervisor) and not _lives(int(supervisor)):
        raise SystemExit(1)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}
