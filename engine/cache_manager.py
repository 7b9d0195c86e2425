"""The face of the paged KV cache: what scheduler, core and executor see. No torch, no bytes, only bookkeeping.

What counts as a prefix hit after a live switch: KV serves a request only if neither its stored format nor anything
that it was computed over is lossier than the current ``kv_format`` and the request's own floor. After native → int4 →
native, int4 blocks and native ones computed over int4 are no hits, so output equals a cold run's. After native → int8
a native block *is* a hit: it is at least as good as what a cold run computes, and it is converted like any other
resident block. Tokens generated after an eviction never enter the cache. Block sizes play no part.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

from engine.arena import Arena, IntegrityError
from engine.block_pool import BlockPool
from engine.block_table import BlockTable
from engine.cache_audit import check_group, check_sequences
from engine.cache_readings import CacheUsage, read_converged, read_resident, read_usage
from engine.cache_sequence import CacheSequence, CacheSettings
from engine.clock import Clock
from engine.events import BlocksRecoded, EventSink, PrefixBlocksDropped, RecodesCancelled
from engine.evictor import Evictor
from engine.formats import BLOCK_SIZES, CHUNK_TOKENS, NATIVE, BlockClass, lossiness_of
from engine.memory_model import GroupSpec, PoolLayout, pool_layout
from engine.plan import Entry, RecodeBatch
from engine.prefix_cache import PrefixCache
from engine.recode_unit import RecodeUnit
from engine.recoder import Recoder
from engine.request import Request
from engine.stats import Counters, ResidentBytes
from engine.tunables import TunableValues
from engine.versions import Versions

RESERVE_SLABS = 1
_NATIVE_CLASSES = {size: BlockClass(NATIVE.name, size) for size in BLOCK_SIZES}


class CacheManager:
    """Blocks of every sequence in every layer group, their prefix cache, eviction and recoding.

    Order of one step: ``match_prefix``/``allocate`` and ``plan_recodes`` while planning; the executor recodes, writes
    and attends with ``entries`` and ``slots`` as they are then; ``commit`` per sequence, ``finish_recodes`` after it.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        pool_bytes: int,
        values: TunableValues,
        *,
        recent_tokens: int,
        sinks: int,
        watermark: float,
        clock: Clock,
        events: EventSink,
        counters: Counters | None = None,
    ) -> None:
        """Raises ValueError for a pool that is too small, and for sinks or recent_tokens not a multiple of 16."""
        for name, tokens in (("recent_tokens", recent_tokens), ("sinks", sinks)):
            if tokens < 0 or tokens % CHUNK_TOKENS:
                raise ValueError(f"{name} must be a multiple of {CHUNK_TOKENS}, got {tokens}")
        if not 0.0 <= watermark < 1.0:
            raise ValueError(f"watermark is a share of the pool, 0 <= watermark < 1, got {watermark}")
        self.groups = tuple(groups)
        self.layout: PoolLayout = pool_layout(groups, pool_bytes)
        self.recent_tokens = recent_tokens
        self.sinks = sinks
        self.watermark = watermark
        self.counters = counters if counters is not None else Counters()
        self._clock = clock
        self._events = events
        self._settings = CacheSettings.parse(values)
        self._epoch = 0  # grows with every change of settings
        self._versions = Versions()
        self._next_serial = 1
        self._sequences: dict[int, CacheSequence] = {}
        self._by_request: dict[str, CacheSequence] = {}
        self._prefix = PrefixCache([group.window for group in groups])
        self._pools: list[BlockPool] = []
        self._recoders: list[Recoder] = []
        self._in_flight: dict[int, list[RecodeUnit]] = {}
        self._dropped_reported = [0] * len(self.groups)
        for index, group in enumerate(self.groups):
            arena = Arena(group.shape, self.layout.num_slabs, self.layout.slab_bytes[index])
            pool = BlockPool(arena, partial(self._prefix.forget, group=index), reserve_slabs=RESERVE_SLABS)
            self._pools.append(pool)
            self._recoders.append(
                Recoder(index, pool, self._prefix, self._sequences, self._settings, recent_tokens=recent_tokens)
            )
        self._evictor = Evictor(
            self.groups,
            self._pools,
            self._recoders,
            self._versions,
            sinks=sinks,
            clock=clock,
            events=events,
            counters=self.counters,
        )

    # -- capacity -------------------------------------------------------------------------------------------------

    def group_arena_bytes(self, group: int) -> int:
        """Bytes of a group's arena, for the executor."""
        return self.layout.arena_bytes(group)

    def max_sequence_tokens(self) -> int:
        """Longest sequence that can run alone, native, at the current block size, with the reserve kept."""
        block_class = BlockClass(NATIVE.name, self._settings.block_size)
        per_slab = min(pool.arena.per_slab(block_class) for pool in self._pools)
        return (self.layout.num_slabs - RESERVE_SLABS) * per_slab * block_class.block_size

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a lone sequence of ``num_tokens`` fits (see ``max_sequence_tokens``)."""
        return num_tokens <= self.max_sequence_tokens()

    def room_tokens(self) -> int:
        """Native tokens that can be allocated now above the watermark, idle cached blocks given up."""
        room = min(pool.available_tokens(self._settings.block_size) for pool in self._pools)
        return room - int(self.watermark * self.max_sequence_tokens())

    def missing_tokens(self, request: Request) -> int:
        """Known tokens of a request that have no slot yet, rounded up to whole blocks of the current size."""
        sequence = self._by_request.get(request.request_id)
        missing = request.num_tokens - (sequence.capacity if sequence is not None else 0)
        return max(0, -(-missing // self._settings.block_size)) * self._settings.block_size

    @property
    def room_version(self) -> int:
        """Changes whenever room may have appeared; a failed allocation need not be tried again before."""
        return self._epoch + sum(pool.version for pool in self._pools)

    # -- sequences ------------------------------------------------------------------------------------------------

    def holds(self, request: Request) -> bool:
        """Whether the request has blocks or a place in the prefix cache."""
        return request.request_id in self._by_request

    def match_prefix(self, request: Request) -> int:
        """Attach the longest usable cached prefix; returns its tokens (a multiple of 16, never the last known token).

        The caller sets ``num_computed_tokens`` and counts hits once, when admission succeeds; ``free`` undoes it.
        Requests that opt out or want prompt log-probabilities get 0.
        """
        if request.request_id in self._by_request:
            raise IntegrityError(f"request {request.request_id} already holds blocks")
        if not request.cache.use_prefix_cache or request.params.prompt_logprobs is not None:
            return 0
        floor = lossiness_of(request.cache.kv_format_floor)
        limit = min(self._settings.lossiness, floor)
        match = self._prefix.match(request.all_ids[: request.num_tokens - 1], request.cache.salt, limit)
        if not match.num_tokens:
            return 0
        sequence = self._create(request)
        for group, run in enumerate(match.runs):
            for block, stop in run:
                sequence.tables[group].append(block, stop, self._versions.next())
                self._pools[group].hold(block, sequence.serial)
        sequence.committed = sequence.end = sequence.capacity = sequence.chained = match.num_tokens
        sequence.lossiest = match.lossiness
        self._stand_on(sequence, match.node)
        return match.num_tokens

    def allocate(self, request: Request, num_new_tokens: int, *, use_reserve: bool = False) -> bool:
        """Slots for positions ``num_computed_tokens .. + num_new_tokens`` in every group.

        ``use_reserve``: for the only running sequence. It then always has room for what ``can_ever_fit`` allows, unless
        a change of settings has left its blocks in several native sizes.

        False when there is not enough room; then tables are as before (a few idle cached blocks may have gone).
        """
        sequence = self._by_request.get(request.request_id)
        end = request.num_computed_tokens + num_new_tokens
        if sequence is not None and end <= sequence.capacity:
            if end < sequence.end:
                self._trim(sequence, end)  # an earlier plan that asked for more was not run
            sequence.end = end
            return True
        start = [table.capacity for table in sequence.tables] if sequence is not None else [0] * len(self.groups)
        sizes: list[list[int]] = []
        keep_slabs = 0 if use_reserve else RESERVE_SLABS
        for pool, capacity in zip(self._pools, start, strict=True):
            planned = pool.plan_blocks(capacity, end, self._settings.block_size, keep_slabs=keep_slabs)
            if planned is None:
                return False
            sizes.append(planned)
        is_new = sequence is None
        sequence = sequence if sequence is not None else self._create(request)
        if not self._extend(sequence, sizes, keep_slabs):
            if is_new:
                self.free(request)
            return False
        sequence.end = end
        sequence.capacity = min(table.capacity for table in sequence.tables)
        return True

    def _extend(self, sequence: CacheSequence, sizes: Sequence[Sequence[int]], keep_slabs: int) -> bool:
        added: list[int] = []
        for group, (pool, table) in enumerate(zip(self._pools, sequence.tables, strict=True)):
            for size in sizes[group]:
                block = pool.take(_NATIVE_CLASSES[size], table.capacity, keep_slabs=keep_slabs)
                if block is None:
                    for undo in reversed(added):
                        self._pools[undo].drop(sequence.tables[undo].pop(self._versions.next()), sequence.serial)
                    return False
                pool.hold(block, sequence.serial)
                table.append(block, block.end, self._versions.next())
                added.append(group)
            self._report_dropped(group)
        return True

    def _trim(self, sequence: CacheSequence, end: int) -> None:
        """Give back blocks that lie wholly beyond ``end``: every entry has a valid token."""
        for pool, table in zip(self._pools, sequence.tables, strict=True):
            while table.blocks[-1].first >= end:
                pool.drop(table.pop(self._versions.next()), sequence.serial)
        sequence.capacity = min(table.capacity for table in sequence.tables)

    def free(self, request: Request) -> None:
        """Give back everything a request holds (idempotent). Cached blocks stay reusable until room is needed."""
        sequence = self._by_request.pop(request.request_id, None)
        if sequence is None:
            return
        del self._sequences[sequence.serial]
        self._stand_on(sequence, 0)
        for group, (pool, recoder) in enumerate(zip(self._pools, self._recoders, strict=True)):
            recoder.num_floored -= sequence.is_floored
            for block in reversed(sequence.tables[group].blocks):  # the end of a prefix is given up before its start
                pool.drop(block, sequence.serial)
                if block.holders or block.nodes:
                    recoder.consider(block)

    def commit(self, request: Request, num_computed: int) -> None:
        """The first ``num_computed`` tokens' KV is now written: seal, enter into the prefix cache, evict.

        Constant time unless a chunk of 16 or the prompt was completed or settings changed.
        """
        sequence = self._by_request[request.request_id]
        before = sequence.committed
        sequence.committed = num_computed
        same_chunk = num_computed // CHUNK_TOKENS == before // CHUNK_TOKENS
        if same_chunk and sequence.epoch == self._epoch and not before < len(request.prompt_ids) <= num_computed:
            return
        sequence.epoch = self._epoch
        self._fill(sequence, before)
        self._enter(sequence, request)
        if self._evictor.evict(sequence, request, self._settings):
            self._stand_on(sequence, 0)
        for recoder in self._recoders:
            recoder.advance(sequence)

    # -- runs of decode steps (engine.decode_run) -----------------------------------------------------------------

    def is_quiet(self) -> bool:
        """Whether commits do nothing but count: every block is native and of the size it should have, nothing is
        evicted and the model hides nothing. Holds until a block of another size is taken or settings change.
        """
        settings = self._settings
        if settings.kv_format != NATIVE.name or settings.eviction != "none":
            return False
        return all(
            len(pool.class_counts) == 1 and BlockClass(NATIVE.name, settings.block_size) in pool.class_counts
            for pool in self._pools
        ) and all(group.window is None for group in self.groups)

    def capacity(self, request: Request) -> int:
        """Tokens of a request that have slots in every group."""
        return self._by_request[request.request_id].capacity

    def note_computed(self, request: Request, num_computed: int, end: int) -> None:
        """``allocate`` and ``commit`` where they only count: the slots are there, and no chunk has been completed."""
        sequence = self._by_request[request.request_id]
        sequence.committed, sequence.end = num_computed, end

    def commit_run(self, request: Request, num_computed: int) -> None:
        """``commit`` after several steps for whose tokens slots were there."""
        sequence = self._by_request[request.request_id]
        sequence.end = max(sequence.end, num_computed)
        self.commit(request, num_computed)

    def drop_idle(self) -> None:
        """Give up all idle cached blocks."""
        for group, pool in enumerate(self._pools):
            pool.drop_all_idle()
            self._report_dropped(group)

    def _create(self, request: Request) -> CacheSequence:
        cache = request.cache
        tables = [BlockTable(self._versions.next()) for _ in self.groups]
        sequence = CacheSequence(
            self._next_serial,
            request.request_id,
            lossiness_of(cache.kv_format_floor),
            cache.allow_eviction,
            cache.use_prefix_cache,
            tables,
            epoch=self._epoch,
            frontier=[0] * len(self.groups),
        )
        self._next_serial += 1
        self._sequences[sequence.serial] = self._by_request[request.request_id] = sequence
        for recoder in self._recoders:
            recoder.num_floored += sequence.is_floored
        return sequence

    def _fill(self, sequence: CacheSequence, before: int) -> None:
        """Count the committed chunks into the blocks that hold them."""
        done = sequence.committed // CHUNK_TOKENS * CHUNK_TOKENS
        for pool, table in zip(self._pools, sequence.tables, strict=True):
            for index in range(len(table.blocks) - 1, -1, -1):
                block = table.blocks[index]
                if table.stops[index] <= before // CHUNK_TOKENS * CHUNK_TOKENS:
                    break
                filled = min(block.size, done - block.first)
                if filled > block.filled:
                    pool.fill(block, filled)

    def _enter(self, sequence: CacheSequence, request: Request) -> None:
        """Enter newly completed chunks into the prefix cache."""
        if not sequence.use_prefix_cache or sequence.is_evicted:
            return
        while sequence.chained + CHUNK_TOKENS <= sequence.committed:
            position = sequence.chained
            parent = sequence.node or self._prefix.root(request.cache.salt)
            node = self._prefix.child(parent, _ids(request, position, position + CHUNK_TOKENS))
            self._stand_on(sequence, node)
            sequence.chained += CHUNK_TOKENS
            for group, table in enumerate(sequence.tables):
                block = table.blocks[table.index_at(position)]
                displaced = self._prefix.put(node, group, block, position, sequence.lossiest)
                if displaced is not None:
                    self._pools[group].settle(displaced)

    def _stand_on(self, sequence: CacheSequence, node: int) -> None:
        old, sequence.node = sequence.node, node
        if node:
            self._prefix.retain(node)
        if old:
            self._prefix.release(old)

    def _report_dropped(self, group: int) -> None:
        dropped = self._pools[group].dropped_idle - self._dropped_reported[group]
        if dropped:
            self._dropped_reported[group] += dropped
            self._events.emit(PrefixBlocksDropped(self._clock.now_ns(), group, dropped))

    # -- what the executor reads ----------------------------------------------------------------------------------

    def table(self, request: Request, group: int) -> BlockTable:
        """A request's block table in one group, to read. Raises KeyError for a request that holds nothing."""
        return self._by_request[request.request_id].tables[group]

    def entries(self, request: Request, group: int, start: int = 0) -> Sequence[Entry]:
        """The block table from entry index ``start`` on, in position order, including this step's allocated tokens.

        Raises KeyError for a request that holds nothing.
        """
        sequence = self._by_request[request.request_id]
        return sequence.tables[group].entries(start, sequence.end)

    def num_entries(self, request: Request, group: int) -> int:
        """Length of the block table."""
        return len(self._by_request[request.request_id].tables[group].blocks)

    def entries_version(self, request: Request, group: int) -> int:
        """Version of a block table; grows with every change but the growth of the last entry's ``valid``.

        Never repeats within an engine's life, also not when a request is preempted and comes back.
        """
        return self._by_request[request.request_id].tables[group].version

    def first_changed_index(self, request: Request, group: int, since: int) -> int:
        """Lowest entry index that may differ from what a reader saw at version ``since`` (0: never seen).

        Incremental readers keep, per request and group, the version they saw, and each step
        ``start = min(first_changed_index(...), num_entries - 1)``, then rewrite their rows from ``start`` with
        ``entries(request, group, start)`` and cut to ``num_entries``. The last entry is always rewritten, because its
        ``valid`` grows without a new version. Equal to ``num_entries`` when nothing else changed.
        """
        return self._by_request[request.request_id].tables[group].first_changed(since)

    def slots(self, request: Request, start: int, num_tokens: int, group: int) -> list[tuple[int, int]]:
        """(block offset, token index in block) per token of positions ``start .. + num_tokens``, all allocated."""
        runs = self.slot_runs(request, start, num_tokens, group)
        return [(offset, first + i) for offset, first, count in runs for i in range(count)]

    def slot_runs(self, request: Request, start: int, num_tokens: int, group: int) -> list[tuple[int, int, int]]:
        """The same as runs: (block offset, first token index in block, number of tokens)."""
        return self._by_request[request.request_id].tables[group].slot_runs(start, num_tokens)

    # -- recoding -------------------------------------------------------------------------------------------------

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
            self._report_dropped(group)
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
                else:
                    cancelled += 1
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
            if units:
                self._events.emit(RecodesCancelled(self._clock.now_ns(), batch.group, len(units)))

    def apply(self, values: TunableValues) -> None:
        """New settings, at a step boundary. Raises ValueError (nothing changed) for a value that is not offered."""
        settings = CacheSettings.parse(values)
        old, self._settings = self._settings, settings
        if settings == old:
            return
        self._epoch += 1
        if (settings.kv_format, settings.block_size) != (old.kv_format, old.block_size):
            for recoder in self._recoders:
                recoder.rescan(settings)

    # -- readings -------------------------------------------------------------------------------------------------

    def usage(self) -> CacheUsage:
        """Gauges; O(classes + sequences)."""
        return read_usage(self._pools, self.layout, self._sequences.values(), self._settings.lossiness)

    def resident(self) -> list[ResidentBytes]:
        """Allocated bytes and tokens by class; see :func:`engine.cache_readings.read_resident`."""
        return read_resident(self._pools)

    def converged_fraction(self) -> float:
        """Share of resident bytes that are in the class they should have, 1.0 when empty."""
        return read_converged(self._pools)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every invariant holds. O(everything): for tests and audits."""
        sequences = list(self._sequences.values())
        for group, pool in enumerate(self._pools):
            check_group(group, pool, sequences, self._prefix, self._in_flight.get(group, []))
        check_sequences(self._sequences, self._by_request, self._prefix)

    # -- snapshots ------------------------------------------------------------------------------------------------

    def snapshot(self) -> Any:
        """A deep copy of all state. Clock, event sink and counters are shared, not copied."""
        return copy.deepcopy(self.__dict__, self._shared())

    def restore(self, snapshot: Any) -> None:
        """Back to a snapshot, which stays reusable."""
        self.__dict__.update(copy.deepcopy(snapshot, self._shared()))

    def _shared(self) -> dict[int, Any]:
        return {id(part): part for part in (self._clock, self._events, self.counters, self.groups)}


def _ids(request: Request, start: int, stop: int) -> list[int]:
    """Known tokens of positions start .. stop, without joining prompt and output."""
    prompt = len(request.prompt_ids)
    if stop <= prompt:
        return request.prompt_ids[start:stop]
    if start >= prompt:
        return request.output_ids[start - prompt : stop - prompt]
    return request.prompt_ids[start:] + request.output_ids[: stop - prompt]
