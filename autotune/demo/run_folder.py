"""Where a demonstration keeps logs and journals: a named folder, which holds the last one only, or a temporary one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LOCK: Final = "in-use.lock"
_FILES: Final = frozenset({"engine.log", "daemon.log", "daemon.yaml", "admin.token", "engine.sock"})
JOURNAL: Final = "journal.sqlite"


class RunFolderError(ValueError):
    """The folder cannot be used; one line."""


@dataclass
class RunFolder:
    """``keep``: whether it outlives the demonstration."""

    path: Path
    keep: bool


@contextlib.contextmanager
def run_folder(named: Path | None) -> Iterator[RunFolder]:
    """The folder, taken for this process while the body runs; emptied of what an earlier demonstration left in it.

    None: a temporary one, removed afterwards unless the body set ``keep``. Raises RunFolderError when another
    demonstration is using it, and OSError.
    """
    if named is None:
        folder = RunFolder(Path(tempfile.mkdtemp(prefix="kv-autotune-")), keep=False)
        try:
            yield folder
        finally:
            if not folder.keep:
                shutil.rmtree(folder.path, ignore_errors=True)
        return
    named.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(named / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunFolderError(f"{named}: another demonstration is using it; name another with --run-dir") from error
        _forget(named)
        yield RunFolder(named, keep=True)
    finally:
        os.close(lock)


def _forget(folder: Path) -> None:
    """Remove what an earlier demonstration left, and nothing that somebody else has put there."""
    for inner in folder.iterdir():
        if not inner.name.isdecimal() or inner.is_symlink() or not inner.is_dir():
            continue
        for file in inner.iterdir():
            if file.name in _FILES or file.name.startswith(JOURNAL):
                file.unlink()
        with contextlib.suppress(OSError):  # it holds something else as well
            inner.rmdir()
