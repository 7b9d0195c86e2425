"""The books of a block pool: which blocks there are, in which state, and how many of which class. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Self

from engine.arena import Arena, IntegrityError
from engine.block_lives import BlockLives
from engine.formats import OFFSET_UNIT, BlockClass
from engine.idle_blocks import IdleBlocks
from engine.pool_block import DEVICE, HOST, Block
from engine.pool_room import PoolRoom
from engine.stale_blocks import StaleBlocks
from engine.versions import Versions


class PoolState:
    """A part of :class:`engine.block_pool.BlockPool`: everything that it knows, and how a block changes its state."""

    def __init__(
        self,
        arena: Arena,
        forget: Callable[[Block], Sequence[Block]],
        *,
        reserve_slabs: int = 1,
        before: Callable[[Block], Block | None] | None = None,
        lives: BlockLives | None = None,
        host: Self | None = None,
        tier: int = DEVICE,
    ) -> None:
        """``forget(block)`` is called before an idle block is given up, to take it out of the prefix cache; it returns
        other blocks that are no longer cached either. ``before``: see :class:`engine.idle_blocks.IdleBlocks`. ``lives``
        may be shared by pools. ``host``: the group's pool on the host.
        """
        self.arena = arena
        self.tier = tier
        self.host: Self | None = host
        self.reserve_slabs = reserve_slabs
        self.blocks: dict[int, Block] = {}
        self.idle = IdleBlocks(arena) if before is None else IdleBlocks(arena, before)
        self.lives = lives or BlockLives()
        self.room = PoolRoom(arena, self.idle, reserve_slabs)
        self.stale = StaleBlocks(arena)
        self.class_counts: dict[BlockClass, int] = {}
        self.class_tokens: dict[BlockClass, int] = {}  # committed tokens, in whole chunks
        self.resident_bytes = 0
        self.version = 0  # grows whenever room may have appeared
        self.dropped_idle = 0  # cumulative blocks given up for room, those that a twin replaces not counted
        self.unshadowed: dict[int, Block] = {}  # idle since they were last used, without a twin, oldest first
        self.unshadowed_bytes = 0
        self._shadows: dict[BlockClass, dict[int, Block]] = {}  # on the host, oldest first
        self.released: Callable[[Block], None] | None = None  # told when one of several holders lets go of a block
        self.demote: Callable[[Block], None] | None = None  # frees a device block that has a twin
        self._forget = forget
        self._ticks = Versions()  # of uses; one for both tiers, so that blocks can move between them
        self._other: Self | None = host
        if host is not None:
            host.join(self)

    def join(self, device: Self) -> None:
        """Be the other tier of a device's pool."""
        self._other, self._ticks = device, device._ticks
        self.idle.join(device.idle)

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

    def num_shadows(self) -> int:
        """Shadows in this pool."""
        return sum(map(len, self._shadows.values()))

    def _pool_of(self, block: Block) -> Self:
        if block.tier == self.tier:
            return self
        if self._other is None:
            raise IntegrityError(f"block {block.offset} of tier {block.tier} reached the pool of tier {self.tier}")
        return self._other

    # -- tokens ---------------------------------------------------------------------------------------------------

    def fill(self, block: Block, filled: int) -> None:
        """``filled`` tokens of the block are committed now."""
        kind = block.block_class
        self.class_tokens[kind] = self.class_tokens.get(kind, 0) + filled - block.filled
        block.filled = filled

    def fill_to(self, blocks: Sequence[Block], stop: int) -> None:
        """All tokens of blocks below position ``stop`` are committed now. What is not whole has no use for a copy."""
        for kind, run in groupby(blocks, key=class_of):
            size, grown = kind.block_size, 0
            for block in run:
                filled = min(size, stop - block.first)
                if filled > block.filled:
                    grown += filled - block.filled
                    block.filled = filled
                    if block.twin is not None:
                        self.unlink(block)
            if grown:
                self.class_tokens[kind] = self.class_tokens.get(kind, 0) + grown

    # -- states ---------------------------------------------------------------------------------------------------

    def settle(self, block: Block) -> None:
        """Put a block where it belongs after its holders, nodes or pins changed: held, idle, or freed."""
        if block.tier != self.tier:
            self._pool_of(block).settle(block)
        elif block.holders or block.in_recode or block.in_transfer:
            self._not_idle(block)
        elif block.nodes or (block.twin is not None and self.tier == HOST):
            if block not in self.idle:
                self._rest(block)
        else:
            self._free((block,))

    def _rest(self, block: Block) -> None:
        """A block of this tier is only cached from now on."""
        idle = self.idle
        idle.catch_up(block)
        idle.add(block)
        self.version += 1
        if self.tier == DEVICE and block.twin is None:
            self.unshadowed[block.offset] = block
            self.unshadowed_bytes += self.arena.block_bytes(block.block_class)

    def _not_idle(self, block: Block) -> None:
        if block in self.idle:
            self.idle.remove(block)
            self._drop_unshadowed(block)

    def _drop_unshadowed(self, block: Block) -> None:
        if self.unshadowed.pop(block.offset, None) is not None:
            self.unshadowed_bytes -= self.arena.block_bytes(block.block_class)

    def unlink(self, block: Block) -> None:
        """A device block stands alone again; what was its shadow is settled: freed, unless it has a name by now."""
        shadow = block.twin
        if shadow is None or self.host is None:
            return
        block.twin = shadow.twin = None
        del self.host._shadows[shadow.block_class][shadow.offset]  # noqa: SLF001 - of the same class
        self.host.settle(shadow)

    def _free(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.offset in self.idle.blocks:
                self._not_idle(block)
            if block.is_stale:
                self.stale.discard(block)
            if block.twin is not None and self.tier == DEVICE:
                self.unlink(block)
            del self.blocks[block.offset]
        for block_class, run in groupby(blocks, key=class_of):
            tokens = [block.filled for block in run]
            if any(tokens):
                self.class_tokens[block_class] -= sum(tokens)
            count = self.class_counts[block_class] - len(tokens)
            if count:
                self.class_counts[block_class] = count
            else:
                del self.class_counts[block_class]
            self.resident_bytes -= len(tokens) * self.arena.block_bytes(block_class)
        offsets = [block.offset for block in blocks]
        self.arena.free_run(offsets)
        self.version += len(blocks)
        self._slabs_changed(offsets)

    def _slabs_changed(self, offsets: Sequence[int]) -> None:
        """Blocks were allocated or freed."""
        if self.idle.blocks:
            units = self.arena.slab_units
            for slab in {offset // units for offset in offsets}:
                self.idle.slab_changed(slab)


def class_of(block: Block) -> BlockClass:
    return block.block_class
