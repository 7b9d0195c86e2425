"""How many blocks of a pool are idle, by slab and by class, and which slabs hold no others. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from engine.arena import Arena
from engine.formats import OFFSET_UNIT, BlockClass
from engine.pool_block import Block


class IdleCounts(ABC):
    """A part of :class:`engine.idle_blocks.IdleBlocks`: the blocks themselves and their number.

    A *whole* slab is one in which every used block is idle: giving those up empties it.
    """

    def __init__(self, arena: Arena) -> None:
        self.blocks: dict[int, Block] = {}  # by offset
        self.num_bytes = 0
        self._arena = arena
        self._by_slab = [0] * arena.num_slabs
        self._by_class: dict[BlockClass, int] = {}
        self._whole: dict[int, tuple[BlockClass, int]] = {}  # slab -> its class, its idle blocks
        self._whole_blocks: dict[BlockClass, int] = {}
        self._whole_slabs: dict[BlockClass, int] = {}

    def __contains__(self, block: Block) -> bool:
        return self.blocks.get(block.offset) is block

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(list(self.blocks.values()))

    def num_of(self, block_class: BlockClass) -> int:
        """Idle blocks of a class."""
        return self._by_class.get(block_class, 0)

    def num_in(self, slab: int) -> int:
        """Idle blocks in a slab."""
        return self._by_slab[slab]

    @property
    def num_whole_slabs(self) -> int:
        """Slabs that giving up idle blocks alone would empty."""
        return len(self._whole)

    def num_whole_slabs_of(self, block_class: BlockClass) -> int:
        """Whole slabs of a class."""
        return self._whole_slabs.get(block_class, 0)

    def num_outside_whole_slabs(self, block_class: BlockClass) -> int:
        """Idle blocks of a class in slabs that hold other blocks too."""
        return self.num_of(block_class) - self._whole_blocks.get(block_class, 0)

    def _blocks_in(self, slab: int) -> Iterator[Block]:
        block_class = self._arena.slab_class(slab)
        if block_class is None:
            return
        units = self._arena.block_bytes(block_class) // OFFSET_UNIT
        start = slab * self._arena.slab_units
        for slot in range(self._arena.per_slab(block_class)):
            block = self.blocks.get(start + slot * units)
            if block is not None:
                yield block

    # -- counting -------------------------------------------------------------------------------------------------

    def slab_changed(self, slab: int) -> None:
        """A block of a slab was allocated or freed."""
        if self._by_slab[slab] or slab in self._whole:
            self._recount(slab)

    def _count_in(self, block: Block) -> None:
        arena, kind = self._arena, block.block_class
        slab = block.offset // arena.slab_units
        self.blocks[block.offset] = block
        idle = self._by_slab[slab] = self._by_slab[slab] + 1
        self._by_class[kind] = self._by_class.get(kind, 0) + 1
        self.num_bytes += arena.block_bytes(kind)
        if idle == arena.slab_used(slab):  # it was held until now, so the slab was not whole before
            self._recount(slab)

    def _count_out(self, block: Block) -> None:
        """For a block that still has its slot: its slab is not whole without it."""
        arena, kind = self._arena, block.block_class
        slab = block.offset // arena.slab_units
        del self.blocks[block.offset]
        self._by_slab[slab] -= 1
        self._by_class[kind] -= 1
        self.num_bytes -= arena.block_bytes(kind)
        if slab in self._whole:
            self._recount(slab)

    def _recount(self, slab: int) -> None:
        """Whether a slab is whole, and with how many blocks."""
        before = self._whole.pop(slab, None)
        if before is not None:
            self._whole_blocks[before[0]] -= before[1]
            self._whole_slabs[before[0]] -= 1
        block_class, idle = self._arena.slab_class(slab), self._by_slab[slab]
        is_whole = bool(idle) and block_class is not None and idle == self._arena.slab_used(slab)
        if is_whole and block_class is not None:
            self._whole[slab] = (block_class, idle)
            self._whole_blocks[block_class] = self._whole_blocks.get(block_class, 0) + idle
            self._whole_slabs[block_class] = self._whole_slabs.get(block_class, 0) + 1
        if is_whole or before is not None:
            self._whole_changed(slab)

    @abstractmethod
    def _whole_changed(self, slab: int) -> None:
        """A slab is whole now, or with other blocks than before, or no longer."""

    def counts(self) -> tuple[list[int], dict[BlockClass, int], set[int]]:
        """For audits: idle blocks by slab, by class (none left out but zeros), and the whole slabs."""
        return list(self._by_slab), {c: n for c, n in self._by_class.items() if n}, set(self._whole)
