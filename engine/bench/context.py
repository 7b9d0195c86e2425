"""What a row of the benchmark is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Context:
    """``folder``: where models are made. ``formats``: KV formats to measure. ``concurrency``: requests at a time.

    ``now_ns``: the clock of what runs in this process. ``quick``: few repetitions, for a first look. ``log`` prints one
    line of progress.
    """

    folder: Path
    formats: tuple[str, ...]
    concurrency: tuple[int, ...]
    now_ns: Callable[[], int]
    quick: bool = False
    log: Callable[[str], None] = print
