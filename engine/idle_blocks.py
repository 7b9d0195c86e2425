"""Cached blocks that nobody holds, and what giving them up would make room for. No torch.

Room for a class comes from one of its own blocks, or from a slab in which every used block is idle (a *whole* slab),
which can then be cut for any class.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.arena import Arena
from engine.formats import BlockClass
from engine.pool_block import Block


class IdleBlocks:
    """The idle blocks of one pool with their counts by slab and class. Chooses who goes first; frees nothing itself."""

    def __init__(self, arena: Arena) -> None:
        self.blocks: dict[int, Block] = {}  # by offset, least recently used first unless _is_unsorted
        self.num_bytes = 0
        self._arena = arena
        self._is_unsorted = False
        self._by_slab = [0] * arena.num_slabs
        self._by_class: dict[BlockClass, int] = {}
        self._whole: dict[int, tuple[BlockClass, int]] = {}  # slab -> its class, its idle blocks
        self._whole_blocks: dict[BlockClass, int] = {}
        self._whole_slabs: dict[BlockClass, int] = {}

    def __contains__(self, block: Block) -> bool:
        return block.offset in self.blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(list(self.blocks.values()))

    def add(self, block: Block) -> None:
        """The last holder let go of a cached block."""
        self.blocks[block.offset] = block
        self._count(block, 1)

    def remove(self, block: Block) -> None:
        """Somebody takes the block up, or it is freed."""
        del self.blocks[block.offset]
        self._count(block, -1)

    def resort(self) -> None:
        """Blocks were added whose last use is older than that of others."""
        self._is_unsorted = True

    def slab_changed(self, slab: int) -> None:
        """A block of a slab was allocated or freed."""
        if self._by_slab[slab] or slab in self._whole:
            self._recount(slab)

    def victim(self, block_class: BlockClass, avoid_slab: int) -> tuple[Block, bool] | None:
        """Who goes first to make room for a class, and whether its whole slab must go; None if nothing helps."""
        if self._is_unsorted:
            self.blocks = dict(sorted(self.blocks.items(), key=lambda item: item[1].last_used))
            self._is_unsorted = False
        for block in self.blocks.values():
            slab = self._arena.slab_of(block.offset)
            if slab == avoid_slab:
                continue
            if block.block_class == block_class:
                return block, False
            if slab in self._whole:
                return block, True
        return None

    # -- counts ---------------------------------------------------------------------------------------------------

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

    def _count(self, block: Block, change: int) -> None:
        slab = self._arena.slab_of(block.offset)
        self._by_slab[slab] += change
        self._by_class[block.block_class] = self._by_class.get(block.block_class, 0) + change
        self.num_bytes += change * self._arena.block_bytes(block.block_class)
        self._recount(slab)

    def _recount(self, slab: int) -> None:
        before = self._whole.pop(slab, None)
        if before is not None:
            self._whole_blocks[before[0]] -= before[1]
            self._whole_slabs[before[0]] -= 1
        block_class, idle = self._arena.slab_class(slab), self._by_slab[slab]
        if idle and block_class is not None and idle == self._arena.slab_used(slab):
            self._whole[slab] = (block_class, idle)
            self._whole_blocks[block_class] = self._whole_blocks.get(block_class, 0) + idle
            self._whole_slabs[block_class] = self._whole_slabs.get(block_class, 0) + 1

    def counts(self) -> tuple[list[int], dict[BlockClass, int], set[int]]:
        """For audits: idle blocks by slab, by class (none left out but zeros), and the whole slabs."""
        return list(self._by_slab), {c: n for c, n in self._by_class.items() if n}, set(self._whole)
