"""What the parts of a scheduler have in common: the queues and the cache they work on, and whom they tell. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache_manager import CacheManager
from engine.clock import Clock
from engine.events import EventSink
from engine.queues import Queues
from engine.stats import Counters


@dataclass(frozen=True)
class Shared:
    """One scheduler's."""

    queues: Queues
    cache: CacheManager
    clock: Clock
    counters: Counters
    events: EventSink


class SchedulerPart:
    """Works on what it shares with the other parts."""

    def __init__(self, shared: Shared) -> None:
        self._queues = shared.queues
        self._cache = shared.cache
        self._clock = shared.clock
        self._counters = shared.counters
        self._events = shared.events
