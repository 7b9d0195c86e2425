"""Gauges of the KV pool, computed from its books. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence
from engine.formats import OFFSET_UNIT, BlockClass
from engine.memory_model import PoolLayout
from engine.stats import ResidentBytes


@dataclass(frozen=True)
class CacheUsage:
    """Gauges of the whole pool. ``kv_usage``: share of what requests may use that they hold, worst group, 0 to 1.

    ``used_bytes``: blocks that requests hold or conversions occupy. ``cached_bytes``: those of prefixes that no request
    holds; ``pinned_bytes`` of them stay until their pins end.
    ``resident_tokens``: computed tokens of running sequences, shared ones counted for each, evicted ones too.
    ``host_*``: the same of the host tier, where copies of blocks that are on the device too count as cached.
    """

    kv_usage: float
    pool_bytes: int
    used_bytes: int
    cached_bytes: int
    pinned_bytes: int
    resident_tokens: int
    held_below_format_bytes: int
    host_pool_bytes: int = 0
    host_used_bytes: int = 0
    host_cached_bytes: int = 0


def read_usage(
    pools: Sequence[BlockPool],
    layout: PoolLayout,
    sequences: Iterable[CacheSequence],
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
        host_pool_bytes=sum(host.arena.num_slabs * host.arena.slab_units * OFFSET_UNIT for host in hosts),
        host_used_bytes=sum(host.resident_bytes for host in hosts) - host_cached,
        host_cached_bytes=host_cached,
    )


def read_resident(pools: Sequence[BlockPool]) -> list[ResidentBytes]:
    """Allocated bytes by class, idle cached ones included, and tokens in them in whole chunks.

    Tokens are those of the first group that has the class: a token counts once. O(classes).
    """
    found: dict[BlockClass, ResidentBytes] = {}
    for pool in pools:
        for block_class, count in pool.class_counts.items():
            tokens = pool.class_tokens.get(block_class, 0)
            row = found.setdefault(block_class, ResidentBytes(*block_class, bytes=0, tokens=tokens))
            row.bytes += count * pool.arena.block_bytes(block_class)
    return [found[block_class] for block_class in sorted(found, key=lambda c: (c.lossiness, c.block_size))]


def read_converged(pools: Sequence[BlockPool]) -> float:
    """Share of resident bytes that are in the class they should have, 1.0 when empty.

    Blocks that are young, unsealed, or whose neighbours never allow another class count as converged.
    """
    resident = sum(pool.resident_bytes for pool in pools)
    return 1.0 - sum(pool.stale_bytes for pool in pools) / resident if resident else 1.0
