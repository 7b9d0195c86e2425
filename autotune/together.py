"""Engine and daemon as one command: both under one parent until a signal, or until one of them cannot go on."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from autotune.child import ChildSpec, SupervisorError
from autotune.demo.stack import VERBS
from autotune.supervisor import Supervisor
from autotune.waiting import waiting
from engine.clock import Clock
from engine.control_client import ControlClient, EngineUnreachable

READY_S = 600.0  # large weights on a slow disk
LATE = "give it more processor time, or a smaller model, and start it again: kernels that have been compiled are kept"


def run_together(
    engine_arguments: Sequence[str], daemon_arguments: Sequence[str], control: Path, clock: Clock, console: Console
) -> int:
    """Run ``autotune engine`` and ``autotune daemon`` with these arguments; main thread only. Returns the exit code.

    What they print is shown on ``console``, so a SupervisorError of theirs needs no last words.
    """

    def show(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    children = Supervisor(
        [
            ChildSpec("engine", (*VERBS, "engine", *engine_arguments), ready=lambda: answers(control), output=show),
            ChildSpec("daemon", (*VERBS, "daemon", *daemon_arguments), output=show),
        ],
        clock,
        report=show,
    )
    signals: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        children.request_stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        what, still = "starting engine and daemon", "loading the model, or compiling kernels for this processor"
        with waiting(console, f"{what} (the first start of an engine compiles kernels)", still):
            children.start()
            children.wait_ready(READY_S, LATE)
        children.wait()
    except SupervisorError:
        if not signals:
            raise
    finally:
        children.stop()
    first = signals[0] if signals else int(signal.SIGINT)
    # A service manager's SIGTERM is the normal end of a service.
    return 0 if first == signal.SIGTERM else 128 + first


def answers(control: Path) -> bool:
    """Whether an engine answers on its control socket."""
    try:
        with ControlClient(control, timeout_s=1.0) as client:
            client.tunables()
    except EngineUnreachable:
        return False
    return True
