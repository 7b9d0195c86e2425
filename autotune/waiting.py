"""Says what a person is waiting for, from the first moment: moving on a terminal, in plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_LINES = 10  # per measurement, where there is no terminal


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """While the body runs: a spinner and the seconds so far on a terminal, one line elsewhere."""
    if not console.is_terminal:
        console.print(f"{what} ...", markup=False, highlight=False, soft_wrap=True)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield


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

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    def tell(done: int, total: int, now: str) -> None:
        nonlocal tenths
        reached = done * _LINES // total if total else 0
        if not done:
            say(f"{now} ...")
        elif reached > tenths:
            say(f"{done}/{total} {now}")
        tenths = reached

    say(f"{what} ...")
    return tell
