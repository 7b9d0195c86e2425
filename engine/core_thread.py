"""The thread that steps an engine, and the queue through which everyone else talks to it. No torch, no asyncio."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from engine.clock import Clock, RealClock
from engine.core import EngineCore
from engine.request_delta import RequestDelta

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_Command = Callable[[], None]


class EngineThread:
    """Runs commands between steps, in the order they came, and hands over all of a step's deltas at once.

    Idle, it waits on the queue and uses no processor. ``deliver`` is called on the engine thread and must not block.
    ``clock``: by which :attr:`busy_s` is told.
    """

    def __init__(
        self, core: EngineCore, deliver: Callable[[list[RequestDelta]], None], clock: Clock | None = None
    ) -> None:
        self._core = core
        self._deliver = deliver
        self._clock = clock or RealClock()
        self._began_ns: int | None = None  # the step, or whatever else it does now; None while it waits
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._stopped.is_set()

    @property
    def busy_s(self) -> float:
        """How long the thread has been at one step, command or background job; 0 while it waits or has ended."""
        began_ns = self._began_ns
        return 0.0 if began_ns is None or not self.is_alive else (self._clock.now_ns() - began_ns) / 1e9

    def call(self, function: Callable[[EngineCore], _T]) -> Future[_T]:
        """Run ``function(core)`` at the next step boundary. The future carries its result or exception; RuntimeError
        when the thread has ended.
        """
        future: Future[_T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self._core))
            except Exception as error:  # noqa: BLE001 - it belongs to the caller
                future.set_exception(error)

        self._commands.put(command)
        if self._stopped.is_set():
            self._refuse_rest()
            if not future.done():
                future.set_exception(RuntimeError("the engine thread has ended"))
        return future

    def stop(self, timeout_s: float) -> bool:
        """End after the step that runs now, with a last delta for every request; False if it did not in time."""
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._began_ns = self._clock.now_ns()
                if self._core.has_work:
                    self._hand_over(self._core.step())
                elif self._core.has_background_work:
                    self._core.background()
            self._core.give_up("it is shutting down")
            self._hand_over(self._core.abort_all())
        except Exception as error:  # noqa: BLE001 - nobody may be left waiting for this thread
            _log.exception("the engine thread ended")
            self._core.give_up(error)
            self._hand_over(self._core.abort_all())
        finally:
            self._stopped.set()
            self._refuse_rest()

    def _hand_over(self, deltas: list[RequestDelta]) -> None:
        if deltas:
            self._deliver(deltas)

    def _take_commands(self) -> bool:
        """Run what is queued; False for the order to stop. Waits only while there is nothing to do."""
        pause_s = self._core.pause_s
        self._began_ns = None
        try:
            if pause_s is None:
                command = self._commands.get()
            elif pause_s > 0:
                command = self._commands.get(timeout=pause_s)
            else:
                command = self._commands.get_nowait()
            while command is not None:
                self._began_ns = self._clock.now_ns()
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False

    def _refuse_rest(self) -> None:
        """Let no caller wait for a thread that is gone: its commands find a broken core that can still be read."""
        try:
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    command()
        except queue.Empty:
            return
