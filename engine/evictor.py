"""Drops KV of running sequences that neither the model's own window nor the eviction setting keeps. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence, CacheSettings
from engine.clock import Clock
from engine.events import EventSink, TokensEvicted
from engine.eviction import outside_window, window_eviction
from engine.memory_model import GroupSpec
from engine.recoder import Recoder
from engine.request import Request
from engine.stats import Counters
from engine.versions import Versions


class Evictor:
    """Takes blocks out of sequences' tables. ``pools`` and ``recoders`` per group, shared with the cache manager."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        pools: Sequence[BlockPool],
        recoders: Sequence[Recoder],
        versions: Versions,
        *,
        sinks: int,
        clock: Clock,
        events: EventSink,
        counters: Counters,
    ) -> None:
        self._groups = groups
        self._pools = pools
        self._recoders = recoders
        self._versions = versions
        self._sinks = sinks
        self._clock = clock
        self._events = events
        self._counters = counters

    def evict(self, sequence: CacheSequence, request: Request, settings: CacheSettings) -> bool:
        """Drop what is not kept; True if the eviction setting dropped anything (the model's own window is no loss)."""
        is_window = settings.eviction == "window" and sequence.allow_eviction
        evicts = is_window and sequence.committed >= len(request.prompt_ids)
        evicted_tokens = evicted_blocks = 0
        for group, table in enumerate(sequence.tables):
            window = self._groups[group].window
            if window is not None:
                self._drop_entries(sequence, group, outside_window(table, sequence.committed, window))
            if evicts:
                found = window_eviction(table, sequence.committed, self._sinks, settings.keep_tokens)
                tokens, blocks = self._drop_entries(sequence, group, found)
                evicted_tokens = max(evicted_tokens, tokens)
                evicted_blocks += blocks
        if not evicted_blocks:
            return False
        sequence.is_evicted = True
        request.num_evicted_tokens += evicted_tokens
        self._counters.evicted_tokens += evicted_tokens
        self._counters.evicted_blocks += evicted_blocks
        self._events.emit(TokensEvicted(self._clock.now_ns(), request.request_id, evicted_tokens, evicted_blocks))
        return True

    def _drop_entries(self, sequence: CacheSequence, group: int, found: tuple[int, int]) -> tuple[int, int]:
        start, stop = found
        if stop <= start:
            return 0, 0
        table = sequence.tables[group]
        num_tokens = sum(table.stops[i] - table.blocks[i].first for i in range(start, stop))
        for block in table.replace(start, stop, (), (), self._versions.next()):
            self._pools[group].drop(block, sequence.serial)
            if block.holders or block.nodes:
                self._recoders[group].consider(block)
        return num_tokens, stop - start
