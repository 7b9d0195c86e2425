"""Carries out the copies between device and host memory that bookkeeping has planned. Imports torch.

On a GPU they run on two streams of their own, out and in, from and to pinned host memory. Without one the *emulated*
link really copies the bytes, and reports them when a device link of the configured rate would be done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.clock import Clock
from engine.transfers import Direction, HostLink, Transfer

CopyBytes = Callable[[Tensor, Tensor, Tensor], None]

_POLL_NS = 200_000  # how long to wait before asking a GPU again


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


def host_arenas(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Host memory of each layer group, uint8 [bytes]; pinned if the device is a GPU.

    Raises RuntimeError where there is not enough.
    """
    return [torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for size in sizes]


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


class EmulatedMover:
    """Copies at once and reports late. ``copy_bytes``: that of :mod:`kernels.ops`."""

    def __init__(
        self,
        arenas: Sequence[Tensor],
        hosts: Sequence[Tensor],
        link: HostLink,
        clock: Clock,
        copy_bytes: CopyBytes,
    ) -> None:
        self.line = EmulatedLink(link, clock)
        self._clock = clock
        self._copy_bytes = copy_bytes
        self._tiers = {Direction.OUT: (arenas, hosts), Direction.IN: (hosts, arenas)}
        self._queues: dict[Direction, deque[tuple[Ticket, int]]] = {direction: deque() for direction in Direction}

    @property
    def link(self) -> HostLink:
        return self.line.link

    def submit(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            sources, targets = self._tiers[transfer.direction]
            rows = torch.tensor(transfer.rows, dtype=torch.int64)
            self._copy_bytes(sources[transfer.group], targets[transfer.group], rows)
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


class CudaMover:
    """One stream per direction. A copy waits for the work that the current stream had when it was submitted: what wrote
    its source, and what last read its target. Nobody waits for a copy but who asks whether it has arrived.
    """

    def __init__(
        self, arenas: Sequence[Tensor], hosts: Sequence[Tensor], link: HostLink, copy_bytes: CopyBytes
    ) -> None:
        """``hosts`` are pinned."""
        self._link = link
        self._device = arenas[0].device
        self._copy_bytes = copy_bytes
        self._tiers = {Direction.OUT: (arenas, hosts), Direction.IN: (hosts, arenas)}
        self._streams = {
            direction: torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            for direction in Direction
        }
        self._queues: dict[Direction, deque[tuple[torch.cuda.Event, int]]] = {each: deque() for each in Direction}

    @property
    def link(self) -> HostLink:
        return self._link

    def submit(self, transfers: Sequence[Transfer]) -> None:
        if not transfers:
            return
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        written.record(torch.cuda.current_stream(self._device))
        for transfer in transfers:
            stream = self._streams[transfer.direction]
            stream.wait_event(written)
            sources, targets = self._tiers[transfer.direction]
            with torch.cuda.stream(stream):
                rows = torch.tensor(transfer.rows, dtype=torch.int64)
                self._copy_bytes(sources[transfer.group], targets[transfer.group], rows)
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record(stream)
            self._queues[transfer.direction].append((done, transfer.number))

    def arrived(self) -> list[int]:
        numbers = []
        for queue in self._queues.values():
            while queue and queue[0][0].query():  # type: ignore[no-untyped-call]
                numbers.append(queue.popleft()[1])
        return numbers

    def wait_ns(self) -> int:
        return _POLL_NS if any(self._queues.values()) else 0
