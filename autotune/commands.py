"""Orders from other threads, carried out by the control loop between two ticks: it alone owns what they change."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_MOST_WAITING = 16
_T = TypeVar("_T")


class NotDoneError(Exception):
    """The loop has not carried the order out, in one line; it will not do so later either."""


class Commands:
    """``wake`` ends the loop's wait. Any thread may :meth:`order`; the loop calls :meth:`carry_out`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def order(self, command: Callable[[], _T], timeout_s: float) -> _T:
        """Have it done and return its answer.

        Raises NotDoneError when the loop does not get to it in time, and what ``command`` raises.
        """
        if len(self._waiting) >= _MOST_WAITING:
            raise NotDoneError("too many orders are waiting; is the control loop stuck?")
        future: Future[_T] = Future()
        self._waiting.append((future, command))
        self._wake()
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.cancel():
                raise NotDoneError(
                    f"the control loop did not answer within {timeout_s:g} s; nothing was done"
                ) from None
            return future.result()  # it had begun just then

    def carry_out(self) -> None:
        """Do what waits. What an order raises goes to who gave it, never to the loop."""
        for _ in range(len(self._waiting)):
            future, command = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(command())
            except Exception as error:  # noqa: BLE001  # told to who asked
                future.set_exception(error)
