"""The face of the paged KV cache: what scheduler, core and executor see. No torch, no bytes, only bookkeeping.

What counts as a prefix hit after a live switch: KV serves a request only if neither its stored format nor anything
that it was computed over is lossier than the current ``kv_format`` and the request's own floor. After native → int4 →
native, int4 blocks and native ones computed over int4 are no hits, so output equals a cold run's. After native → int8
a native block *is* a hit: it is at least as good as what a cold run computes, and it is converted like any other
resident block. Tokens generated after an eviction never enter the cache. Block sizes play no part.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import Any

from engine.arena import IntegrityError
from engine.attention_mass import OBSERVED_PROMPT_TOKENS, ChunkScores, ObservedMass
from engine.block_lives import BlockLives
from engine.block_table import BlockTable, tile_units
from engine.cache_audit import check_group, check_sequences
from engine.cache_capacity import CapacityFace
from engine.cache_offload import OffloadFace
from engine.cache_pools import build_pools, build_recoders
from engine.cache_readings import ReadingsFace
from engine.cache_runs import RunsFace
from engine.cache_sequence import CacheSequence, CacheSettings
from engine.cache_tables import TablesFace
from engine.clock import Clock
from engine.dropped_report import DroppedReport
from engine.events import EventSink
from engine.evictor import Evictor
from engine.formats import CHUNK_TOKENS, lossiness_of
from engine.host_tier import HostTier
from engine.memory_model import RESERVE_SLABS, GroupSpec, PoolLayout, host_layout, pool_layout
from engine.popularity import Popularity
from engine.prefix_cache import PrefixCache
from engine.prefix_pins import DEFAULT_SHARE, PrefixPins
from engine.prefix_policy import DEFAULT_PARITY_TOKENS, make_policy
from engine.prefix_uses import PrefixUses
from engine.recode_unit import RecodeUnit
from engine.request import Request
from engine.slot_allocator import SlotAllocator
from engine.stats import Counters
from engine.stream_layout import stream_buffers
from engine.transfers import HostLink
from engine.tunables import TunableValues
from engine.versions import Versions


class CacheManager(OffloadFace, RunsFace, CapacityFace, TablesFace, ReadingsFace):
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
        pin_share: float = DEFAULT_SHARE,
        parity_tokens: int = DEFAULT_PARITY_TOKENS,
        host_pool_bytes: int = 0,
        link: HostLink | None = None,
        staging_bytes: int = 0,
    ) -> None:
        """``pin_share``: most of the pool that pinned prefixes may hold. ``parity_tokens``: see prefix_policy.Cost.
        ``host_pool_bytes`` of memory behind ``link`` make a host tier; 0: there is none. Through ``staging_bytes`` of
        the device's memory, beside the pool, blocks are streamed from there; 0: none are.

        Raises ValueError for a pool that is too small, and for sinks or recent_tokens not a multiple of 16.
        """
        for name, tokens in (("recent_tokens", recent_tokens), ("sinks", sinks)):
            if tokens < 0 or tokens % CHUNK_TOKENS:
                raise ValueError(f"{name} must be a multiple of {CHUNK_TOKENS}, got {tokens}")
        if not 0.0 <= watermark < 1.0:
            raise ValueError(f"watermark is a share of the pool, 0 <= watermark < 1, got {watermark}")
        if not 0.0 <= pin_share <= 1.0:
            raise ValueError(f"pin_share is a share of the pool, 0 <= pin_share <= 1, got {pin_share}")
        if host_pool_bytes and link is None:
            raise ValueError("a host pool needs a link")
        self.groups = tuple(groups)
        self.layout: PoolLayout = pool_layout(groups, pool_bytes)
        self.recent_tokens = recent_tokens
        self.sinks = sinks
        self.watermark = watermark
        self.counters = counters if counters is not None else Counters()
        self._clock = clock
        self._events = events
        self._settings = CacheSettings.parse(values)
        self.host_layout = host_layout(self.layout, host_pool_bytes) if host_pool_bytes else None
        self.stream_buffers = stream_buffers(self.layout.slab_bytes, staging_bytes)
        self.link = link
        self._check_offload(self._settings)
        self._epoch = 0  # grows with every change of settings
        self._versions = Versions()
        self._next_serial = 1
        self._sequences: dict[int, CacheSequence] = {}
        self._by_request: dict[str, CacheSequence] = {}
        self.lives = BlockLives(clock)
        self._parity_tokens = parity_tokens
        popularity = Popularity(self.layout.num_slabs * self.layout.slab_tokens // CHUNK_TOKENS)
        self._prefix = PrefixCache([group.window for group in groups], popularity)
        self._pools = build_pools(self.groups, self.layout, self.host_layout, self._prefix, self.lives)
        self._recoders = build_recoders(
            self.groups, self._pools, self._prefix, self._sequences, self._settings, recent_tokens
        )
        self._in_flight: dict[int, list[RecodeUnit]] = {}
        self._dropped = DroppedReport(self._pools, clock=clock, events=events)
        self._slots = SlotAllocator(self._pools, self._versions, self._dropped)
        self._use_prefix_policy()
        self.pins = PrefixPins(
            self._prefix,
            self._pools,
            self._recoders,
            self._sequences,
            self._versions,
            max_bytes=int(pin_share * self.layout.total_bytes),
            clock=clock,
            counters=self.counters,
        )
        self._tile_units = [tile_units(group.shape) for group in self.groups]
        self._tier = None
        if link is not None and self.host_layout is not None:
            self._tier = HostTier(
                self._pools,
                self._recoders,
                self._prefix,
                self._sequences,
                self._versions,
                link=link,
                buffers=self.stream_buffers,
                clock=clock,
                counters=self.counters,
            )
            self._tier.set_enabled(self._settings.host_offload)
        self._uses = PrefixUses(
            self._prefix, self._pools, self.pins, self._tier, lives=self.lives, versions=self._versions
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

    def _check_offload(self, settings: CacheSettings) -> None:
        if settings.host_offload and self.host_layout is None:
            raise ValueError("host_offload: this engine has no host pool; start it with --host-pool-bytes")

    # -- sequences ------------------------------------------------------------------------------------------------

    def holds(self, request: Request) -> bool:
        """Whether the request has blocks or a place in the prefix cache."""
        return request.request_id in self._by_request

    def match_prefix(self, request: Request, *, on_device: bool = False) -> int:
        """Attach the longest usable cached prefix; returns its tokens (a multiple of 16, never the last known token).
        ``on_device``: without what is on the host.

        The caller sets ``num_computed_tokens`` and counts hits once, when admission succeeds; ``free`` undoes it.
        Requests that opt out or want prompt log-probabilities get 0. Where eviction goes by attention, the prompt's
        last tokens are always computed: what they attend decides what stays.
        """
        if request.request_id in self._by_request:
            raise IntegrityError(f"request {request.request_id} already holds blocks")
        if not request.cache.use_prefix_cache or request.params.prompt_logprobs is not None:
            return 0
        known = request.num_tokens - 1
        if self._evictor.may_observe(request, self._settings):
            known = min(known, max(0, len(request.prompt_ids) - OBSERVED_PROMPT_TOKENS))
        ids = request.all_ids[:known]
        salt, lossiness = request.cache.salt, self._hit_lossiness(request)
        find = partial(self._uses.match, on_device=True) if on_device else self._uses.best_match
        match = find(ids, salt, lossiness)
        if match.num_tokens:
            self._uses.take_up(self._create(request), match)
        return match.num_tokens

    def _hit_lossiness(self, request: Request) -> int:
        """The lossiest that cached KV may be for a request."""
        return min(self._settings.lossiness, lossiness_of(request.cache.kv_format_floor))

    def allocate(
        self, request: Request, num_new_tokens: int, *, use_reserve: bool = False, end_pins: bool = False
    ) -> bool:
        """Slots for positions ``num_computed_tokens .. + num_new_tokens`` in every group.

        ``use_reserve``: for the only running sequence. It then always has room for what ``can_ever_fit`` allows, unless
        a change of settings has left its blocks in several native sizes. ``end_pins``: pins give way, those that end
        soonest first, as they do with ``use_reserve``.

        False when there is not enough room; then tables are as before (a few idle cached blocks may have gone).
        """
        sequence, end = self._by_request.get(request.request_id), request.num_computed_tokens + num_new_tokens
        if sequence is not None and end <= sequence.capacity:
            if end < sequence.end:
                self._slots.trim(sequence, end)  # an earlier plan that asked for more was not run
            sequence.end = end
            return True
        while not self._grow(request, sequence, end, use_reserve=use_reserve):
            if not ((use_reserve or end_pins) and self.pins.give_way()):
                return False
        return True

    def _grow(self, request: Request, sequence: CacheSequence | None, end: int, *, use_reserve: bool) -> bool:
        """Blocks up to a position for a sequence; None: a new one."""
        keep_slabs = 0 if use_reserve else RESERVE_SLABS
        floor = lossiness_of(request.cache.kv_format_floor)
        write_sizes = [recoder.targets.write_size(floor) for recoder in self._recoders]
        sizes = self._slots.plan(sequence, end, write_sizes, keep_slabs=keep_slabs)
        if sizes is None:
            return False
        is_new = sequence is None
        sequence = sequence if sequence is not None else self._create(request)
        if not self._slots.extend(sequence, sizes, keep_slabs=keep_slabs):
            if is_new:
                self.free(request)
            return False
        sequence.end = end
        return True

    def free(self, request: Request) -> None:
        """Give back everything a request holds (idempotent). Cached blocks stay reusable until room is needed."""
        sequence = self._by_request.pop(request.request_id, None)
        if sequence is None:
            return
        if self._tier is not None:
            self._tier.stop_load(sequence, park=False)
        self._uses.let_go(sequence)
        del self._sequences[sequence.serial]
        for group, (pool, recoder) in enumerate(zip(self._pools, self._recoders, strict=True)):
            recoder.targets.num_floored -= sequence.is_floored
            blocks = sequence.tables[group].blocks[::-1]  # the end of a prefix is given up before its start
            pool.drop_all(blocks, sequence.serial)
            for block in blocks:
                if block.holders or block.nodes:
                    recoder.consider(block)

    @property
    def eviction(self) -> str:
        """How tokens are evicted from now on: the ``eviction`` knob in force."""
        return self._settings.eviction

    @property
    def observes(self) -> bool:
        """Whether an executor should report attention at all."""
        return self._settings.observes

    def may_observe(self, request: Request) -> bool:
        """Whether some step of the request may have to report attention, as things are set."""
        return self._evictor.may_observe(request, self._settings)

    def observed_queries(self, request: Request, start: int, stop: int) -> int:
        """How many of the last queries of positions ``start .. stop`` an executor should report the attention of."""
        return self._evictor.observed_queries(request, start, stop, self._settings)

    def commit(self, request: Request, num_computed: int, mass: ObservedMass | None = None) -> None:
        """The first ``num_computed`` tokens' KV is now written: seal, enter into the prefix cache, evict.

        ``mass``: what the executor saw of the attention of ``observed_queries``; None when it saw nothing, and
        eviction by attention then falls back to the most recent tokens. Without it constant time unless a chunk of 16
        or the prompt was completed or settings changed.
        """
        sequence = self._by_request[request.request_id]
        can_choose = mass is not None and self._evictor.observe(sequence, mass)
        before = sequence.committed
        sequence.committed = num_computed
        if sequence.hit_tokens:
            self._uses.count_hit(sequence, request)
        ends_prompt = before < len(request.prompt_ids) <= num_computed
        same_chunk = num_computed // CHUNK_TOKENS == before // CHUNK_TOKENS
        if same_chunk and sequence.epoch == self._epoch and not ends_prompt and not can_choose:
            return
        sequence.epoch = self._epoch
        self._fill(sequence, before)
        self._uses.enter(sequence, request)
        if request.cache.prefix_ttl_s is not None and ends_prompt:
            self._uses.pin(sequence, request, self._hit_lossiness(request))
        if self._evictor.evict(sequence, request, self._settings):
            self._uses.stand_on(sequence, 0)
        for recoder in self._recoders:
            recoder.advance(sequence)

    def drop_idle(self, *, host: bool = False) -> None:
        """Give up all cached blocks on the device that no request holds, pinned ones too: for one that has no room even
        alone. What has a copy on the host stays cached there, unless ``host``.
        """
        while self.pins.give_way():
            pass
        for group, pool in enumerate(self._pools):
            pool.drop_all_idle()
            if host and pool.host is not None:
                pool.host.drop_all_idle()
            self._dropped.tell(group)

    def _create(self, request: Request) -> CacheSequence:
        cache = request.cache
        tables = [BlockTable(self._versions.next(), units) for units in self._tile_units]
        sequence = CacheSequence(
            self._next_serial,
            request.request_id,
            lossiness_of(cache.kv_format_floor),
            cache.allow_eviction,
            cache.use_prefix_cache,
            tables,
            epoch=self._epoch,
            frontier=[0] * len(self.groups),
            scores=[ChunkScores() for _ in self.groups],
            dropped=[0] * len(self.groups),
        )
        self._next_serial += 1
        self._sequences[sequence.serial] = self._by_request[request.request_id] = sequence
        for recoder in self._recoders:
            recoder.targets.num_floored += sequence.is_floored
        return sequence

    def _fill(self, sequence: CacheSequence, before: int) -> None:
        """Count the committed chunks into the blocks that hold them."""
        done = sequence.committed // CHUNK_TOKENS * CHUNK_TOKENS
        start = before // CHUNK_TOKENS * CHUNK_TOKENS
        for pool, recoder, table in zip(self._pools, self._recoders, sequence.tables, strict=True):
            blocks = table.blocks[bisect_right(table.stops, start) :]
            pool.fill_to(blocks, done)
            if table.hidden:
                for block in reversed(blocks):
                    if block.is_sealed:
                        recoder.consider(block)  # parts of it were dropped while it grew

    # -- settings -------------------------------------------------------------------------------------------------

    def apply(self, values: TunableValues) -> None:
        """New settings, at a step boundary. Raises ValueError (nothing changed) for a value that is not offered."""
        settings = CacheSettings.parse(values)
        self._check_offload(settings)
        old, self._settings = self._settings, settings
        if settings == old:
            return
        if self._tier is not None and settings.host_offload != old.host_offload:
            self._tier.set_enabled(settings.host_offload)
            self._dropped.tell_all()
        self._epoch += 1
        if settings.prefix_eviction != old.prefix_eviction:
            self._use_prefix_policy()
        if (settings.kv_format, settings.block_size) != (old.kv_format, old.block_size):
            for recoder in self._recoders:
                recoder.rescan(settings)

    def _use_prefix_policy(self) -> None:
        for group, pool in zip(self.groups, self._pools, strict=True):
            name = self._settings.prefix_eviction
            pool.use_policy(make_policy(name, self._prefix, pool.arena, group.window, self._parity_tokens))

    # -- audits --------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every invariant holds. O(everything): for tests and audits."""
        sequences = list(self._sequences.values())
        for group, pool in enumerate(self._pools):
            pinned = self._tier.pinned(group) if self._tier is not None else set()
            units = self._in_flight.get(group, [])
            check_group(group, self.groups[group], pool, sequences, self._prefix, units, pinned)
        if self._tier is not None:
            self._tier.check_integrity()
        check_sequences(self._sequences, self._by_request, self._prefix)

    # -- snapshots ------------------------------------------------------------------------------------------------

    def snapshot(self) -> Any:
        """A deep copy of all state. Clock, event sink, counters and histograms are shared, not copied."""
        return copy.deepcopy(self.__dict__, self._shared())

    def restore(self, snapshot: Any) -> None:
        """Back to a snapshot, which stays reusable."""
        self.__dict__.update(copy.deepcopy(snapshot, self._shared()))

    def _shared(self) -> dict[int, Any]:
        return {id(part): part for part in (self._clock, self._events, self.counters, self.lives, self.groups)}
