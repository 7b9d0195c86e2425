"""Where independent work runs: in this process, in several of this machine, or as tasks of a Ray cluster.

Evaluation cells, constant loads, searches and training runs all go through the same one method; what they give does not
depend on which it is. Ray is imported only when it is asked for.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any, Final, Protocol, TypeVar

from engine.errors import EngineError
from engine.text import one_line

_KNOCK_S: Final = 5.0
Task = TypeVar("Task")
Result = TypeVar("Result")


class Executor(Protocol):
    """Maps a function over tasks; both, and results, can be pickled."""

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """Each task's place and result, as they are done. The first exception of a task is raised and ends the rest."""
        ...

    def close(self) -> None:
        """Let go of what it holds; nothing is mapped afterwards."""
        ...


def in_order(
    executor: Executor,
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    done: Callable[[], None] = lambda: None,
) -> list[Result]:
    """All results in the order of the tasks; ``done`` is called as each comes. Raises what a task raises."""
    found: dict[int, Result] = {}
    for place, result in executor.map(function, tasks):
        found[place] = result
        done()
    return [found[place] for place in range(len(tasks))]


class Serial:
    """One after the other, here."""

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        for place, task in enumerate(tasks):
            yield place, function(task)

    def close(self) -> None:
        pass


class WorkerLostError(EngineError):
    """A process ended in the middle of a task; one line."""


def _end_with_parent() -> None:
    """Have this process end when the one that started it has: a pool's worker would wait for tasks for ever."""
    parent = parent_process()
    if parent is None:
        return

    def follow() -> None:
        parent.join()
        os._exit(1)

    Thread(target=follow, daemon=True, name="end-with-parent").start()


class Processes:
    """``jobs`` processes of this machine. Raises ValueError for fewer than one; mapping raises WorkerLostError when a
    process is killed.
    """

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise ValueError(f"at least one process is needed, got {jobs}")
        self._jobs = jobs

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        # Not forked: threads of libraries do not survive that.
        jobs = min(self._jobs, max(1, len(tasks)))
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_end_with_parent) as pool:
            waiting = {pool.submit(function, task): place for place, task in enumerate(tasks)}
            try:
                for future in as_completed(waiting):
                    yield waiting[future], future.result()
            except BrokenProcessPool as error:
                raise WorkerLostError(
                    "a process was killed in the middle of its work, as happens when memory runs out; "
                    "run it again with fewer processes"
                ) from error
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        pass


class RayUnavailableError(RuntimeError):
    """Ray is not installed, or the cluster cannot be reached; one line."""


class RayTasks:
    """Every task one of Ray's. ``address``: of a cluster, ``auto`` for one that runs here, or ``local`` for this
    machine's cores.

    This package must be installed on every node, and files that tasks read and write must be on storage that all share.
    ``cpus``: that a task occupies. ``ray``: the module, for tests. Raises RayUnavailableError.
    """

    def __init__(self, address: str, *, cpus: float = 1.0, ray: Any = None) -> None:
        if ray is None:
            try:
                ray = importlib.import_module("ray")  # an optional dependency
            except ImportError:
                raise RayUnavailableError("--ray needs Ray: pip install 'kv-autotune[ray]'") from None
        self._ray, self._cpus = ray, cpus
        try:
            _knock(address)
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise RayUnavailableError(f"Ray at {address} cannot be used: {one_line(error, 200)}") from error

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        ray = self._ray
        call = ray.remote(num_cpus=self._cpus)(_call)
        shared = ray.put(function)  # once for all tasks
        places = {call.remote(shared, task): place for place, task in enumerate(tasks)}
        waiting = list(places)
        try:
            while waiting:
                (done,), waiting = ray.wait(waiting, num_returns=1)
                try:
                    result = ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause if isinstance(error.cause, Exception) else error from None
                yield places[done], result
        finally:
            for task in waiting:
                ray.cancel(task)

    def close(self) -> None:
        """Leave the cluster; one that was started for this process ends."""
        self._ray.shutdown()


def _knock(address: str) -> None:
    """Raises OSError where nobody listens at HOST:PORT: Ray itself goes on trying for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()


def _call(function: Callable[[Task], Result], task: Task) -> Result:
    return function(task)


@contextmanager
def workers(jobs: int, ray_address: str | None = None) -> Iterator[Executor]:
    """For ``--jobs`` and ``--ray``: a cluster if one is named, else so many processes. Raises as their classes do."""
    chosen: Executor = RayTasks(ray_address) if ray_address is not None else Serial() if jobs == 1 else Processes(jobs)
    try:
        yield chosen
    finally:
        chosen.close()
