"""Who does the work of a grid: this process, or several. A cluster fits in by the same one method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Protocol, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


class Executor(Protocol):
    """Maps a function over tasks, in any order of completion; both can be pickled."""

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """Each task's place and result as it is done. The first exception of a task is raised, and ends the rest."""
        ...


class Serial:
    """One after the other, here."""

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        for place, task in enumerate(tasks):
            yield place, function(task)


class Processes:
    """``jobs`` processes of this machine. Raises ValueError for fewer than one."""

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise ValueError(f"at least one process is needed, got {jobs}")
        self._jobs = jobs

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        # Not forked: threads of libraries do not survive that.
        with ProcessPoolExecutor(min(self._jobs, max(1, len(tasks))), mp_context=get_context("spawn")) as pool:
            waiting = {pool.submit(function, task): place for place, task in enumerate(tasks)}
            try:
                for future in as_completed(waiting):
                    yield waiting[future], future.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


def executor(jobs: int) -> Executor:
    """For ``--jobs``."""
    return Serial() if jobs == 1 else Processes(jobs)
