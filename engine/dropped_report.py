"""Tells the event sink how many cached blocks were given up for room. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from engine.block_pool import BlockPool
from engine.clock import Clock
from engine.events import EventSink, PrefixBlocksDropped


class DroppedReport:
    """Remembers, per layer group, what has been told."""

    def __init__(self, pools: Sequence[BlockPool], *, clock: Clock, events: EventSink) -> None:
        self._pools = pools
        self._clock = clock
        self._events = events
        self._told = [0] * len(pools)

    def tell(self, group: int) -> None:
        """Something has asked a group's pool for room."""
        dropped = self._pools[group].dropped_idle - self._told[group]
        if dropped:
            self._told[group] += dropped
            self._events.emit(PrefixBlocksDropped(self._clock.now_ns(), group, dropped))

    def tell_all(self) -> None:
        """The same for every group."""
        for group in range(len(self._pools)):
            self.tell(group)
