"""Carries out the copies between device and host memory that bookkeeping has planned. Imports torch.

On a GPU they run on two streams of their own, out and in, from and to pinned host memory. Without one the *emulated*
link really copies the bytes, and reports them when a device link of the configured rate would be done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.clock import Clock
from engine.link_times import Mover, TimedMover
from engine.transfers import Direction, HostLink, Transfer

__all__ = ["CopyBytes", "CudaMover", "EmulatedMover", "Mover", "host_arenas"]

CopyBytes = Callable[[Tensor, Tensor, Tensor], None]

_POLL_NS = 200_000  # how long to wait before asking a GPU again


def host_arenas(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Host memory of each layer group, uint8 [bytes]; pinned if the device is a GPU.

    Raises RuntimeError where there is not enough.
    """
    return [torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for size in sizes]


class EmulatedMover(TimedMover):
    """Copies at once and reports late. ``copy_bytes``: that of :mod:`kernels.ops`."""

    def __init__(
        self,
        arenas: Sequence[Tensor],
        hosts: Sequence[Tensor],
        link: HostLink,
        clock: Clock,
        copy_bytes: CopyBytes,
    ) -> None:
        super().__init__(link, clock)
        self._copy_bytes = copy_bytes
        self._tiers = {Direction.OUT: (arenas, hosts), Direction.IN: (hosts, arenas)}

    def submit(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            sources, targets = self._tiers[transfer.direction]
            rows = torch.tensor(transfer.rows, dtype=torch.int64)
            self._copy_bytes(sources[transfer.group], targets[transfer.group], rows)
        super().submit(transfers)


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
