"""Drops KV of running sequences that neither the model's own window nor the eviction setting keeps. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from engine.attention_mass import OBSERVED_PROMPT_TOKENS, ObservedMass
from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence, CacheSettings
from engine.chunks import end_position, first_position, num_tokens, whole_tiles
from engine.clock import Clock
from engine.events import EventSink, TokensEvicted
from engine.eviction import RECENT_SHARE, heavy_hitter_eviction, outside_window, window_eviction
from engine.formats import CHUNK_TOKENS
from engine.memory_model import GroupSpec
from engine.recoder import Recoder
from engine.request import Request
from engine.stats import Counters
from engine.versions import Versions


class Evictor:
    """Takes what is dropped out of sequences' tables. ``pools`` and ``recoders`` per group, shared with the manager.

    A block goes when nothing of it is kept. Of a block that is partly kept the rest is hidden at once, so that what is
    attended does not depend on block sizes; its memory comes back when the recoder has split the block.
    """

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

    def may_observe(self, request: Request, settings: CacheSettings) -> bool:
        """Whether eviction goes by attention and could ever reach the request."""
        most = len(request.prompt_ids) + request.params.max_tokens
        return settings.observes and request.cache.allow_eviction and most > settings.keep_tokens + self._sinks

    def observed_queries(self, request: Request, start: int, stop: int, settings: CacheSettings) -> int:
        """Of how many of the last queries of positions ``start .. stop`` the attention is wanted: of those at the end
        of the prompt and all after it, 0 unless the request ``may_observe``.
        """
        if not self.may_observe(request, settings):
            return 0
        return max(0, stop - max(start, len(request.prompt_ids) - OBSERVED_PROMPT_TOKENS))

    def observe(self, sequence: CacheSequence, mass: ObservedMass) -> bool:
        """Take what the executor saw of a sequence's attention; True when that now suffices to choose by."""
        was_trusted = all(scores.is_trusted for scores in sequence.scores)
        for scores, values in zip(sequence.scores, mass.groups, strict=True):
            scores.observe(values, mass.queries)
        return not was_trusted and all(scores.is_trusted for scores in sequence.scores)

    def evict(self, sequence: CacheSequence, request: Request, settings: CacheSettings) -> bool:
        """Drop what is not kept; True if the eviction setting dropped anything (the model's own window is no loss)."""
        for group, spec in enumerate(self._groups):
            if spec.window is not None:
                start, stop = outside_window(sequence.tables[group], sequence.committed, spec.window)
                self._remove(sequence, group, start, stop)
        if not settings.evicts or not sequence.allow_eviction or sequence.committed < len(request.prompt_ids):
            return False
        num_blocks, dropped_any = 0, False
        by_attention = settings.observes and any(scores.queries for scores in sequence.scores)
        request.evicted_chunks += [0] * (len(self._groups) - len(request.evicted_chunks))
        for group in range(len(self._groups)):
            dropped, blocks = self._drop(sequence, group, self._choose(sequence, group, settings))
            num_blocks += blocks
            dropped_any |= bool(dropped)
            sequence.dropped[group] |= dropped
            request.evicted_chunks[group] |= dropped
        if not dropped_any:
            return False
        sequence.is_evicted = True
        self._count(request, num_blocks, by_attention=by_attention)
        return True

    def _count(self, request: Request, num_blocks: int, *, by_attention: bool) -> None:
        """A token counts once, also when groups drop it at different times or again after a preemption."""
        before = request.num_evicted_tokens
        request.num_evicted_tokens = max(map(num_tokens, request.evicted_chunks))
        evicted = request.num_evicted_tokens - before
        self._counters.evicted_tokens += evicted
        self._counters.evicted_blocks += num_blocks
        self._counters.evicted_by_attention_tokens += evicted * by_attention
        stamp = self._clock.now_ns()
        self._events.emit(TokensEvicted(stamp, request.request_id, evicted, num_blocks, by_attention))

    def _choose(self, sequence: CacheSequence, group: int, settings: CacheSettings) -> int:
        """The chunks that a group of a sequence should drop now, as a mask; some may be gone already."""
        unit = self._recoders[group].targets.tile_tokens(sequence)
        keep, computed = settings.keep_tokens, sequence.committed
        scores = sequence.scores[group]
        if settings.eviction == "window" or not scores.queries:
            # Without any mass (an executor that only counts) the best guess is that the latest tokens matter.
            return window_eviction(computed, self._sinks, keep, unit)
        if computed - self._sinks < keep + CHUNK_TOKENS or not scores.is_trusted:
            return 0
        table, window = sequence.tables[group], self._groups[group].window
        seen = 0 if window is None else max(0, computed - window + 1) // CHUNK_TOKENS * CHUNK_TOKENS
        return heavy_hitter_eviction(
            table.kept_in(seen, table.capacity),
            computed,
            scores,
            sinks=self._sinks,
            keep_tokens=keep,
            recent_tokens=int(keep * RECENT_SHARE),
            unit=unit,
        )

    def _drop(self, sequence: CacheSequence, group: int, chunks: int) -> tuple[int, int]:
        """Drop chunks that are held: returns those that were, and how many blocks went."""
        if not chunks:
            return 0, 0
        table, recoder = sequence.tables[group], self._recoders[group]
        dropped, stop = 0, end_position(chunks)
        empty: list[int] = []
        index = max(0, table.index_from(first_position(chunks) + 1) - 1)
        while index < len(table.blocks) and table.blocks[index].first < stop:
            block, kept = table.blocks[index], table.kept(index)
            staying = whole_tiles(kept & ~chunks, block.block_class.format.tile_tokens) & kept
            gone = kept & ~staying
            if gone:
                dropped |= gone
                if gone == kept and index < len(table.blocks) - 1:
                    empty.append(index)
                else:
                    table.hide(index, gone, self._versions.next())
                    recoder.consider(block)
            index += 1
        for index in reversed(empty):
            self._remove(sequence, group, index, index + 1)
        return dropped, len(empty)

    def _remove(self, sequence: CacheSequence, group: int, start: int, stop: int) -> None:
        """Take blocks out of a table."""
        if stop <= start:
            return
        for block in sequence.tables[group].replace(start, stop, (), (), self._versions.next()):
            self._pools[group].drop(block, sequence.serial)
            if block.holders or block.nodes:
                self._recoders[group].consider(block)
