"""The recent decisions kept in memory for people who ask: what was wanted, why, what became of it, what it did."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from engine.text import one_line
from engine.tunables import TunableValue

# Judgements in a few words: figures beside one may be worse than before, and yet nothing counts against the change.
_OUTCOMES: Final[Mapping[str, str]] = {
    "met": "kept: no tail counts against it",
    "short": "kept, though less relief came than was predicted",
    "missed": "missed: a tail counts against it",
    "unclear": "unclear what it did",
}


def outcome_words(outcome: str) -> str:
    """What became of a change, for people. ``outcome``: :class:`policies.judgement.Outcome`, another one as it is."""
    return _OUTCOMES.get(outcome, outcome)


def said(scenario: str, reason: str, why: str, move: str = "") -> str:
    """What one line tells of a decision: its reason; of a write by somebody else, for how long it holds as well.

    ``move``: the change as the line has it already; a reason that begins or ends with it is told without.
    """
    reason = reason.removeprefix(f"{move}: ").removesuffix(f"; {move}") if move else reason
    return "; ".join(filter(None, (why, reason))) if scenario == "override" else reason or why


def move_of(knob: str, old: TunableValue | None, new: TunableValue) -> str:
    """A change for people, as reasons have it, too."""
    return f"{knob} {'?' if old is None else old} -> {new}"


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
        move = move_of(self.knob, self.old, self.new)
        about = f"({self.scenario}, by {self.writer}): {said(self.scenario, self.reason, self.why, move)}"
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
