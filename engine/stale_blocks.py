"""The blocks of one pool that are not in the class they should have and could be converted now. No torch."""

from __future__ import annotations

from engine.arena import Arena
from engine.pool_block import Block


class StaleBlocks:
    """``by_slab``: slab -> offset -> block."""

    def __init__(self, arena: Arena) -> None:
        self.by_slab: dict[int, dict[int, Block]] = {}
        self.num_bytes = 0
        self._arena = arena

    def __bool__(self) -> bool:
        return bool(self.by_slab)

    def add(self, block: Block) -> None:
        """The block could be converted now."""
        if not block.is_stale:
            block.is_stale = True
            self.by_slab.setdefault(block.offset // self._arena.slab_units, {})[block.offset] = block
            self.num_bytes += self._arena.block_bytes(block.block_class)

    def discard(self, block: Block) -> None:
        """The block has its class, or cannot get it for now."""
        if block.is_stale:
            block.is_stale = False
            slab = block.offset // self._arena.slab_units
            del self.by_slab[slab][block.offset]
            if not self.by_slab[slab]:
                del self.by_slab[slab]
            self.num_bytes -= self._arena.block_bytes(block.block_class)
