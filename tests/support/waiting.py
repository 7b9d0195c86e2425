"""How tests wait for what happens in another thread or process: until it is so, and never for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 60.0  # far more than a busy machine needs: it ends a test that would wait for ever


def until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> None:
    """Return once ``condition()`` holds. Raises AssertionError naming ``what`` after ``limit_s``."""
    never, deadline = threading.Event(), time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s:g} s in vain for {what}"
        never.wait(0.002)


class Brake:
    """As a runner's ``before``: every step takes ``step_s``, until the brake is let go.

    A held engine would take in nothing, since it answers between two steps: so the steps go on, so slowly that a
    request of hundreds of tokens lasts until a test on a busy machine has seen what it wants.
    """

    def __init__(self, step_s: float = 0.05) -> None:
        self._step_s = step_s
        self._gone = threading.Event()

    def __call__(self, _plan: object) -> None:
        self._gone.wait(self._step_s)

    def let_go(self) -> None:
        self._gone.set()
