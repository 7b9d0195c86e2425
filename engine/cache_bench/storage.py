"""Where the bytes of a KV pool are: in tokens, or in what each way of cutting the pool wastes. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.cache_manager import CacheManager
from engine.formats import BlockClass
from engine.memory_model import token_bytes


@dataclass(frozen=True)
class StorageUse:
    """Bytes of a pool, all groups.

    ``tokens``: hold KV of computed tokens, with their scales. The rest of the slabs in use holds none: ``tails`` of
    blocks whose tokens are not all there (alignment of blocks to 256 bytes too), ``free_slots`` between blocks of a
    slab, ``slack`` at the ends of slabs that no whole block fits. ``free``: slabs that no class has.
    """

    pool: int
    tokens: int
    tails: int
    free_slots: int
    slack: int
    free: int

    @property
    def wasted(self) -> int:
        """Allocated bytes that hold no token."""
        return self.tails + self.free_slots + self.slack

    @property
    def wasted_pct(self) -> float:
        return 100 * self.wasted / self.pool


def storage_use(cache: CacheManager) -> StorageUse:
    """Count every byte of the pool. O(blocks); between steps only."""
    pools: list[BlockPool] = cache._pools  # noqa: SLF001 - an audit, as in cache_audit
    total = tokens = allocated = free_slots = slack = free = 0
    for group, pool in enumerate(pools):
        arena = pool.arena
        slab_bytes = cache.layout.slab_bytes[group]
        total += arena.num_slabs * slab_bytes
        for slab in range(arena.num_slabs):
            block_class = arena.slab_class(slab)
            if block_class is None:
                free += slab_bytes
                continue
            size, slots = arena.block_bytes(block_class), arena.per_slab(block_class)
            slack += slab_bytes - slots * size
            free_slots += (slots - arena.slab_used(slab)) * size
            allocated += arena.slab_used(slab) * size
        for block_class, count in _tokens_by_class(cache, group, pool).items():
            tokens += round(count * token_bytes(arena.shape, block_class.format))
    return StorageUse(total, tokens, allocated - tokens, free_slots, slack, free)


def _tokens_by_class(cache: CacheManager, group: int, pool: BlockPool) -> dict[BlockClass, int]:
    """Computed tokens in blocks: whole chunks of 16 that are committed, and what their writers have beyond."""
    held = {offset: block.filled for offset, block in pool.blocks.items()}
    for sequence in cache._sequences.values():  # noqa: SLF001
        table = sequence.tables[group]
        for block, stop in zip(table.blocks, table.stops, strict=True):
            inside = min(stop, sequence.committed) - block.first
            held[block.offset] = max(held[block.offset], inside)
    found: dict[BlockClass, int] = {}
    for offset, count in held.items():
        block_class = pool.blocks[offset].block_class
        found[block_class] = found.get(block_class, 0) + count
    return found
