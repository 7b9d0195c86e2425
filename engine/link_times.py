"""When copies between device and host memory would be done: the *emulated* link's times, whoever makes the copies. No
torch: a simulation has no bytes to copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.clock import Clock
from engine.transfers import Direction, HostLink, Transfer


class Mover(Protocol):
    """Makes copies in the order they were given in each direction, beside the steps."""

    @property
    def link(self) -> HostLink:
        """What it copies over."""
        ...

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Start copies, after all that the device has been given to do so far. Does not wait for them."""
        ...

    def arrived(self) -> list[int]:
        """Numbers of the transfers that are done and were not reported yet."""
        ...

    def wait_ns(self) -> int:
        """About how long until the next one is done; 0 if it is, or if there is none."""
        ...


@dataclass(eq=False)
class Ticket:
    """A copy on an emulated link: when it will be done, unless an urgent one delays it."""

    due_ns: int


class EmulatedLink:
    """When copies at a configured rate would be done: each direction makes one after the other, both at once.

    An *urgent* copy, one that attention waits for, only waits for the copy in progress and for other urgent ones, and
    delays the rest.
    """

    def __init__(self, link: HostLink, clock: Clock) -> None:
        self.link = link
        self._clock = clock
        self._queues: dict[Direction, deque[Ticket]] = {direction: deque() for direction in Direction}
        self._urgent_ns = dict.fromkeys(Direction, 0)  # when the last urgent copy is done

    def start(self, direction: Direction, num_bytes: int) -> Ticket:
        """Queue a copy."""
        queue = self._waiting(direction)
        begin_ns = max(self._clock.now_ns(), self._urgent_ns[direction], queue[-1].due_ns if queue else 0)
        queue.append(Ticket(begin_ns + self.link.copy_ns(direction, num_bytes)))
        return queue[-1]

    def start_urgent(self, direction: Direction, num_bytes: int) -> int:
        """Copy as soon as possible; returns when it is done, in nanoseconds of the clock."""
        queue = self._waiting(direction)
        begin_ns = max(self._clock.now_ns(), self._urgent_ns[direction])
        if queue and begin_ns < queue[0].due_ns and self._urgent_ns[direction] <= self._clock.now_ns():
            begin_ns = queue[0].due_ns
        duration_ns = self.link.copy_ns(direction, num_bytes)
        for ticket in queue:
            if ticket.due_ns > begin_ns:
                ticket.due_ns += duration_ns
        self._urgent_ns[direction] = begin_ns + duration_ns
        return begin_ns + duration_ns

    def _waiting(self, direction: Direction) -> deque[Ticket]:
        queue, now_ns = self._queues[direction], self._clock.now_ns()
        while queue and queue[0].due_ns <= now_ns:
            queue.popleft()
        return queue


class TimedMover:
    """A :class:`Mover` of no bytes: transfers arrive when the emulated link would be done with them."""

    def __init__(self, link: HostLink, clock: Clock) -> None:
        self.line = EmulatedLink(link, clock)
        self._clock = clock
        self._queues: dict[Direction, deque[tuple[Ticket, int]]] = {direction: deque() for direction in Direction}

    @property
    def link(self) -> HostLink:
        return self.line.link

    def submit(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            ticket = self.line.start(transfer.direction, transfer.num_bytes)
            self._queues[transfer.direction].append((ticket, transfer.number))

    def arrived(self) -> list[int]:
        now_ns = self._clock.now_ns()
        numbers = []
        for queue in self._queues.values():
            while queue and queue[0][0].due_ns <= now_ns:
                numbers.append(queue.popleft()[1])
        return numbers

    def wait_ns(self) -> int:
        first = min((queue[0][0].due_ns for queue in self._queues.values() if queue), default=0)
        return max(0, first - self._clock.now_ns())


class StreamTimes:
    """When a layer's streamed tiles are there: each layer's are sent for when the layer before begins.

    ``pause`` is called with the seconds that computing has to wait.
    """

    def __init__(self, line: EmulatedLink, clock: Clock, pause: Callable[[float], None]) -> None:
        self._line = line
        self._clock = clock
        self._pause = pause
        self._due_ns: dict[int, int] = {}
        self._wait_ns = 0

    def start(self, group: int, num_bytes: int) -> int:
        """Send for a layer's share; returns when it will be there, in nanoseconds of the clock."""
        self._due_ns[group] = due_ns = self._line.start_urgent(Direction.IN, num_bytes)
        return due_ns

    def wait(self, group: int) -> None:
        """A layer's attention comes next: pause until what was sent for last is there."""
        begin_ns = self._clock.now_ns()
        while self._clock.now_ns() < self._due_ns[group]:
            self._pause((self._due_ns[group] - self._clock.now_ns()) / 1e9)
        self._wait_ns += self._clock.now_ns() - begin_ns

    def take_wait_ns(self) -> int:
        """How long computing has waited since this was last asked."""
        wait_ns, self._wait_ns = self._wait_ns, 0
        return wait_ns
