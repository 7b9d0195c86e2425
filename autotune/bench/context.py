"""What a row of the daemon's benchmark is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.clock import Clock


@dataclass(frozen=True)
class Context:
    """``folder``: for sockets, journals and logs. ``quick``: short runs, for a first look, which prove nothing.
    ``minutes`` None: each row's own duration. ``log`` prints one line of progress.
    """

    model: Path
    folder: Path
    clock: Clock
    log: Callable[[str], None]
    seed: int = 0
    quick: bool = False
    minutes: float | None = None
    kills: int | None = None
    ticks: int | None = None

    def place(self, name: str) -> Path:
        """A folder of a row's own."""
        path = self.folder / name
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return path


@dataclass
class Outcome:
    """What a row found: ``figures`` for the last line, and whether its bars were met."""

    figures: dict[str, Any]
    missed: list[str] = field(default_factory=list)

    def bar(self, name: str, most: float) -> None:
        """Note a figure above its bar, or one that is missing."""
        value = self.figures.get(name)
        if not isinstance(value, int | float) or value > most:
            self.missed.append(f"{name} is {value}, the bar is {most:g}")
