"""Progress of long work on a terminal: a bar per stage. Nothing moves where the output is no terminal."""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class StageBars:
    """A :class:`policies.evaluation.experiment.Progress`, to be used in ``with``."""

    def __init__(self, console: Console) -> None:
        text, times = TextColumn("{task.description}"), (TimeElapsedColumn(), TimeRemainingColumn())
        self._bars = Progress(text, BarColumn(), MofNCompleteColumn(), *times, console=console)
        self._task: Any = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def stage(self, name: str, cells: int) -> None:
        """A stage begins; one without work has no bar."""
        self._task = self._bars.add_task(name, total=cells) if cells else None

    def done(self) -> None:
        """A piece of work is done."""
        if self._task is not None:
            self._bars.advance(self._task)
