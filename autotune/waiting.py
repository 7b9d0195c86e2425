"""Says what a person is waiting for, from the first moment: moving on a terminal, in plain lines elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

STILL_S: Final = 15.0
_LINES = 10  # per measurement, where there is no terminal


@contextmanager
def waiting(console: Console, what: str, still: str = "", *, every_s: float = STILL_S) -> Iterator[None]:
    """While the body runs: a spinner and the seconds so far on a terminal; elsewhere one line, and one every so often
    that says what is ``still`` done, ``what`` if that is empty.
    """
    if not console.is_terminal:
        _say(console, f"{what} ...")
        with _reminders(console, still or what, every_s):
            yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield


@contextmanager
def _reminders(console: Console, still: str, every_s: float) -> Iterator[None]:
    ended = threading.Event()

    def remind() -> None:
        times = 0
        while not ended.wait(every_s):
            times += 1
            _say(console, f"{still}, {times * every_s:.0f} s so far")

    thread = threading.Thread(target=remind, name="reminders", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def counting(console: Console, what: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yields a function to be told (done, total, what of): a bar on a terminal, elsewhere a line for ``what``, then one
    whenever ``what of`` begins at 0 and one per tenth.
    """
    if not console.is_terminal:
        yield _lines(console, what)
        return
    columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}", markup=False), console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, now: bar.update(task, completed=done, total=total or None, description=now)


def _lines(console: Console, what: str) -> Callable[[int, int, str], None]:
    tenths = 0

    def tell(done: int, total: int, now: str) -> None:
        nonlocal tenths
        reached = done * _LINES // total if total else 0
        if not done:
            _say(console, f"{now} ...")
        elif reached > tenths:
            _say(console, f"{done}/{total} {now}")
        tenths = reached

    _say(console, f"{what} ...")
    return tell


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
