"""The command line and environment of the process that listens on a port of this machine, out of /proc."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LISTENING: Final = "0A"
LOCAL: Final = ("127.0.0.1", "localhost", "::1", "0.0.0.0")  # noqa: S104  # compared with, not listened on


@dataclass(frozen=True)
class Process:
    """``environment`` is None where it may not be read."""

    pid: int
    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None


def listener(port: int, proc: Path = Path("/proc")) -> Process | None:
    """Who listens on a TCP port here; None where nobody does, or it may not be seen (another user's process)."""
    inodes = set(_inodes(port, proc))
    if not inodes:
        return None
    for folder in sorted(proc.glob("[0-9]*"), key=lambda entry: int(entry.name)):
        if _holds(folder, inodes):
            return _process(folder)
    return None


def value_of(process: Process, options: tuple[str, ...], variable: str, default: str) -> str | None:
    """What an option was given as: the last on the command line, else in the environment, else the default; None where
    the environment may not be read and the command line does not say.
    """
    given = None
    for word, after in zip(process.arguments, process.arguments[1:], strict=False):
        if word in options:
            given = after
    if given is not None:
        return given
    return None if process.environment is None else process.environment.get(variable, default)


def _inodes(port: int, proc: Path) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        try:
            rows = (proc / "net" / name).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            words = row.split()
            if len(words) > 9 and words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                yield words[9]


def _holds(folder: Path, inodes: set[str]) -> bool:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    try:
        return any(_target(entry) in wanted for entry in (folder / "fd").iterdir())
    except OSError:
        return False


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def _process(folder: Path) -> Process | None:
    try:
        arguments = _words(folder / "cmdline")
    except OSError:
        return None
    try:
        pairs = (word.partition("=") for word in _words(folder / "environ"))
        environment: dict[str, str] | None = {name: value for name, _, value in pairs}
    except OSError:
        environment = None
    return Process(int(folder.name), tuple(arguments), environment)


def _words(path: Path) -> list[str]:
    return path.read_bytes().decode("utf-8", errors="replace").rstrip("\0").split("\0")
