"""Child processes that are killed and started again, and what /proc says of one. No service manager in between."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from autotune.child import SUPERVISOR_PID

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_RSS: Final = re.compile(r"^VmRSS:\s+(\d+) kB", re.MULTILINE)


class Child:
    """One command, started and killed at will; what it prints is appended to ``log``.

    Start it from the main thread only: it dies with the thread that started it.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self._command, self._log = name, command, log
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    @property
    def pid(self) -> int:
        """Of the running or the last process. Raises RuntimeError before the first start."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        environment = {**os.environ, SUPERVISOR_PID: str(os.getpid())}
        environment.pop("NOTIFY_SOCKET", None)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  # our own verbs
                list(self._command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, process_group=0
            )
        self.starts += 1

    def kill(self) -> None:
        """SIGKILL: nothing of it runs any more. Safe in any thread; the main one must :meth:`reap` it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        if self._process is not None:
            self._process.wait()

    def stop(self, grace_s: float = 15.0) -> None:
        """SIGTERM, and SIGKILL to what is left after the grace. Does nothing when it has ended or never began."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self.kill()
        self._process.wait()

    def last_words(self) -> str:
        """The last line that it printed."""
        with contextlib.suppress(OSError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
            return next((line for line in reversed(lines) if line.strip()), "")
        return ""

    def tracebacks(self) -> int:
        """How many the log holds, of all its processes together."""
        with contextlib.suppress(OSError):
            return self._log.read_text(encoding="utf-8", errors="replace").count("Traceback (most recent call last)")
        return 0


def resident_bytes(pid: int) -> int:
    """Resident memory, shared pages included. Raises OSError for a process that is gone."""
    found = _RSS.search(Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace"))
    return int(found[1]) * 1024 if found else 0


def processor_s(pid: int) -> float:
    """Processor time of all its threads, user and system, to 10 ms. Raises OSError for a process that is gone."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS_PER_S


def has_mapped(pid: int, *parts: str) -> bool:
    """Whether any file that it has mapped has one of these in its path. Raises OSError as above."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    return any(part in line for line in maps.splitlines() for part in parts)
