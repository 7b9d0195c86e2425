"""Gauges of the KV pool, computed from its books. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence, CacheSettings
from engine.chunks import chunk_mask, num_tokens
from engine.formats import OFFSET_UNIT, BlockClass
from engine.memory_model import GroupSpec, PoolLayout
from engine.pool_block import DEVICE
from engine.prefix_pins import PrefixPins
from engine.stats import ResidentBytes


@dataclass(frozen=True)
class CacheUsage:
    """Gauges of the whole pool. ``kv_usage``: share of what requests may use that they hold, worst group, 0 to 1.

    ``used_bytes``: blocks that requests hold or conversions occupy. ``cached_bytes``: those of prefixes that no request
    holds; ``pinned_bytes`` of them stay until their pins end.
    ``resident_tokens``: computed tokens of running sequences, shared ones counted for each, evicted ones too.
    ``evicted_tokens``: of these, those that eviction dropped, in the layer group that lost most. ``hidden_bytes``: held
    blocks' share that every holder has dropped, which waits to be split off.
    ``host_*``: the same of the host tier, where copies of blocks that are on the device too count as cached.
    """

    kv_usage: float
    pool_bytes: int
    used_bytes: int
    cached_bytes: int
    pinned_bytes: int
    resident_tokens: int
    held_below_format_bytes: int
    evicted_tokens: int
    hidden_bytes: int
    host_pool_bytes: int = 0
    host_used_bytes: int = 0
    host_cached_bytes: int = 0


def read_usage(
    pools: Sequence[BlockPool],
    layout: PoolLayout,
    sequences: Collection[CacheSequence],
    lossiness: int,
    pinned: Sequence[int],
) -> CacheUsage:
    """All of it; O(classes + sequences). ``lossiness``: that of the current format. ``pinned``: per group, bytes of
    blocks that only pins hold.
    """
    shares = [
        (pool.resident_bytes - pool.idle.num_bytes - kept) / ((layout.num_slabs - pool.reserve_slabs) * size)
        for pool, size, kept in zip(pools, layout.slab_bytes, pinned, strict=True)
    ]
    below = sum(
        count * pool.arena.block_bytes(block_class)
        for pool in pools
        for block_class, count in pool.class_counts.items()
        if block_class.lossiness > lossiness
    )
    cached = sum(pool.idle.num_bytes for pool in pools) + sum(pinned)
    hosts = [pool.host for pool in pools if pool.host is not None]
    host_cached = sum(host.idle.num_bytes for host in hosts)
    return CacheUsage(
        kv_usage=min(1.0, max(shares)),
        pool_bytes=layout.total_bytes,
        used_bytes=sum(pool.resident_bytes for pool in pools) - cached,
        cached_bytes=cached,
        pinned_bytes=sum(pinned),
        resident_tokens=sum(sequence.committed for sequence in sequences if not sequence.is_parked),
        held_below_format_bytes=below,
        evicted_tokens=sum(sequence.num_dropped_tokens for sequence in sequences if not sequence.is_parked),
        hidden_bytes=sum(_hidden_bytes(group, pool, sequences) for group, pool in enumerate(pools)),
        host_pool_bytes=sum(host.arena.num_slabs * host.arena.slab_units * OFFSET_UNIT for host in hosts),
        host_used_bytes=sum(host.resident_bytes for host in hosts) - host_cached,
        host_cached_bytes=host_cached,
    )


def _hidden_bytes(group: int, pool: BlockPool, sequences: Collection[CacheSequence]) -> int:
    """Of blocks on the device. A block that a pin or another sequence keeps whole loses nothing."""
    kept: dict[int, int] = {}
    for sequence in sequences:
        table = sequence.tables[group]
        for index, block in enumerate(table.blocks if table.hidden else ()):
            if block.tier == DEVICE and table.kept(index) != chunk_mask(block.first, table.stops[index]):
                kept[block.offset] = 0
    for sequence in sequences if kept else ():
        table = sequence.tables[group]
        for index, block in enumerate(table.blocks):
            if block.tier == DEVICE and block.offset in kept:
                kept[block.offset] |= table.kept(index)
    total = 0
    for offset, chunks in kept.items():
        block = pool.blocks[offset]
        if min(block.holders) >= 0:
            lost = block.filled - num_tokens(chunks & chunk_mask(block.first, block.first + block.filled))
            total += lost * pool.arena.block_bytes(block.block_class) // block.size
    return total


def read_resident(groups: Sequence[GroupSpec], pools: Sequence[BlockPool]) -> list[ResidentBytes]:
    """Allocated bytes by class, idle cached ones included, and tokens in them in whole chunks.

    Tokens are those of the first group that has the class, and of protected layers only where no others are: a token
    counts once, in the format that the model's quality depends on. O(classes).
    """
    found: dict[BlockClass, ResidentBytes] = {}
    is_mixed = not all(group.is_protected for group in groups)
    order = sorted(range(len(groups)), key=lambda index: groups[index].is_protected)
    for pool, counts in [(pools[index], not (is_mixed and groups[index].is_protected)) for index in order]:
        for block_class, count in pool.class_counts.items():
            tokens = pool.class_tokens.get(block_class, 0) if counts else 0
            row = found.setdefault(block_class, ResidentBytes(*block_class, bytes=0, tokens=tokens))
            row.bytes += count * pool.arena.block_bytes(block_class)
    return [found[block_class] for block_class in sorted(found, key=lambda c: (c.lossiness, c.block_size))]


def read_converged(pools: Sequence[BlockPool]) -> float:
    """Share of resident bytes that are in the class they should have, 1.0 when empty.

    Blocks that are young, unsealed, or whose neighbours never allow another class count as converged.
    """
    resident = sum(pool.resident_bytes for pool in pools)
    return 1.0 - sum(pool.stale.num_bytes for pool in pools) / resident if resident else 1.0


class ReadingsFace:
    """A part of :class:`engine.cache_manager.CacheManager`, whose books these are."""

    groups: tuple[GroupSpec, ...]
    layout: PoolLayout
    pins: PrefixPins
    _settings: CacheSettings
    _by_request: dict[str, CacheSequence]
    _pools: list[BlockPool]

    def usage(self) -> CacheUsage:
        """Gauges; O(classes + sequences + pinned blocks). Pins whose time is over end here, as in every step."""
        self.pins.expire()
        requests = self._by_request.values()
        return read_usage(self._pools, self.layout, requests, self._settings.lossiness, self.pins.idle_bytes())

    def resident(self) -> list[ResidentBytes]:
        """Allocated bytes and tokens by class; see :func:`read_resident`."""
        return read_resident(self.groups, self._pools)

    def converged_fraction(self) -> float:
        """Share of resident bytes that are in the class they should have, 1.0 when empty."""
        return read_converged(self._pools)
