"""When an engine is beyond repair. No torch."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)

# A runner that fails this often in a row is broken, not unlucky: a lost device fails every step.
_BROKEN_AFTER_FAILURES = 5


class Failures:
    """``broken``: why no step will be tried again, None while all is well. The first reason stays."""

    def __init__(self) -> None:
        self.broken: str | None = None
        self._in_a_row = 0

    def count(self, error: Exception) -> None:
        """A step, or the recoding in it, has failed."""
        self._in_a_row += 1
        if self._in_a_row >= _BROKEN_AFTER_FAILURES and self.broken is None:
            self.broken = f"{self._in_a_row} steps in a row failed, last with {type(error).__name__}: {error}"
            _log.error("engine stopped: %s", self.broken)

    def reset(self) -> None:
        """A step has gone well."""
        self._in_a_row = 0

    def give_up(self, why: str | Exception) -> None:
        """There is no going on, because of an error or of what a sentence says."""
        if self.broken is None:
            self.broken = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
