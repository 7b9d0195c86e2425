"""Slots for a sequence's tokens: native blocks in every layer group, or in none. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence
from engine.dropped_report import DroppedReport
from engine.formats import NATIVE_CLASSES
from engine.versions import Versions


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
        sizes: list[list[int]] = []
        for group, pool in enumerate(self._pools):
            start = sequence.tables[group].capacity if sequence is not None else 0
            planned = pool.room.plan_blocks(start, end, block_sizes[group], keep_slabs=keep_slabs)
            if planned is None:
                return None
            sizes.append(planned)
        return sizes

    def extend(self, sequence: CacheSequence, sizes: Sequence[Sequence[int]], *, keep_slabs: int) -> bool:
        """Take the planned blocks. False if that fails all the same; then the tables are as before."""
        added: list[tuple[int, int]] = []  # group, blocks
        for group, (pool, table) in enumerate(zip(self._pools, sequence.tables, strict=True)):
            for size, run in groupby(sizes[group]):
                number = len(list(run))
                blocks = pool.take_run(NATIVE_CLASSES[size], table.capacity, number, keep_slabs=keep_slabs)
                for block in blocks:
                    block.holders[sequence.serial] = None  # fresh: there is no list to take it from
                table.extend(blocks, self._versions.next())
                added.append((group, len(blocks)))
                if len(blocks) < number:
                    self._undo(sequence, added)
                    return False
            self._dropped.tell(group)
        _set_capacity(sequence)
        return True

    def _undo(self, sequence: CacheSequence, added: Sequence[tuple[int, int]]) -> None:
        for group, number in reversed(added):
            table, version = sequence.tables[group], self._versions.next()
            self._pools[group].drop_all([table.pop(version) for _ in range(number)], sequence.serial)

    def trim(self, sequence: CacheSequence, end: int) -> None:
        """Give back blocks that lie wholly beyond ``end``: every entry has a valid token."""
        for pool, table in zip(self._pools, sequence.tables, strict=True):
            while table.blocks[-1].first >= end:
                pool.drop(table.pop(self._versions.next()), sequence.serial)
        _set_capacity(sequence)


def _set_capacity(sequence: CacheSequence) -> None:
    sequence.capacity = min([table.capacity for table in sequence.tables])
