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
from typing import Any

from engine.block_lives import BlockLives
from engine.block_table import tile_units
from engine.cache_audit import check_group, check_sequences
from engine.cache_capacity import CapacityFace
from engine.cache_offload import OffloadFace
from engine.cache_pools import build_pools, build_recoders
from engine.cache_readings import ReadingsFace
from engine.cache_requests import RequestsFace
from engine.cache_runs import RunsFace
from engine.cache_sequence import CacheSequence, CacheSettings
from engine.cache_tables import TablesFace
from engine.clock import Clock
from engine.dropped_report import DroppedReport
from engine.events import EventSink
from engine.evictor import Evictor
from engine.formats import CHUNK_TOKENS
from engine.host_tier import HostTier
from engine.memory_model import GroupSpec, PoolLayout, host_layout, pool_layout
from engine.popularity import Popularity
from engine.prefix_cache import PrefixCache
from engine.prefix_pins import DEFAULT_SHARE, PrefixPins
from engine.prefix_policy import DEFAULT_PARITY_TOKENS, make_policy
from engine.prefix_uses import PrefixUses
from engine.recode_unit import RecodeUnit
from engine.slot_allocator import SlotAllocator
from engine.stats import Counters
from engine.stream_layout import stream_buffers
from engine.transfers import HostLink
from engine.tunables import TunableValues
from engine.versions import Versions


class CacheManager(RequestsFace, OffloadFace, RunsFace, CapacityFace, TablesFace, ReadingsFace):
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
