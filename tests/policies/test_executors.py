"""One contract for whoever does the work: here, in processes, as tasks of a stand-in for Ray, and of Ray itself."""

from __future__ import annotations

import importlib.util
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from policies.executors import (
    Executor,
    Processes,
    RayTasks,
    RayUnavailableError,
    Serial,
    WorkerLostError,
    in_order,
    workers,
)


class FakeRay:
    """The part of Ray's interface that is used. Tasks run when they are waited for, the last one first."""

    class exceptions:  # noqa: N801
        class RayTaskError(Exception):
            cause: Exception

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.cancelled: list[Any] = []
        self.is_up = False

    def init(self, **options: Any) -> None:
        if options["address"] == "auto":
            raise ConnectionError("no cluster here\nand more lines")
        self.inits.append(options)
        self.is_up = True

    def put(self, value: Any) -> Any:
        return value

    def remote(self, *, num_cpus: float) -> Any:
        assert num_cpus > 0

        def decorate(function: Any) -> Any:
            function_of = partial(partial, function)
            return type("Remote", (), {"remote": staticmethod(function_of)})

        return decorate

    def wait(self, tasks: list[Any], *, num_returns: int) -> tuple[list[Any], list[Any]]:
        assert num_returns == 1
        return [tasks[-1]], tasks[:-1]

    def get(self, task: Any) -> Any:
        try:
            return task()
        except ValueError as error:
            wrapped = self.exceptions.RayTaskError("task failed")
            wrapped.cause = error
            raise wrapped from error

    def cancel(self, task: Any) -> None:
        self.cancelled.append(task)

    def shutdown(self) -> None:
        self.is_up = False


def add(base: int, number: int) -> int:
    if number < 0:
        raise ValueError("negative")
    return base + number


def touch(folder: Path, name: str) -> str:
    (folder / name).touch()
    return f"{name} by {os.getpid()}"


MAKERS: dict[str, Callable[[], Executor]] = {
    "serial": Serial,
    "processes": lambda: Processes(2),
    "ray-stand-in": lambda: RayTasks("local", ray=FakeRay()),
    "ray": lambda: RayTasks("local"),
}


@pytest.fixture(params=MAKERS, scope="module")
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("the extra 'ray' is not installed")
    made = MAKERS[request.param]()
    yield made
    made.close()


def test_every_task_is_done_once_and_known_by_its_place(executor: Executor) -> None:
    found = list(executor.map(partial(add, 10), [3, 1, 2, 1]))
    assert sorted(found) == [(0, 13), (1, 11), (2, 12), (3, 11)]
    assert in_order(executor, partial(add, 10), [3, 1, 2]) == [13, 11, 12]


def test_without_tasks_there_are_no_results(executor: Executor) -> None:
    assert list(executor.map(partial(add, 10), [])) == []


def test_what_a_task_raises_is_raised_as_it_is(executor: Executor) -> None:
    with pytest.raises(ValueError, match=r"^negative$"):
        list(executor.map(partial(add, 10), [1, -1, 2]))
    assert in_order(executor, partial(add, 1), [1]) == [2]  # and it goes on to be of use


def test_results_can_be_left_before_the_last(executor: Executor) -> None:
    results = executor.map(partial(add, 10), [1, 2, 3])
    assert next(results)[1] in {11, 12, 13}
    results.close()  # type: ignore[attr-defined]
    assert in_order(executor, partial(add, 1), [1]) == [2]


def test_tasks_see_the_files_of_this_machine(executor: Executor, tmp_path: Path) -> None:
    in_order(executor, partial(touch, tmp_path), ["a", "b"])
    assert {file.name for file in tmp_path.iterdir()} == {"a", "b"}


def test_after_a_failure_what_waits_is_cancelled() -> None:
    ray = FakeRay()
    with pytest.raises(ValueError, match="negative"):
        list(RayTasks("local", ray=ray).map(partial(add, 0), [1, 2, -1]))
    assert len(ray.cancelled) == 2


def test_a_cluster_out_of_reach_is_one_line() -> None:
    with pytest.raises(RayUnavailableError, match=r"^Ray at auto cannot be used: no cluster here and more lines$"):
        RayTasks("auto", ray=FakeRay())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ray = FakeRay()
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "127.0.0.1:99999"):
        with pytest.raises(RayUnavailableError, match=r"cannot be used: [^\n]+$"):
            RayTasks(address, ray=ray)
    assert ray.inits == []  # which would go on trying for minutes


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayUnavailableError, match=r"pip install 'kv-autotune\[ray\]'"), workers(1, "auto"):
        pass


def test_ray_is_asked_for_by_its_address_alone_and_left_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    with workers(1) as serial, workers(3) as processes:
        assert isinstance(serial, Serial)
        assert isinstance(processes, Processes)
    assert ray.inits == []
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with workers(4, address) as cluster:
            assert isinstance(cluster, RayTasks)
            assert ray.is_up
    assert ray.inits[0]["address"] == address
    assert not ray.is_up


def test_fewer_than_one_process_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Processes(0)


def test_a_process_that_is_killed_is_one_line() -> None:
    with pytest.raises(WorkerLostError, match="fewer processes"):
        list(Processes(1).map(os._exit, [1]))


def tell_and_stay(fifo: str) -> None:
    """Writes this process's number, and ends only when somebody ends it."""
    with Path(fifo).open("w") as told:
        told.write(f"{os.getpid()}\n")
    threading.Event().wait()


PARENT = """
import sys
from policies.executors import Processes
from tests.policies.test_executors import tell_and_stay
if __name__ == "__main__":
    list(Processes(2).map(tell_and_stay, [sys.argv[1]] * 2))
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux, where the end of any process can be waited for")
def test_processes_end_when_the_one_that_started_them_is_killed(tmp_path: Path) -> None:
    script, fifo = tmp_path / "parent.py", tmp_path / "fifo"
    script.write_text(PARENT)
    os.mkfifo(fifo)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, str(script), str(fifo)], env=environment) as parent:
        workers: list[int] = []
        try:
            with fifo.open() as told:
                workers += [int(line) for line in told]
            while len(workers) < 2:  # the second began to write after the first had ended to
                with fifo.open() as told:
                    workers += [int(line) for line in told]
            handles = [os.pidfd_open(worker) for worker in workers]
        finally:
            parent.kill()
    for handle in handles:
        ended, _, _ = select.select([handle], [], [], 30)
        os.close(handle)
        assert ended
