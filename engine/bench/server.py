"""The engine as a process, as a user starts it, and how much processor time its threads have taken."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_START_S = 180.0
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Server:
    """A process that answers on ``port``. ``pid`` is also the id of its first thread, which serves HTTP."""

    port: int
    pid: int

    def processor_s(self) -> tuple[float, float]:
        """Seconds that the first thread has taken, and all others together."""
        first = others = 0.0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                spent = (int(fields[11]) + int(fields[12])) * _TICK_S
                if task.name == str(self.pid):
                    first = spent
                else:
                    others += spent
        return first, others


@contextlib.contextmanager
def serving(model: Path, *options: str) -> Iterator[Server]:
    """Start an engine, wait until it is healthy, end it afterwards. Raises RuntimeError when it does not start."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-") as run:
        command = [
            sys.executable, "-m", "engine.serve", "--model", str(model), "--port", str(port),
            "--control", f"{run}/control", "--served-model-name", "bench", *options,
        ]  # fmt: skip
        process = subprocess.Popen(command)  # noqa: S603 - our own program
        try:
            wait_healthy(process, f"http://127.0.0.1:{port}/health")
            yield Server(port, process.pid)
        finally:
            end(process)


def wait_healthy(process: subprocess.Popen[bytes], url: str, limit_s: float = _START_S) -> None:
    """Raises RuntimeError when the process ends, or does not answer in time."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - a local address
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"{url} did not answer within {limit_s:g} s")


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
