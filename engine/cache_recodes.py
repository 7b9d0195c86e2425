"""Conversions of resident KV as scheduler and core see them: planned, run by an executor, then swapped in. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from engine.block_pool import BlockPool
from engine.clock import Clock
from engine.dropped_report import DroppedReport
from engine.events import BlocksRecoded, EventSink, RecodesCancelled
from engine.formats import BlockClass
from engine.host_tier import HostTier
from engine.plan import RecodeBatch
from engine.pool_block import Block
from engine.recode_unit import RecodeUnit
from engine.recoder import Recoder
from engine.stats import Counters
from engine.versions import Versions


class RecodesFace:
    """A part of :class:`engine.cache_manager.CacheManager`, whose books these are. All lists go by layer group."""

    counters: Counters
    _clock: Clock
    _events: EventSink
    _pools: list[BlockPool]
    _recoders: list[Recoder]
    _in_flight: dict[int, list[RecodeUnit]]
    _dropped: DroppedReport
    _tier: HostTier | None
    _versions: Versions

    def has_recode_work(self) -> bool:
        """Whether blocks wait for recoding and there may be room for it."""
        return any(recoder.has_work for recoder in self._recoders)

    def plan_recodes(self, budget_tokens: int, *, sync: bool = False, in_step: bool = False) -> tuple[RecodeBatch, ...]:
        """Conversions to run now, up to ``budget_tokens`` in each group (a token counts once in every group).

        ``sync``: all that are eligible, whatever the budget. ``in_step``: they run as part of a step, so new tokens are
        written between now and ``finish_recodes``; otherwise blocks that still grow may be moved as well. Nothing while
        earlier ones are neither finished nor cancelled. The sources stay in the tables, and readable, until then.
        """
        if self._in_flight:
            return ()
        batches: list[RecodeBatch] = []
        for group, recoder in enumerate(self._recoders):
            budget = None if sync else budget_tokens
            units = recoder.plan(budget, in_step=in_step) if sync or budget_tokens > 0 else []
            self._dropped.tell(group)
            if units:
                self._in_flight[group] = units
                jobs = tuple(job for unit in units for job in unit.jobs())
                batches.append(RecodeBatch(group, jobs, sum(unit.num_tokens for unit in units)))
        return tuple(batches)

    def finish_recodes(self, batches: Sequence[RecodeBatch]) -> None:
        """The executor has run these: swap them under all holders, and give the old storage back.

        Call after ``commit`` of the step that ran them. Units whose holders or settings have changed since planning
        so that the result is no longer wanted are dropped instead.
        """
        for batch in batches:
            recoder = self._recoders[batch.group]
            cancelled = 0
            done: dict[BlockClass, list[RecodeUnit]] = {}
            for unit in self._in_flight.pop(batch.group, []):
                if recoder.finish(unit, self._versions.next()):
                    done.setdefault(unit.targets[0].block_class, []).append(unit)
                    self._unpinned(batch.group, unit.targets)
                else:
                    cancelled += 1
                    self._unpinned(batch.group, unit.sources)
            for block_class, units in done.items():
                blocks, tokens = sum(len(u.sources) for u in units), sum(u.num_tokens for u in units)
                self.counters.recoded_blocks += blocks
                self.counters.recoded_tokens += tokens
                stamp = self._clock.now_ns()
                self._events.emit(BlocksRecoded(stamp, batch.group, *block_class, blocks, tokens))
            if cancelled:
                self._events.emit(RecodesCancelled(self._clock.now_ns(), batch.group, cancelled))

    def cancel_recodes(self, batches: Sequence[RecodeBatch]) -> None:
        """The executor did not run these: forget them."""
        for batch in batches:
            units = self._in_flight.pop(batch.group, [])
            for unit in units:
                self._recoders[batch.group].cancel(unit)
                self._unpinned(batch.group, unit.sources)
            if units:
                self._events.emit(RecodesCancelled(self._clock.now_ns(), batch.group, len(units)))

    def _unpinned(self, group: int, blocks: Sequence[Block]) -> None:
        """A conversion is over: what parked sequences hold may leave now."""
        if self._tier is not None:
            for block in blocks:
                self._tier.released(group, block)
