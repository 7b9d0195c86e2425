"""Numbers that never repeat within a cache's life. No torch."""

from __future__ import annotations


class Versions:
    """Versions of block tables: every change of any table gets the next one, from 1."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """A number that was never given out before."""
        self._last += 1
        return self._last
