"""Environments and programs of peers, made once below the work folder."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


class PeerError(Exception):
    """A peer cannot be installed or started here; the message says what went wrong."""


def run(command: Sequence[str | Path], log: Path, *, cwd: Path | None = None) -> None:
    """Run a command with its output in ``log``. Raises PeerError when it fails."""
    words = [str(word) for word in command]
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(words)}\n".encode())
        output.flush()
        try:
            subprocess.run(words, check=True, stdout=output, stderr=output, cwd=cwd)  # noqa: S603 - ours
        except (OSError, subprocess.CalledProcessError) as error:
            raise PeerError(f"{words[0]} failed: {error}; see {log}") from error


def once(folder: Path, make: Callable[[], None]) -> None:
    """Call ``make`` unless it has succeeded before, which a file in ``folder`` tells."""
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / ".done"
    if not done.exists():
        make()
        done.touch()


def environment(folder: Path, requirements: Sequence[str], python: str = sys.executable) -> Path:
    """A virtual environment with these packages; returns its Python."""
    found = folder / "bin" / "python"

    def make() -> None:
        if python == sys.executable:
            venv.create(folder, with_pip=True)
        else:
            run([python, "-m", "venv", folder], folder / "install.log")
        run([found, "-m", "pip", "install", "--disable-pip-version-check", *requirements], folder / "install.log")

    once(folder, make)
    return found


def clean_variables(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what would steer a peer's threads, and with ``more``."""
    dropped = ("PYTHONPATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    return {name: value for name, value in os.environ.items() if name not in dropped} | dict(more)
