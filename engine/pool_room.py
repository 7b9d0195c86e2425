"""How much room a pool has, and in which block sizes: free slots, and idle blocks that could be given up. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.arena import Arena
from engine.formats import BLOCK_SIZES, NATIVE_CLASSES, BlockClass
from engine.idle_blocks import IdleBlocks


@dataclass(frozen=True)
class PoolRoom:
    """Of one pool, whose parts these are. ``reserve_slabs``: how many of its slabs requests do not get."""

    arena: Arena
    idle: IdleBlocks
    reserve_slabs: int

    def plan_blocks(self, start: int, stop: int, block_size: int, *, keep_slabs: int) -> list[int] | None:
        """Sizes of native blocks that cover ``start .. stop``, or None without room for them.

        At each position the largest size up to ``block_size`` that divides it and has room; when the pool has no slab
        left to cut, then smaller ones, then larger ones, out of slabs that are cut already.
        """
        primary = NATIVE_CLASSES[block_size]
        ready = self.arena.free_slots(primary) + self.idle.num_of(primary)
        blocks, is_even = -(-(stop - start) // block_size), start % block_size == 0
        if is_even and blocks <= ready:
            return [block_size] * blocks  # the usual case: room for the size that is wanted, wherever
        slabs = self._spare_slabs(primary, keep_slabs)
        if is_even and blocks <= ready + slabs * self.arena.per_slab(primary):
            return [block_size] * blocks
        slots = {block_size: ready}
        sizes: list[int] = []
        position = start
        while position < stop:
            for size in _sizes_at(position, block_size):
                room = slots.get(size)
                if room is None:
                    other = NATIVE_CLASSES[size]
                    room = self.arena.free_slots(other) + self.idle.num_outside_whole_slabs(other)
                if not room and slabs:
                    slabs -= 1
                    room = self.arena.per_slab(NATIVE_CLASSES[size])
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
        block_class = NATIVE_CLASSES[block_size]
        blocks = self.arena.free_slots(block_class) + self.idle.num_of(block_class)
        tokens = (
            blocks + self._spare_slabs(block_class, self.reserve_slabs) * self.arena.per_slab(block_class)
        ) * block_size
        for size in BLOCK_SIZES[: BLOCK_SIZES.index(block_size)]:
            tokens += self.arena.free_slots(NATIVE_CLASSES[size]) * size
        return tokens

    def _spare_slabs(self, block_class: BlockClass, keep_slabs: int) -> int:
        """Slabs that could be cut for a class, besides those whose blocks are of that class already."""
        whole = self.idle.num_whole_slabs - self.idle.num_whole_slabs_of(block_class)
        return max(0, self.arena.num_free_slabs + whole - keep_slabs)


def _sizes_at(position: int, block_size: int) -> list[int]:
    fits = [size for size in BLOCK_SIZES if position % size == 0]
    return [size for size in reversed(fits) if size <= block_size] + [size for size in fits if size > block_size]
