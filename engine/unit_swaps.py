"""Carries a conversion of blocks out on the books: room reserved, sources pinned, then swapped or given up. No torch.

Out of place: sources stay readable until the unit is swapped under all its holders and in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_

from engine.block_pool import BlockPool
from engine.block_table import BlockTable
from engine.cache_sequence import CacheSequence
from engine.chunks import chunk_mask
from engine.formats import BlockClass
from engine.partial_blocks import kept_chunks, named_chunks
from engine.pool_block import Block
from engine.prefix_cache import PrefixCache
from engine.recode_unit import RecodeUnit


class UnitSwaps:
    """Of one group. ``sequences`` (by serial) is shared with the manager."""

    def __init__(
        self, group: int, pool: BlockPool, prefix: PrefixCache, sequences: Mapping[int, CacheSequence]
    ) -> None:
        self._group = group
        self._pool = pool
        self._prefix = prefix
        self._sequences = sequences

    def tables(self, block: Block) -> list[BlockTable]:
        """Of a block's holders."""
        return [self._sequences[holder].tables[self._group] for holder in block.holders]

    def needed(self, sources: Sequence[Block]) -> int:
        """The chunks of blocks that anybody keeps or a cached prefix names."""
        return reduce(or_, (kept_chunks(source, self.tables(source)) | named_chunks(source) for source in sources))

    def start(
        self, sources: Sequence[Block], target: BlockClass, *, may_cut: bool, avoid_slab: int = -1
    ) -> RecodeUnit | None:
        """Reserve targets and pin the sources; None, with nothing changed, when there is no room.

        ``may_cut``: a fresh slab may be cut for the targets, the last one too.
        """
        pool = self._pool
        keep_slabs = 0 if may_cut else pool.arena.num_slabs
        for source in sources:
            source.in_recode = True
            pool.settle(source)
        targets: list[Block] = []
        needed = self.needed(sources) if target.block_size < sources[-1].end - sources[0].first else -1
        for first in range(sources[0].first, sources[-1].end, target.block_size):
            if not chunk_mask(first, first + target.block_size) & needed:
                continue  # dropped by all
            block = pool.take(target, first, keep_slabs=keep_slabs, avoid_slab=avoid_slab)
            if block is None:
                self._release(targets)
                self._release(sources)
                return None
            block.in_recode = True
            targets.append(block)
        growing = {holder for source in sources if not source.is_sealed for holder in source.holders}
        return RecodeUnit(tuple(sources), tuple(targets), tuple(map(self._mark, sorted(growing))))

    def _mark(self, serial: int) -> tuple[int, int, int]:
        return serial, self._sequences[serial].committed, self._sequences[serial].end

    def has_grown(self, unit: RecodeUnit) -> bool:
        """Whether a holder has written to a source since the unit was started."""
        return any(mark[0] in self._sequences and self._mark(mark[0]) != mark for mark in unit.marks)

    def swap(self, unit: RecodeUnit, version: int) -> None:
        """The targets take the sources' places."""
        for serial in list(unit.sources[0].holders):
            self._swap_under(self._sequences[serial], unit, version)
        stop = unit.sources[-1].first + unit.sources[-1].filled
        for target in unit.targets:
            self._pool.fill(target, max(0, min(target.size, stop - target.first)))
            self._pool.adopt_age(target, unit.sources)
        for source in unit.sources:
            self._prefix.move(source, unit.targets, self._group)
        if unit.is_move:
            self._pool.hand_on_twin(unit.sources[0], unit.targets[0])
        self.release(unit)

    def _swap_under(self, sequence: CacheSequence, unit: RecodeUnit, version: int) -> None:
        table = sequence.tables[self._group]
        start = index = table.index_from(unit.sources[0].first)
        for source in unit.sources:
            if index == len(table.blocks) or table.blocks[index] is not source:
                break
            del source.holders[sequence.serial]
            index += 1
        stop = table.stops[index - 1]
        kept = table.kept_in(unit.sources[0].first, stop)
        targets = [target for target in unit.targets if chunk_mask(target.first, target.end) & kept]
        table.replace(start, index, targets, [min(target.end, stop) for target in targets], version)
        for target in targets:
            target.holders[sequence.serial] = None
        sequence.lossiest = max(sequence.lossiest, targets[0].block_class.lossiness)

    def release(self, unit: RecodeUnit) -> None:
        """The unit is over: what nobody names goes back."""
        self._release(unit.targets)
        self._release(unit.sources)

    def _release(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.in_recode = False
            self._pool.settle(block)
