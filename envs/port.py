"""The door between an environment and a real engine: what can be read from it and written to it. Stdlib only.

The daemon's actuator implements :class:`EnginePort` over the control socket; tests implement it with a few lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.stats import EngineStats
from engine.tunables import TunableValue


@dataclass(frozen=True)
class Change:
    """One knob to one value. ``value`` is one of the knob's declared values, in its declared type."""

    knob: str
    value: TunableValue

    def __str__(self) -> str:
        return f"{self.knob}={self.value}"


class ApplyStatus(StrEnum):
    """How a change was answered: the first four are the engine's words, the last two the daemon's."""

    APPLIED = "applied"  # in force
    CONVERGING = "converging"  # in force for new blocks, resident ones follow by budgeted work
    REJECTED = "rejected"  # the engine refused it
    CONFLICT = "conflict"  # somebody else wrote in between; read again and decide again
    REFUSED = "refused"  # stopped before it reached the engine: guard, advise mode, mode off
    LOST = "lost"  # the engine did not answer


@dataclass(frozen=True)
class ApplyResult:
    """The answer to one change. ``change`` is what was written (None if nothing), ``why`` one line for a person."""

    status: ApplyStatus
    why: str = ""
    change: Change | None = None
    revision: int | None = None

    @property
    def took_effect(self) -> bool:
        return self.status in {ApplyStatus.APPLIED, ApplyStatus.CONVERGING}


class EnginePort(Protocol):
    """A live engine seen from an environment. Neither call may block for longer than its own timeout, nor raise."""

    def read(self) -> EngineStats | None:
        """The engine's latest figures, or None when the engine cannot be reached."""
        ...

    def apply(self, change: Change) -> ApplyResult:
        """Write one change through the only write path there is and say what became of it."""
        ...
