"""How much the KV pool holds and how much of it can be had: bytes for executors, tokens for schedulers. No torch."""

from __future__ import annotations

from math import ceil

from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence, CacheSettings
from engine.formats import NATIVE_CLASSES, lossiness_of
from engine.host_tier import HostTier
from engine.memory_model import RESERVE_SLABS, GroupSpec, PoolLayout, token_bytes
from engine.recoder import Recoder
from engine.request import Request


class CapacityFace:
    """A part of :class:`engine.cache_manager.CacheManager`, whose books these are."""

    groups: tuple[GroupSpec, ...]
    layout: PoolLayout
    host_layout: PoolLayout | None
    stream_buffers: tuple[int, ...]
    watermark: float
    _settings: CacheSettings
    _epoch: int
    _by_request: dict[str, CacheSequence]
    _pools: list[BlockPool]
    _recoders: list[Recoder]
    _tier: HostTier | None

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
        block_class = NATIVE_CLASSES[self._settings.block_size]
        per_slab = min([pool.arena.per_slab(block_class) for pool in self._pools])
        return (self.layout.num_slabs - RESERVE_SLABS) * per_slab * block_class.block_size

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a lone sequence of ``num_tokens`` fits (see ``max_sequence_tokens``)."""
        return num_tokens <= self.max_sequence_tokens()

    def room_tokens(self) -> int:
        """Native tokens that can be allocated now above the watermark, idle cached blocks given up."""
        room = min(
            pool.room.available_tokens(recoder.targets.write_size())
            for pool, recoder in zip(self._pools, self._recoders, strict=True)
        )
        return room - self.watermark_tokens()

    def watermark_tokens(self) -> int:
        """Native tokens that admission leaves free."""
        return int(self.watermark * self.max_sequence_tokens())

    def missing_tokens(self, request: Request) -> int:
        """Known tokens of a request that have no slot yet, rounded up to whole blocks; and native tokens that would fit
        where what it has on the host will go.
        """
        sequence = self._by_request.get(request.request_id)
        missing = request.num_tokens - (sequence.capacity if sequence is not None else 0)
        if missing <= 0 and self._tier is None:
            return 0
        floor = lossiness_of(request.cache.kv_format_floor)
        block_size = max([recoder.targets.write_size(floor) for recoder in self._recoders])
        on_host = 0
        if self._tier is not None and sequence is not None and not sequence.streams:
            for group, table in enumerate(sequence.tables):
                num_bytes = self._tier.bytes_to_load(group, table.blocks)
                on_host = max(on_host, ceil(num_bytes / token_bytes(self.groups[group].shape)))
        return max(0, -(-missing // block_size)) * block_size + on_host

    @property
    def room_version(self) -> int:
        """Changes whenever room may have appeared; a failed allocation need not be tried again before."""
        return self._epoch + sum(pool.version for pool in self._pools)
