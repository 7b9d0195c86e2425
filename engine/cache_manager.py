"""The face of the paged KV cache: what scheduler, core and executor see. No torch, no bytes, only bookkeeping.

What counts as a prefix hit after a live switch: KV serves a request only if neither its stored format nor anything
that it was computed over is lossier than the current ``kv_format`` and the request's own floor. After native → int4 →
native, int4 blocks and native ones computed over int4 are no hits, so output equals a cold run's. After native → int8
a native block *is* a hit: it is at least as good as what a cold run computes, and it is converted like any other
resident block. Tokens generated after an eviction never enter the cache. Block sizes play no part.

What counts as a use of a cached chunk (``prefix_eviction``, reuse gaps): a request takes it up and computes its first
step, or computes it; once per request, however often it is preempted.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from math import ceil
from typing import Any

from engine.arena import Arena, IntegrityError
from engine.attention_mass import OBSERVED_PROMPT_TOKENS, ChunkScores, ObservedMass
from engine.block_lives import DISPLACED, BlockLives
from engine.block_pool import BlockPool
from engine.block_table import BlockTable, tile_units
from engine.cache_audit import check_group, check_sequences
from engine.cache_offload import OffloadFace
from engine.cache_readings import CacheUsage, read_converged, read_resident, read_usage
from engine.cache_sequence import CacheSequence, CacheSettings
from engine.cache_tables import TablesFace
from engine.clock import Clock
from engine.events import EventSink
from engine.evictor import Evictor
from engine.formats import BLOCK_SIZES, CHUNK_TOKENS, NATIVE, BlockClass, lossiness_of
from engine.host_tier import HostTier
from engine.memory_model import RESERVE_SLABS, GroupSpec, PoolLayout, host_layout, pool_layout, token_bytes
from engine.pool_block import DEVICE, HOST, Block
from engine.popularity import Popularity
from engine.prefix_cache import Match, PrefixCache
from engine.prefix_pins import DEFAULT_SHARE, PrefixPins
from engine.prefix_policy import DEFAULT_PARITY_TOKENS, make_policy
from engine.recode_unit import RecodeUnit
from engine.recoder import Recoder
from engine.request import Request
from engine.stats import Counters, ResidentBytes
from engine.stream_layout import stream_buffers
from engine.transfers import HostLink
from engine.tunables import TunableValues
from engine.versions import Versions

_NATIVE_CLASSES = {size: BlockClass(NATIVE.name, size) for size in BLOCK_SIZES}


class CacheManager(OffloadFace, TablesFace):
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
        self._pools: list[BlockPool] = []
        self._recoders: list[Recoder] = []
        self._in_flight: dict[int, list[RecodeUnit]] = {}
        self._dropped_reported = [0] * len(self.groups)
        for index, group in enumerate(self.groups):
            arena = Arena(group.shape, self.layout.num_slabs, self.layout.slab_bytes[index])
            forget, before = partial(self._prefix.forget, group=index), partial(self._prefix.before, group=index)
            host = None
            if self.host_layout is not None:
                host_arena = Arena(group.shape, self.host_layout.num_slabs, self.host_layout.slab_bytes[index])
                host = BlockPool(host_arena, forget, reserve_slabs=0, before=before, lives=self.lives, tier=HOST)
            pool = BlockPool(arena, forget, reserve_slabs=RESERVE_SLABS, before=before, lives=self.lives, host=host)
            self._pools.append(pool)
            self._recoders.append(
                Recoder(
                    index,
                    pool,
                    self._prefix,
                    self._sequences,
                    self._settings,
                    recent_tokens=recent_tokens,
                    lossiest=group.lossiest,
                )
            )
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
        self._tier: HostTier | None = None
        if self.host_layout is not None:
            self._tier = self._host_tier(link)
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

    def _host_tier(self, link: HostLink | None) -> HostTier:
        if link is None:
            raise ValueError("a host pool needs a link")
        tier = HostTier(
            self._pools,
            self._recoders,
            self._prefix,
            self._sequences,
            self._versions,
            link=link,
            buffers=self.stream_buffers,
            clock=self._clock,
            counters=self.counters,
        )
        for group, pool in enumerate(self._pools):
            pool.released = partial(tier.released, group)
            pool.demote = partial(tier.demote, group)
        tier.set_enabled(self._settings.host_offload)
        return tier

    def _check_offload(self, settings: CacheSettings) -> None:
        if settings.host_offload and self.host_layout is None:
            raise ValueError("host_offload: this engine has no host pool; start it with --host-pool-bytes")

    # -- capacity -------------------------------------------------------------------------------------------------

    def group_arena_bytes(self, group: int) -> int:
        """Bytes of a group's arena, for the executor: the slabs, and behind them the buffers for streaming."""
        return self.layout.arena_bytes(group) + 2 * self.stream_buffers[group]

    def stream_places(self) -> list[tuple[int, int]]:
        """Per group, where in its arena the two buffers for streaming begin, and the size of each."""
        return [(self.layout.arena_bytes(group), size) for group, size in enumerate(self.stream_buffers)]

    def group_host_bytes(self, group: int) -> int:
        """Bytes of a group's arena in host memory, for the executor; 0 without a host tier."""
        return self.host_layout.arena_bytes(group) if self.host_layout is not None else 0

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
        """Known tokens of a request that have no slot yet, rounded up to whole blocks of the current size; and native
        tokens that would fit where what it has on the host will go.
        """
        sequence = self._by_request.get(request.request_id)
        missing = request.num_tokens - (sequence.capacity if sequence is not None else 0)
        on_host = 0
        if self._tier is not None and sequence is not None and not sequence.streams:
            for group, table in enumerate(sequence.tables):
                num_bytes = self._tier.bytes_to_load(group, table.blocks)
                on_host = max(on_host, ceil(num_bytes / token_bytes(self.groups[group].shape)))
        return max(0, -(-missing // self._settings.block_size)) * self._settings.block_size + on_host

    @property
    def room_version(self) -> int:
        """Changes whenever room may have appeared; a failed allocation need not be tried again before."""
        return self._epoch + sum(pool.version for pool in self._pools)

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
        if self._may_observe(request):
            known = min(known, max(0, len(request.prompt_ids) - OBSERVED_PROMPT_TOKENS))
        ids = request.all_ids[:known]
        match = self._match(request, ids, max_tier=DEVICE) if on_device else self._near_match(request, ids)
        if not match.num_tokens:
            return 0
        sequence = self._create(request)
        for group, run in enumerate(match.runs):
            for block, stop in run:
                sequence.tables[group].append(block, stop, self._versions.next())
                self._pools[group].hold(block, sequence.serial)
        sequence.committed = sequence.end = sequence.capacity = sequence.chained = match.num_tokens
        sequence.lossiest = match.lossiness
        sequence.hit_tokens = match.num_tokens
        self._stand_on(sequence, match.node)
        return match.num_tokens

    def _match(self, request: Request, ids: Sequence[int], *, max_tier: int = HOST) -> Match:
        limit = min(self._settings.lossiness, lossiness_of(request.cache.kv_format_floor))
        return self._prefix.match(ids, request.cache.salt, limit, max_tier=max_tier)

    def _near_match(self, request: Request, ids: Sequence[int]) -> Match:
        """The longest usable prefix, without its part on the host where computing that again would be faster."""
        match = self._match(request, ids)
        if self._tier is None:
            return match
        num_bytes = sum(
            self._tier.bytes_to_load(group, (block for block, _ in run)) for group, run in enumerate(match.runs)
        )
        if not num_bytes:
            return match
        near = self._match(request, ids, max_tier=DEVICE)
        return match if self._tier.load_pays(num_bytes, match.num_tokens - near.num_tokens) else near

    def allocate(
        self, request: Request, num_new_tokens: int, *, use_reserve: bool = False, end_pins: bool = False
    ) -> bool:
        """Slots for positions ``num_computed_tokens .. + num_new_tokens`` in every group.

        ``use_reserve``: for the only running sequence. It then always has room for what ``can_ever_fit`` allows, unless
        a change of settings has left its blocks in several native sizes. ``end_pins``: pins give way, those that end
        soonest first, as they do with ``use_reserve``.

        False when there is not enough room; then tables are as before (a few idle cached blocks may have gone).
        """
        while not self._allocate(request, num_new_tokens, use_reserve=use_reserve):
            if not ((use_reserve or end_pins) and self.pins.give_way()):
                return False
        return True

    def _allocate(self, request: Request, num_new_tokens: int, *, use_reserve: bool) -> bool:
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
                block.holders[sequence.serial] = None  # fresh: there is no list to take it from
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
        if self._tier is not None:
            self._tier.stop_load(sequence, park=False)
        if not sequence.hit_tokens:  # it ran
            self.pins.renew(sequence.node)
        del self._sequences[sequence.serial]
        self._stand_on(sequence, 0)
        for group, (pool, recoder) in enumerate(zip(self._pools, self._recoders, strict=True)):
            recoder.num_floored -= sequence.is_floored
            for block in reversed(sequence.tables[group].blocks):  # the end of a prefix is given up before its start
                pool.drop(block, sequence.serial)
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

    def observed_queries(self, request: Request, start: int, stop: int) -> int:
        """How many of the last queries of positions ``start .. stop`` an executor should report the attention of.

        0 unless eviction goes by it and could ever reach the request; then the queries at the end of the prompt and
        all after it.
        """
        prompt = len(request.prompt_ids)
        if not self._may_observe(request):
            return 0
        return max(0, stop - max(start, prompt - OBSERVED_PROMPT_TOKENS))

    def _may_observe(self, request: Request) -> bool:
        most = len(request.prompt_ids) + request.params.max_tokens
        kept = self._settings.keep_tokens + self.sinks
        return self._settings.observes and request.cache.allow_eviction and most > kept

    def commit(self, request: Request, num_computed: int, mass: ObservedMass | None = None) -> None:
        """The first ``num_computed`` tokens' KV is now written: seal, enter into the prefix cache, evict.

        ``mass``: what the executor saw of the attention of ``observed_queries``; None when it saw nothing, and
        eviction by attention then falls back to the most recent tokens. Without it constant time unless a chunk of 16
        or the prompt was completed or settings changed.
        """
        sequence = self._by_request[request.request_id]
        can_choose = self._evictor.observe(sequence, mass)
        before = sequence.committed
        sequence.committed = num_computed
        if sequence.hit_tokens:
            self._count_hit(sequence, request)
        same_chunk = num_computed // CHUNK_TOKENS == before // CHUNK_TOKENS
        ends_prompt = before < len(request.prompt_ids) <= num_computed
        if same_chunk and sequence.epoch == self._epoch and not ends_prompt and not can_choose:
            return
        sequence.epoch = self._epoch
        self._fill(sequence, before)
        self._enter(sequence, request)
        if request.cache.prefix_ttl_s is not None and ends_prompt:
            self._pin(sequence, request)
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
            self._report_dropped(group)

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
            recoder.num_floored += sequence.is_floored
        return sequence

    def _fill(self, sequence: CacheSequence, before: int) -> None:
        """Count the committed chunks into the blocks that hold them."""
        done = sequence.committed // CHUNK_TOKENS * CHUNK_TOKENS
        for pool, recoder, table in zip(self._pools, self._recoders, sequence.tables, strict=True):
            for index in range(len(table.blocks) - 1, -1, -1):
                block = table.blocks[index]
                if table.stops[index] <= before // CHUNK_TOKENS * CHUNK_TOKENS:
                    break
                filled = min(block.size, done - block.first)
                if filled > block.filled:
                    pool.fill(block, filled)
                    if block.twin is not None:
                        pool.unlink(block)  # a copy of less than that is worth nothing
                if table.hidden and block.is_sealed:
                    recoder.consider(block)  # parts of it were dropped while it grew

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
            self._prefix.popularity.entered()
            if not request.num_preemptions:
                self._prefix.use(node)
            for group, table in enumerate(sequence.tables):
                block = table.blocks[table.index_at(position)]
                displaced = self._prefix.put(node, group, block, position, sequence.lossiest)
                if block.nodes:
                    self.lives.cached(block)
                if displaced is not None:
                    self._displace(group, displaced, block)

    def _displace(self, group: int, old: Block, new: Block) -> None:
        """A chunk's less lossy KV took the place of another's."""
        new.floor = max(new.floor, old.floor, old.priority)  # what follows the old one follows the new one now
        if not old.nodes:
            self.lives.gone(old, DISPLACED)
        self._pools[group].settle(old)

    def _count_hit(self, sequence: CacheSequence, request: Request) -> None:
        """The request has run with the prefix that it took up."""
        matched, sequence.hit_tokens = sequence.hit_tokens, 0
        if request.num_preemptions or not sequence.node:
            return
        for node in self._prefix.path_to(sequence.node):
            self._prefix.use(node)
        self.pins.renew(sequence.node)
        for table in sequence.tables:
            for block in table.blocks:
                if block.first >= matched:
                    break
                if block.nodes:
                    self.lives.reused(block)

    def _pin(self, sequence: CacheSequence, request: Request) -> None:
        """The prompt is complete: keep its whole chunks for a while, as a request that follows would find them."""
        if sequence.use_prefix_cache and request.cache.prefix_ttl_s is not None:
            match = self._match(request, request.prompt_ids)
            self.pins.pin(request.request_id, match, request.cache.prefix_ttl_s, sequence.max_lossiness)

    def _stand_on(self, sequence: CacheSequence, node: int) -> None:
        old, sequence.node = sequence.node, node
        if node:
            self._prefix.retain(node)
        if old:
            self._prefix.release(old)

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

    # -- readings -------------------------------------------------------------------------------------------------

    def usage(self) -> CacheUsage:
        """Gauges; O(classes + sequences + pinned blocks). Pins whose time is over end here, as in every step."""
        self.pins.expire()
        requests = self._by_request.values()
        return read_usage(self._pools, self.layout, requests, self._settings.lossiness, self.pins.idle_bytes())

    def resident(self) -> list[ResidentBytes]:
        """Allocated bytes and tokens by class; see :func:`engine.cache_readings.read_resident`."""
        return read_resident(self.groups, self._pools)

    def converged_fraction(self) -> float:
        """Share of resident bytes that are in the class they should have, 1.0 when empty."""
        return read_converged(self._pools)

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


def _ids(request: Request, start: int, stop: int) -> list[int]:
    """Known tokens of positions start .. stop, without joining prompt and output."""
    prompt = len(request.prompt_ids)
    if stop <= prompt:
        return request.prompt_ids[start:stop]
    if start >= prompt:
        return request.output_ids[start - prompt : stop - prompt]
    return request.prompt_ids[start:] + request.output_ids[: stop - prompt]
