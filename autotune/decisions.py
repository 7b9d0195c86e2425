"""The recent decisions kept in memory for people who ask: what was wanted, why, what became of it, what it did."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.text import one_line
from engine.tunables import TunableValue


def said(scenario: str, reason: str, why: str) -> str:
    """What one line tells of a decision: its reason; of a write by somebody else, for how long it holds as well."""
    return "; ".join(filter(None, (why, reason))) if scenario == "override" else reason or why


@dataclass(frozen=True)
class DecisionRecord:
    """One decision as shown at ``/decisions`` and by ``autotune decisions``.

    ``verdict`` is the guard's word if it refused, else the engine's. ``effect`` has ``before`` and ``after`` figures
    over one window each, or ``unknown`` with the reason, and ``outcome`` and ``why`` (:mod:`policies.judgement`); None
    until it has been measured. ``predicted``: what the change was to do, features by name, where anybody can tell.
    """

    tick: int
    wall_s: float
    knob: str
    old: TunableValue | None
    new: TunableValue
    scenario: str
    reason: str
    writer: str
    verdict: str
    why: str
    effect: Mapping[str, Any] | None = None
    predicted: Mapping[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DecisionRecord:
        """Inverse of :meth:`to_json`. Raises TypeError for missing or unknown keys."""
        return cls(**data)

    def line(self) -> str:
        """One line for a log."""
        move = f"{self.knob} {'?' if self.old is None else self.old} -> {self.new}"
        about = f"({self.scenario}, by {self.writer}): {said(self.scenario, self.reason, self.why)}"
        return one_line(f"[{self.tick}] {move} {self.verdict} {about}")


class DecisionLog:
    """The newest decisions, bounded. The loop appends, other threads read."""

    def __init__(self, size: int = 500) -> None:
        self._records: deque[DecisionRecord] = deque(maxlen=size)
        self._lock = threading.Lock()
        self._version = 0

    @property
    def version(self) -> int:
        """Another number after every change, above 0 once there is anything."""
        return self._version

    def append(self, record: DecisionRecord) -> None:
        with self._lock:
            self._records.append(record)
            self._version += 1

    def set_effect(self, tick: int, effect: Mapping[str, Any]) -> None:
        """Add to what is known of what a tick's decision did; nothing if it has left the log."""
        with self._lock:
            for index, record in enumerate(self._records):
                if record.tick == tick:
                    self._records[index] = replace(record, effect={**(record.effect or {}), **effect})
                    self._version += 1

    def recent(self, limit: int) -> list[DecisionRecord]:
        """Up to ``limit`` records, oldest first."""
        with self._lock:
            return list(self._records)[-limit:] if limit > 0 else []
