"""Where independent runs run: one after another in this process, or each as a task of a Ray cluster."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


class Executor(Protocol):
    """Runs a function over jobs. Function, jobs and results must be picklable."""

    def map(self, function: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]:
        """Results in the order of the jobs. What a job raises is raised."""
        ...


class LocalExecutor:
    """One after another, here."""

    def map(self, function: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]:
        return [function(job) for job in jobs]


class RayUnavailableError(RuntimeError):
    """Ray is not installed, or the cluster cannot be reached; one line."""


class RayExecutor:
    """Every job a Ray task. ``address``: of a cluster, or ``local`` for this machine's cores.

    This package must be installed on every node, and what jobs read and write must be on storage that all share.
    ``cpus``: that a job occupies. ``ray``: the module, for tests.
    """

    def __init__(self, address: str, *, cpus: float = 1.0, ray: Any = None) -> None:
        """Raises RayUnavailableError."""
        if ray is None:
            try:
                ray = importlib.import_module("ray")  # an optional dependency
            except ImportError:
                raise RayUnavailableError("--ray needs Ray: pip install ray") from None
        self._ray, self._cpus = ray, cpus
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            raise RayUnavailableError(f"Ray at {address} cannot be used: {str(error).splitlines()[0]}") from error

    def map(self, function: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]:
        task = self._ray.remote(num_cpus=self._cpus)(function)
        try:
            return list(self._ray.get([task.remote(job) for job in jobs]))
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None

    def close(self) -> None:
        """Leave the cluster."""
        self._ray.shutdown()
