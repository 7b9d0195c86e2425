"""One child of the supervisor: how it is started, how it is kept up, and how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final

from engine.clock import Clock
from engine.json_text import load_json
from engine.text import one_line

SUPERVISOR_PID: Final = "AUTOTUNE_SUPERVISOR_PID"
EXIT_USAGE: Final = 2  # of every verb that was told something impossible: trying again cannot help
_TAIL_LINES: Final = 50
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


class Child:
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

    def last_words(self, introduced: str = "") -> str:
        """The last line that the child printed, as a suffix for a message; of a record in JSON what it says."""
        for line in reversed(self._tail):
            if line.strip():
                return f"{introduced}: {_message_of(line.strip())}"
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


def _message_of(line: str) -> str:
    """What a line of a log says: off a terminal our children log in JSON (:mod:`engine.logs`)."""
    try:
        record = load_json(line) if line.startswith("{") else None
    except ValueError:
        return line
    message = record.get("message") if isinstance(record, dict) else None
    return one_line(message) if isinstance(message, str) else line


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
