"""Engine and daemon as child processes of one parent, restarted with back-off; neither falls with the other.

Children get process groups of their own, so that Ctrl-C reaches the supervisor alone and the stop is orderly: the
daemon first (it lets go of the engine), then the engine. A supervisor that is killed outright takes its children with
it by :func:`die_with_parent`, which the ``autotune`` verbs call when supervised.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Self

from engine.clock import Clock

SUPERVISOR_PID: Final = "AUTOTUNE_SUPERVISOR_PID"
EXIT_USAGE: Final = 2  # of every verb that was told something impossible: trying again cannot help
_PR_SET_PDEATHSIG: Final = 1
_TAIL_LINES: Final = 50
_POLL_S: Final = 0.05
_STEADY_S: Final = 60.0  # a child that lived this long starts over with the shortest back-off


class SupervisorError(Exception):
    """A child could not be started or kept up, in one line with its own last words; ``problem`` is without these."""

    def __init__(self, problem: str, last_words: str = "") -> None:
        super().__init__(problem + last_words)
        self.problem = problem


@dataclass(frozen=True)
class ChildSpec:
    """One child: how to start it and how to tell that it is ready (``ready`` is polled; None: as soon as it runs).

    ``output`` gets every line that it prints, with no newline; ``stop_grace_s`` passes between SIGTERM and SIGKILL.
    A child that dies before it was ready, or with one of ``final_codes``, is not started again.
    """

    name: str
    command: Sequence[str]
    ready: Callable[[], bool] | None = None
    output: Callable[[str], None] | None = None
    environment: Mapping[str, str] | None = None
    stop_grace_s: float = 10.0
    final_codes: frozenset[int] = frozenset({EXIT_USAGE})


@dataclass(frozen=True)
class BackOff:
    """Delays between restarts of one child: doubling from ``first_s`` to ``longest_s``."""

    first_s: float = 0.5
    longest_s: float = 30.0

    def delay_s(self, failures: int) -> float:
        """The delay after the given number of failures in a row (at least 1)."""
        return float(min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 30)))


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
        self._children = [_Child(spec, clock, back_off, report or (lambda _: None)) for spec in children]
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

    def wait_ready(self, timeout_s: float) -> None:
        """Return once every child is ready. Raises SupervisorError when one dies first or the time is up.

        Everything is stopped before the error is raised.
        """
        deadline_ns = self._clock.now_ns() + round(timeout_s * 1e9)
        for child in self._children:
            while not child.is_ready():
                error = next((other.failure for other in self._children if other.failure is not None), None)
                if error is None and self._clock.now_ns() >= deadline_ns:
                    error = SupervisorError(
                        f"{child.spec.name} was not ready after {timeout_s:g} s", child.last_words()
                    )
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


class _Child:
    """One child and its restarts. Only the supervisor's thread calls start, keep_up and stop."""

    def __init__(self, spec: ChildSpec, clock: Clock, back_off: BackOff, report: Callable[[str], None]) -> None:
        self.spec = spec
        self._clock = clock
        self._back_off = back_off
        self._report = report
        self._process: subprocess.Popen[str] | None = None
        self._readers: list[threading.Thread] = []
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._started_ns = 0
        self._restart_ns: int | None = None
        self._failures = 0
        self._was_ready = False
        self.start_error: str | None = None
        self.failure: SupervisorError | None = None  # why it is not started again

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def is_ready(self) -> bool:
        if not self._was_ready and self.failure is None:
            self._was_ready = self.pid is not None and (self.spec.ready is None or self.spec.ready())
        return self._was_ready

    def last_words(self) -> str:
        """The last line that the child printed, as a suffix for a message."""
        for line in reversed(self._tail):
            if line.strip():
                return f": {line.strip()}"
        return ""

    def start(self) -> None:
        environment = dict(os.environ if self.spec.environment is None else self.spec.environment)
        environment[SUPERVISOR_PID] = str(os.getpid())
        environment.pop("NOTIFY_SOCKET", None)  # it is the supervisor's to answer
        self._started_ns = self._clock.now_ns()
        self._restart_ns = None
        self._tail.clear()
        try:
            self._process = subprocess.Popen(  # noqa: S603  # our own verbs
                list(self.spec.command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
                process_group=0,
            )
        except OSError as error:
            self.start_error = f"{self.spec.name} cannot be started: {error.strerror}: {self.spec.command[0]}"
            self._failed()
            return
        reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        reader.start()
        self._readers = [reader]

    def keep_up(self) -> None:
        """Notice a death and restart the child when its back-off has passed."""
        if self.failure is not None:
            return
        if self._restart_ns is not None:
            if self._clock.now_ns() >= self._restart_ns:
                self.start()
            return
        if self._process is None or (code := self._process.poll()) is None:
            return
        self._drain()
        died = f"{self.spec.name} {_how_it_ended(code)}"
        if not self._was_ready or code in self.spec.final_codes:
            self.failure = SupervisorError(died if self._was_ready else f"{died} at start", self.last_words())
            return
        if self._clock.now_ns() - self._started_ns >= _STEADY_S * 1e9:
            self._failures = 0
        self._failed()
        self._report(f"{died}{self.last_words()}; restarting in {self._back_off.delay_s(self._failures):g} s")

    def stop(self) -> None:
        process = self._process
        self._restart_ns = None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(self.spec.stop_grace_s)
            except subprocess.TimeoutExpired:
                self._report(f"{self.spec.name} did not stop within {self.spec.stop_grace_s:g} s and was killed")
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the child itself if it is still there, and what it left behind
        process.wait()
        self._drain()

    def _failed(self) -> None:
        self._failures += 1
        self._restart_ns = self._clock.now_ns() + round(self._back_off.delay_s(self._failures) * 1e9)

    def _read(self, stream: IO[str] | None) -> None:
        if stream is None:
            return
        with stream:
            for line in stream:
                self._tail.append(line)
                if self.spec.output is not None:
                    self.spec.output(line.rstrip("\n"))

    def _drain(self) -> None:
        for reader in self._readers:
            reader.join(timeout=1)


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


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
