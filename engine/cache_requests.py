"""What becomes of the KV of one request: matched, allocated, committed, freed. No torch."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial

from engine.arena import IntegrityError
from engine.attention_mass import OBSERVED_PROMPT_TOKENS, ChunkScores, ObservedMass
from engine.block_pool import BlockPool
from engine.block_table import BlockTable
from engine.cache_sequence import CacheSequence, CacheSettings
from engine.dropped_report import DroppedReport
from engine.evictor import Evictor
from engine.formats import CHUNK_TOKENS, lossiness_of
from engine.host_tier import HostTier
from engine.memory_model import RESERVE_SLABS, GroupSpec
from engine.prefix_pins import PrefixPins
from engine.prefix_uses import PrefixUses
from engine.recoder import Recoder
from engine.request import Request
from engine.slot_allocator import SlotAllocator
from engine.versions import Versions


class RequestsFace:
    """A part of :class:`engine.cache_manager.CacheManager`, whose books these are."""

    groups: tuple[GroupSpec, ...]
    pins: PrefixPins
    _settings: CacheSettings
    _epoch: int
    _versions: Versions
    _next_serial: int
    _sequences: dict[int, CacheSequence]
    _by_request: dict[str, CacheSequence]
    _pools: list[BlockPool]
    _recoders: list[Recoder]
    _tile_units: list[dict[str, int]]
    _tier: HostTier | None
    _uses: PrefixUses
    _evictor: Evictor
    _slots: SlotAllocator
    _dropped: DroppedReport

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

    def take_slot(self, request: Request) -> bool:
        """``allocate`` of one token whose slot is there already; False, with nothing done, where it is not."""
        sequence, end = self._by_request.get(request.request_id), request.num_computed_tokens + 1
        if sequence is None or not sequence.end <= end <= sequence.capacity:
            return False
        sequence.end = end
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
            recoder.consider_left(blocks)

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
