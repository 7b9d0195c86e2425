"""Slots for a sequence's tokens: native blocks in every layer group, or in none. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence
from engine.dropped_report import DroppedReport
from engine.formats import BLOCK_SIZES, NATIVE, BlockClass
from engine.versions import Versions

_NATIVE_CLASSES = {size: BlockClass(NATIVE.name, size) for size in BLOCK_SIZES}


class SlotAllocator:
    """Grows and cuts sequences' tables. All lists go by layer group."""

    def __init__(self, pools: Sequence[BlockPool], versions: Versions, dropped: DroppedReport) -> None:
        self._pools = pools
        self._versions = versions
        self._dropped = dropped

    def plan(
        self, sequence: CacheSequence | None, end: int, block_sizes: Sequence[int], *, keep_slabs: int
    ) -> list[list[int]] | None:
        """Sizes of the blocks that a sequence (None: a new one) needs up to ``end``, at most the group's in
        ``block_sizes``; None where there is no room.
        """
        start = [table.capacity for table in sequence.tables] if sequence is not None else [0] * len(self._pools)
        sizes: list[list[int]] = []
        for pool, capacity, block_size in zip(self._pools, start, block_sizes, strict=True):
            planned = pool.plan_blocks(capacity, end, block_size, keep_slabs=keep_slabs)
            if planned is None:
                return None
            sizes.append(planned)
        return sizes

    def extend(self, sequence: CacheSequence, sizes: Sequence[Sequence[int]], *, keep_slabs: int) -> bool:
        """Take the planned blocks. False if that fails all the same; then the tables are as before."""
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
            self._dropped.tell(group)
        sequence.capacity = min(table.capacity for table in sequence.tables)
        return True

    def trim(self, sequence: CacheSequence, end: int) -> None:
        """Give back blocks that lie wholly beyond ``end``: every entry has a valid token."""
        for pool, table in zip(self._pools, sequence.tables, strict=True):
            while table.blocks[-1].first >= end:
                pool.drop(table.pop(self._versions.next()), sequence.serial)
        sequence.capacity = min(table.capacity for table in sequence.tables)
