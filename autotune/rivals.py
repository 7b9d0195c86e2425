"""Notices another daemon on the same engine: changes under the daemon's own name that it has not made."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from autotune.writers import OWN_WRITER
from envs.port import ApplyResult, ApplyStatus, Change
from policies.guard import Writer

_LOG: Final = logging.getLogger("autotune.rivals")
HOLD_S: Final = 60.0
"""How long nothing is written after another daemon has been seen to write."""


class Rivals:
    """Told of every write that was made, shown the writers of every tick. What is there at the first look is nobody's
    offence: it may be from this daemon's life before.
    """

    def __init__(self) -> None:
        self._instance: str | None = None
        self._seen: dict[str, int] | None = None
        self._made: set[int] = set()
        self._unanswered: set[str] = set()
        self._text, self._until_ns = "", 0

    def wrote(self, change: Change, result: ApplyResult) -> None:
        """A change of this daemon's own, whatever became of it."""
        if result.status is ApplyStatus.LOST:
            self._unanswered.add(change.knob)  # it may have arrived
        elif result.took_effect and result.revision is not None:
            self._made.add(result.revision)

    def objection(self, instance: str, writers: Mapping[str, Writer], now_ns: int) -> str:
        """Why nothing is written for now, empty if all is well. To be asked at every tick."""
        found = self._look(instance, writers)
        if found is not None:
            self._text = f"another daemon writes to this engine ({found}); stop one of them"
            self._until_ns = now_ns + round(HOLD_S * 1e9)
            _LOG.error("%s; nothing is written for %g s", self._text, HOLD_S)
        return self._text if now_ns < self._until_ns else ""

    def _look(self, instance: str, writers: Mapping[str, Writer]) -> str | None:
        """What another daemon has written since the last look, in a few words; None if nothing."""
        if instance != self._instance:
            self._instance, self._seen, self._made, self._unanswered = instance, None, set(), set()
        own = {knob: writer.revision for knob, writer in writers.items() if writer.writer == OWN_WRITER}
        seen, self._seen = self._seen, own
        if seen is None:
            return None
        found = None
        for knob, revision in own.items():
            if seen.get(knob) == revision or revision in self._made:
                continue
            if knob in self._unanswered:
                self._made.add(revision)
            else:
                found = f"{knob} at revision {revision}"
        self._unanswered.clear()
        self._made &= set(own.values())
        return found
