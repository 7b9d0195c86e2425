"""Numba's cache on disk, for several processes that compile at once.

Numba replaces each file whole, but chooses the names of data files from an index that another process may be changing:
two processes that compile two signatures of one kernel can both take the same name, and the index then gives one
signature the other's machine code. Here a process that saves has the folder to itself, and one that loads reads index
and data as they belong together. What two processes compile at once is still compiled twice.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache


class SharedCache(FunctionCache):
    """Numba's cache of one function, whose reads and writes keep out of each other's way."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function of a signature, or None when the cache lacks it."""
        with _locked(Path(self.cache_path), fcntl.LOCK_SH):
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled function. Raises OSError when the folder has no room."""
        with _locked(Path(self.cache_path), fcntl.LOCK_EX):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """Hold the folder's lock. Where none can be had (read-only, a file system without locks), go on without."""
    try:
        lock = (folder / "kernels.lock").open("ab")
    except OSError:
        yield
        return
    with lock:
        with suppress(OSError):
            fcntl.flock(lock, how)
        yield
