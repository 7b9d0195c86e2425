"""Child processes under one parent: neither falls with the other, and errors come with the child's own last words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.child import SUPERVISOR_PID, BackOff, ChildSpec, SupervisorError, _message_of
from autotune.supervisor import Supervisor, die_with_parent
from engine.clock import RealClock

SLEEPER = "import time\nprint('up', flush=True)\ntime.sleep(60)"
STUBBORN = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)"


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code)


class Up:
    """Ready once a child has printed ``up``; ``times`` counts how often."""

    def __init__(self) -> None:
        self.times = 0
        self.changed = threading.Condition()

    def __call__(self, line: str) -> None:
        with self.changed:
            self.times += line == "up"
            self.changed.notify_all()

    def wait(self, times: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.times >= times, timeout=60)


@pytest.fixture
def start() -> Iterator[Callable[..., Supervisor]]:
    started = []

    def make(*children: ChildSpec, **options: Any) -> Supervisor:
        made = Supervisor(children, RealClock(), back_off=BackOff(0.05, 0.2), **options)
        started.append(made)
        made.start()
        return made

    yield make
    for made in started:
        made.stop()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_one_child_dies_is_restarted_and_the_other_does_not_notice(start: Any) -> None:
    up, events = Up(), []
    running = start(
        ChildSpec("engine", python(SLEEPER), output=up), ChildSpec("daemon", python(SLEEPER)), report=events.append
    )
    running.wait_ready(60)
    up.wait(1)
    engine, daemon = running.pid("engine"), running.pid("daemon")
    os.kill(engine, signal.SIGKILL)
    up.wait(2)
    assert running.pid("engine") != engine
    assert running.pid("daemon") == daemon
    assert events == ["engine was killed by SIGKILL: up; restarting in 0.05 s"]
    engine = running.pid("engine")
    running.stop()
    assert not is_running(engine)
    assert not is_running(daemon)


def test_a_child_that_dies_at_start_is_told_with_its_last_words(start: Any) -> None:
    dying = python("import sys\nprint('starting')\nsys.exit('error: port 8000 is in use')")
    running = start(ChildSpec("engine", dying, ready=lambda: False), ChildSpec("daemon", python(SLEEPER)))
    with pytest.raises(SupervisorError) as caught:
        running.wait_ready(60)
    assert str(caught.value) == "engine exited with code 1 at start: error: port 8000 is in use"
    assert caught.value.problem == "engine exited with code 1 at start"
    assert running.pid("daemon") is None


def test_a_child_that_dies_at_start_is_not_started_again(start: Any) -> None:
    """Its fault would be told once more with every try."""
    events: list[str] = []
    begun = Up()
    dying = python("import sys\nprint('up', flush=True)\nsys.exit(1)")
    running = start(
        ChildSpec("engine", python(SLEEPER), ready=lambda: False),
        ChildSpec("daemon", dying, ready=lambda: False, output=begun),
        report=events.append,
    )
    with pytest.raises(SupervisorError, match="daemon exited with code 1 at start"):
        running.wait_ready(30)  # at once, although the engine is waited for first
    assert (begun.times, events) == (1, [])


def test_a_child_that_was_told_something_impossible_ends_it_all(start: Any) -> None:
    """An engine whose model folder has gone, say: its exit code says that trying again cannot help."""
    events: list[str] = []
    code = "import signal, sys\nsignal.signal(10, lambda *_: sys.exit(2))\nprint('up', flush=True)\nsignal.pause()"
    up = Up()
    running = start(
        ChildSpec("engine", python(code), output=up), ChildSpec("daemon", python(SLEEPER)), report=events.append
    )
    running.wait_ready(60)
    up.wait(1)
    daemon = running.pid("daemon")
    os.kill(running.pid("engine"), signal.SIGUSR1)
    with pytest.raises(SupervisorError, match="engine exited with code 2"):
        running.wait()
    assert (up.times, events) == (1, [])
    assert not is_running(daemon)


def test_waiting_ends_with_a_stop(start: Any) -> None:
    running = start(ChildSpec("engine", python(SLEEPER)))
    running.wait_ready(60)
    threading.Timer(0.05, running.request_stop).start()
    running.wait()


def test_a_command_that_does_not_exist(start: Any) -> None:
    with pytest.raises(SupervisorError, match="engine cannot be started: No such file or directory: /no/such"):
        start(ChildSpec("engine", ("/no/such",)))


def test_never_ready_is_an_error_with_a_limit(start: Any) -> None:
    running = start(ChildSpec("engine", python(SLEEPER), ready=lambda: False))
    with pytest.raises(SupervisorError, match=r"engine was not ready after 0\.2 s"):
        running.wait_ready(0.2)


def test_a_start_that_takes_too_long_says_what_to_do_and_what_was_said_last_in_words(start: Any) -> None:
    """A machine without processor time to spare: the error ended in the engine's log record, as JSON."""
    record = '{"time": "2026-12-01T00:00:00Z", "level": "info", "logger": "engine", "message": "compiling"}'
    said, printing = threading.Event(), python(SLEEPER.replace("'up'", repr(record)))
    running = start(ChildSpec("engine", printing, ready=lambda: False, output=lambda _: said.set()))
    assert said.wait(60)
    with pytest.raises(SupervisorError) as caught:
        running.wait_ready(0.2, "start it again")
    assert str(caught.value) == "engine was not ready after 0.2 s; start it again; it said last: compiling"
    assert caught.value.problem == "engine was not ready after 0.2 s; start it again"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"message": "a\\nb"}', "a b"),
        ('{"level": "info"}', '{"level": "info"}'),
        ('{"message": 3}', '{"message": 3}'),
        ("{torn", "{torn"),
        ("engine: the weights are torn", "engine: the weights are torn"),
    ],
)
def test_last_words_are_what_a_record_says(line: str, words: str) -> None:
    assert _message_of(line) == words


def test_stop_while_waiting_for_readiness(start: Any) -> None:
    running = start(ChildSpec("engine", python(SLEEPER), ready=lambda: False))
    threading.Timer(0.1, running.request_stop).start()
    with pytest.raises(SupervisorError, match="stopped while starting"):
        running.wait_ready(30)


def test_a_stubborn_child_is_killed_and_said(start: Any) -> None:
    up, events = Up(), []
    running = start(ChildSpec("engine", python(STUBBORN), output=up, stop_grace_s=0.2), report=events.append)
    up.wait(1)
    pid = running.pid("engine")
    running.stop()
    assert not is_running(pid)
    assert events == ["engine did not stop within 0.2 s and was killed"]


def test_children_stop_in_reverse_order(start: Any) -> None:
    order = []
    code = "import signal, sys, time\nsignal.signal(15, lambda *_: (print('bye', flush=True), sys.exit()))\n"
    code += "print('up', flush=True)\ntime.sleep(60)"
    ups = [Up(), Up()]

    def output(name: str, up: Any) -> Callable[[str], None]:
        def took(line: str) -> None:
            if line == "bye":
                order.append(name)
            up(line)

        return took

    running = start(
        ChildSpec("engine", python(code), output=output("engine", ups[0])),
        ChildSpec("daemon", python(code), output=output("daemon", ups[1])),
    )
    for up in ups:
        up.wait(1)
    running.stop()
    assert order == ["daemon", "engine"]


def test_back_off_doubles_up_to_its_limit() -> None:
    back_off = BackOff(0.5, 30)
    assert [back_off.delay_s(n) for n in (1, 2, 3, 7, 100)] == [0.5, 1, 2, 30, 30]


def test_children_die_with_a_supervisor_that_is_killed() -> None:
    child = "import os, time\nfrom autotune.supervisor import die_with_parent\ndie_with_parent(os.environ)\n"
    child += "print(os.getpid(), flush=True)\ntime.sleep(60)"
    parent = f"""
import sys, time
from autotune.child import SUPERVISOR_PID, ChildSpec
from autotune.supervisor import Supervisor, die_with_parent
from engine.clock import RealClock
print_pid = lambda line: print(line, flush=True)
Supervisor([ChildSpec("engine", (sys.executable, "-c", {child!r}), output=print_pid)], RealClock()).start()
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    assert is_running(pid)
    handle = os.pidfd_open(pid)
    process.kill()
    process.wait()
    import select

    ready, _, _ = select.select([handle], [], [], 60)
    os.close(handle)
    assert ready, "the child outlived its supervisor"


def test_a_child_whose_supervisor_died_while_it_started_ends() -> None:
    """Its parent is somebody else by then, which must not be taken for a start without a supervisor."""
    gone = subprocess.Popen(["true"])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
    with pytest.raises(SystemExit):
        die_with_parent({SUPERVISOR_PID: str(gone.pid)})
    gone.wait()
    with pytest.raises(SystemExit):
        die_with_parent({SUPERVISOR_PID: str(gone.pid)})
    die_with_parent({SUPERVISOR_PID: str(os.getpid())})  # alive, but not our parent: started in a supervisor's place
    die_with_parent({})
