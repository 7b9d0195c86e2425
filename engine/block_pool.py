"""The blocks of one layer group: who holds them, which are only cached, which wait for another class. No torch.

A block is in exactly one state: *held* (by sequences' block tables), *idle* (nobody holds it, the prefix cache can
still hit it; given up least recently used first when room is needed), or *in recode* with neither (its storage waits
for a conversion to end). A block that is none of these is free and not here at all.

Requests do not get the last ``reserve_slabs`` free slabs: conversions need somewhere to write before they free
anything. Only a sequence that is alone may have them, so that it always ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from engine.arena import Arena, IntegrityError
from engine.formats import BLOCK_SIZES, NATIVE, OFFSET_UNIT, BlockClass
from engine.idle_blocks import IdleBlocks
from engine.pool_block import Block


class BlockPool:
    """Allocates, shares, caches and frees the blocks of one group.

    ``forget(block)`` is called before an idle block is given up, to take it out of the prefix cache.
    """

    def __init__(self, arena: Arena, forget: Callable[[Block], None], *, reserve_slabs: int = 1) -> None:
        self.arena = arena
        self.reserve_slabs = reserve_slabs
        self.blocks: dict[int, Block] = {}
        self.idle = IdleBlocks(arena)
        self.stale: dict[int, dict[int, Block]] = {}  # slab -> offset -> block not in the class it should have
        self.class_counts: dict[BlockClass, int] = {}
        self.class_tokens: dict[BlockClass, int] = {}  # committed tokens, in whole chunks
        self.resident_bytes = 0
        self.stale_bytes = 0
        self.version = 0  # grows whenever room may have appeared
        self.dropped_idle = 0  # cumulative blocks given up for room
        self._forget = forget
        self._clock = 0

    # -- room -----------------------------------------------------------------------------------------------------

    def plan_blocks(self, start: int, stop: int, block_size: int, *, keep_slabs: int) -> list[int] | None:
        """Sizes of native blocks that cover ``start .. stop``, or None without room for them.

        At each position the largest size up to ``block_size`` that divides it and has room; when the pool has no slab
        left to cut, then smaller ones, then larger ones, out of slabs that are cut already.
        """
        primary = BlockClass(NATIVE.name, block_size)
        slots = {block_size: self.arena.free_slots(primary) + self.idle.num_of(primary)}
        slabs = self._spare_slabs(primary, keep_slabs)
        blocks = -(-(stop - start) // block_size)
        if start % block_size == 0 and blocks <= slots[block_size] + slabs * self.arena.per_slab(primary):
            return [block_size] * blocks  # the usual case: room for the size that is wanted, wherever
        sizes: list[int] = []
        position = start
        while position < stop:
            for size in _sizes_at(position, block_size):
                room = slots.get(size)
                if room is None:
                    other = BlockClass(NATIVE.name, size)
                    room = self.arena.free_slots(other) + self.idle.num_outside_whole_slabs(other)
                if not room and slabs:
                    slabs -= 1
                    room = self.arena.per_slab(BlockClass(NATIVE.name, size))
                slots[size] = room
                if room:
                    slots[size] = room - 1
                    sizes.append(size)
                    position += size
                    break
            else:
                return None
        return sizes

    def available_tokens(self, block_size: int) -> int:
        """Native tokens that new blocks up to ``block_size`` could hold now, idle cached blocks given up."""
        block_class = BlockClass(NATIVE.name, block_size)
        blocks = self.arena.free_slots(block_class) + self.idle.num_of(block_class)
        tokens = (
            blocks + self._spare_slabs(block_class, self.reserve_slabs) * self.arena.per_slab(block_class)
        ) * block_size
        for size in BLOCK_SIZES[: BLOCK_SIZES.index(block_size)]:
            tokens += self.arena.free_slots(BlockClass(NATIVE.name, size)) * size
        return tokens

    def _spare_slabs(self, block_class: BlockClass, keep_slabs: int) -> int:
        """Slabs that could be cut for a class, besides those whose blocks are of that class already."""
        whole = self.idle.num_whole_slabs - self.idle.num_whole_slabs_of(block_class)
        return max(0, self.arena.num_free_slabs + whole - keep_slabs)

    # -- life of a block ------------------------------------------------------------------------------------------

    def take(self, block_class: BlockClass, first: int, *, keep_slabs: int, avoid_slab: int = -1) -> Block | None:
        """A fresh block without holders, giving up idle ones if need be; None when that does not help.

        ``keep_slabs``: how many slabs must stay free.
        """
        while True:
            offset = self.arena.allocate(block_class, keep_slabs=keep_slabs, avoid_slab=avoid_slab)
            if offset is not None:
                break
            if not self._reclaim(block_class, avoid_slab):
                return None
        block = self.blocks[offset] = Block(offset, block_class, first)
        self.class_counts[block_class] = self.class_counts.get(block_class, 0) + 1
        self.resident_bytes += self.arena.block_bytes(block_class)
        self.idle.slab_changed(self.arena.slab_of(offset))
        return block

    def fill(self, block: Block, filled: int) -> None:
        """``filled`` tokens of the block are committed now."""
        kind = block.block_class
        self.class_tokens[kind] = self.class_tokens.get(kind, 0) + filled - block.filled
        block.filled = filled

    def hold(self, block: Block, sequence: int) -> None:
        """A sequence's table takes the block up."""
        block.holders[sequence] = None
        if block in self.idle:
            self.idle.remove(block)

    def drop(self, block: Block, sequence: int) -> None:
        """A sequence's table lets go of the block."""
        if sequence not in block.holders:
            raise IntegrityError(f"sequence {sequence} does not hold block {block.offset}")
        del block.holders[sequence]
        self._clock += 1
        block.last_used = self._clock
        self.settle(block)

    def settle(self, block: Block) -> None:
        """Put a block where it belongs after its holders, nodes or recode state changed: held, idle, or freed."""
        if block.holders or block.in_recode:
            if block in self.idle:
                self.idle.remove(block)
        elif block.nodes:
            if block not in self.idle:
                self.idle.add(block)
                self.version += 1
        else:
            self._free(block)

    def adopt_age(self, block: Block, sources: Sequence[Block]) -> None:
        """A converted block is as recently used as the sources it replaces."""
        block.last_used = max(source.last_used for source in sources)
        self.idle.resort()

    def drop_all_idle(self) -> None:
        """Give up the whole prefix cache that nobody holds."""
        for block in self.idle:
            self._give_up(block)

    def _free(self, block: Block) -> None:
        if block in self.idle:
            self.idle.remove(block)
        self.unmark_stale(block)
        del self.blocks[block.offset]
        if block.filled:
            self.class_tokens[block.block_class] -= block.filled
        count = self.class_counts[block.block_class] - 1
        if count:
            self.class_counts[block.block_class] = count
        else:
            del self.class_counts[block.block_class]
        self.resident_bytes -= self.arena.block_bytes(block.block_class)
        self.arena.free(block.offset)
        self.version += 1
        self.idle.slab_changed(self.arena.slab_of(block.offset))

    # -- idle blocks ----------------------------------------------------------------------------------------------

    def _reclaim(self, block_class: BlockClass, avoid_slab: int) -> bool:
        """Give up an idle block that makes room for a class, with its slab if that is needed."""
        found = self.idle.victim(block_class, avoid_slab)
        if found is None:
            return False
        block, with_slab = found
        for victim in list(self.blocks_in(self.arena.slab_of(block.offset))) if with_slab else [block]:
            self._give_up(victim)
        return True

    def give_up_idle(self, slab: int) -> None:
        """Give up the idle blocks of a slab."""
        for block in list(self.blocks_in(slab)):
            if block in self.idle:
                self._give_up(block)

    def blocks_in(self, slab: int) -> Iterator[Block]:
        """The blocks of a slab by offset."""
        block_class = self.arena.slab_class(slab)
        if block_class is None:
            return
        units = self.arena.block_bytes(block_class) // OFFSET_UNIT
        start = slab * self.arena.slab_units
        for slot in range(self.arena.per_slab(block_class)):
            block = self.blocks.get(start + slot * units)
            if block is not None:
                yield block

    def _give_up(self, block: Block) -> None:
        self._forget(block)
        self.dropped_idle += 1
        if block.nodes:
            raise IntegrityError(f"block {block.offset} was given up but the prefix cache keeps it")
        self.settle(block)

    # -- blocks that should have another class --------------------------------------------------------------------

    def mark_stale(self, block: Block) -> None:
        """The block could be converted now."""
        if not block.is_stale:
            block.is_stale = True
            self.stale.setdefault(block.offset // self.arena.slab_units, {})[block.offset] = block
            self.stale_bytes += self.arena.block_bytes(block.block_class)

    def unmark_stale(self, block: Block) -> None:
        """The block has its class, or cannot get it for now."""
        if block.is_stale:
            block.is_stale = False
            slab = block.offset // self.arena.slab_units
            del self.stale[slab][block.offset]
            if not self.stale[slab]:
                del self.stale[slab]
            self.stale_bytes -= self.arena.block_bytes(block.block_class)


def _sizes_at(position: int, block_size: int) -> list[int]:
    fits = [size for size in BLOCK_SIZES if position % size == 0]
    return [size for size in reversed(fits) if size <= block_size] + [size for size in fits if size > block_size]
