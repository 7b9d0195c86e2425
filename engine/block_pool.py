"""The blocks of one layer group: who holds them, which are only cached, which wait for another class. No torch.

A block is in exactly one state: *held* (by the block tables of sequences, pins included), *idle* (nobody holds it, the
prefix cache can still hit it; given up when room is needed, in the order of the prefix policy), or *needed as it is*
with neither (its storage waits for a conversion or a copy to end). A block that is none of these is free and not here
at all.

A group has one pool per tier, device and, if there is one, host. Each passes on what concerns blocks of the other. On
the host, a *shadow* (a twin of a device block, see :class:`engine.pool_block.Block`) counts as idle too; losing it
costs only another copy, so shadows go first. A device block that has a twin is not lost when it is given up:
``demote`` lets the twin take its place.

Requests do not get the last ``reserve_slabs`` free slabs: conversions need somewhere to write before they free
anything. Only a sequence that is alone may have them, so that it always ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from engine.arena import Arena, IntegrityError
from engine.block_lives import CLEARED, ORPHANED, ROOM, BlockLives
from engine.formats import OFFSET_UNIT, BlockClass
from engine.idle_blocks import IdleBlocks
from engine.pool_block import DEVICE, HOST, Block
from engine.pool_room import PoolRoom
from engine.prefix_policy import PrefixPolicy
from engine.stale_blocks import StaleBlocks
from engine.versions import Versions


class BlockPool:
    """Allocates, shares, caches and frees the blocks of one group.

    ``forget(block)`` is called before an idle block is given up, to take it out of the prefix cache; it returns other
    blocks that are no longer cached either. ``before``: see :class:`engine.idle_blocks.IdleBlocks`. ``lives`` may be
    shared by pools. ``host``: the group's pool on the host.
    """

    def __init__(
        self,
        arena: Arena,
        forget: Callable[[Block], Sequence[Block]],
        *,
        reserve_slabs: int = 1,
        before: Callable[[Block], Block | None] | None = None,
        lives: BlockLives | None = None,
        host: BlockPool | None = None,
        tier: int = DEVICE,
    ) -> None:
        self.arena = arena
        self.tier = tier
        self.host = host
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
        self._other: BlockPool | None = host
        if host is not None:
            host.join(self)

    def join(self, device: BlockPool) -> None:
        """Be the other tier of a device's pool."""
        self._other, self._ticks = device, device._ticks
        self.idle.join(device.idle)

    # -- life of a block ------------------------------------------------------------------------------------------

    def take(
        self,
        block_class: BlockClass,
        first: int,
        *,
        keep_slabs: int,
        avoid_slab: int = -1,
        spare_shadows: bool = False,
    ) -> Block | None:
        """A fresh block without holders, giving up idle ones if need be; None when that does not help.

        ``keep_slabs``: how many slabs must stay free. ``spare_shadows``: not at the expense of shadows.
        """
        found = self.take_run(
            block_class, first, 1, keep_slabs=keep_slabs, avoid_slab=avoid_slab, spare_shadows=spare_shadows
        )
        return found[0] if found else None

    def take_run(
        self,
        block_class: BlockClass,
        first: int,
        number: int,
        *,
        keep_slabs: int,
        avoid_slab: int = -1,
        spare_shadows: bool = False,
    ) -> list[Block]:
        """As many times :meth:`take`, for one position after the other; fewer blocks where that fails."""
        blocks: list[Block] = []
        size, known, tier = block_class.block_size, self.blocks, self.tier
        while True:
            missing = number - len(blocks)
            offsets = self.arena.allocate_run(block_class, missing, keep_slabs=keep_slabs, avoid_slab=avoid_slab)
            for offset in offsets:
                block = known[offset] = Block(offset, block_class, first, tier=tier)
                blocks.append(block)
                first += size
            if offsets:
                self._slabs_changed(offsets)
                if len(offsets) == missing:
                    break
            if not self._reclaim(block_class, avoid_slab, spare_shadows=spare_shadows):
                break
        if blocks:
            self.class_counts[block_class] = self.class_counts.get(block_class, 0) + len(blocks)
            self.resident_bytes += len(blocks) * self.arena.block_bytes(block_class)
        return blocks

    def _slabs_changed(self, offsets: Sequence[int]) -> None:
        """Blocks were allocated or freed."""
        if self.idle.blocks:
            for slab in {self.arena.slab_of(offset) for offset in offsets}:
                self.idle.slab_changed(slab)

    def fill(self, block: Block, filled: int) -> None:
        """``filled`` tokens of the block are committed now."""
        kind = block.block_class
        self.class_tokens[kind] = self.class_tokens.get(kind, 0) + filled - block.filled
        block.filled = filled

    def fill_to(self, blocks: Sequence[Block], stop: int) -> None:
        """All tokens of blocks below position ``stop`` are committed now. What is not whole has no use for a copy."""
        for kind, run in groupby(blocks, key=_class_of):
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

    def hold(self, block: Block, sequence: int) -> None:
        """A sequence's table takes the block up."""
        block.holders[sequence] = None
        self._pool_of(block)._not_idle(block)  # noqa: SLF001 - of the same class

    def drop(self, block: Block, sequence: int) -> None:
        """A sequence's table lets go of the block."""
        self.drop_all((block,), sequence)

    def drop_all(self, blocks: Iterable[Block], sequence: int) -> None:
        """A sequence's table lets go of blocks, in this order."""
        unused: list[Block] = []
        for block in blocks:
            holders = block.holders
            if sequence not in holders:
                raise IntegrityError(f"sequence {sequence} does not hold block {block.offset} of tier {block.tier}")
            del holders[sequence]
            block.last_used = self._ticks.next()
            if block.nodes:
                self.lives.let_go(block)
                if not holders:
                    self.idle.rank(block)
            elif not holders and self._is_free(block):
                unused.append(block)
                continue
            self.settle(block)
            if holders and self.released is not None:
                self.released(block)
        if unused:
            self._free(unused)

    def unpin(self, block: Block, pin: int) -> None:
        """A pin lets go of the block. That is no use of it: it is as old as it was."""
        del block.holders[pin]
        if block.nodes and not block.holders:
            block.was_pinned = True
            self.idle.rank(block)
        self.settle(block)
        if block.holders and self.released is not None:
            self.released(block)

    def settle(self, block: Block) -> None:
        """Put a block where it belongs after its holders, nodes or pins changed: held, idle, or freed."""
        if block.tier != self.tier:
            self._pool_of(block).settle(block)
        elif block.holders or block.in_recode or block.in_transfer:
            self._not_idle(block)
        elif not self._is_free(block):
            if block not in self.idle:
                self.idle.catch_up(block)
                self.idle.add(block)
                self.version += 1
                if self.tier == DEVICE and block.twin is None:
                    self.unshadowed[block.offset] = block
                    self.unshadowed_bytes += self.arena.block_bytes(block.block_class)
        else:
            self._free((block,))

    def _is_free(self, block: Block) -> bool:
        """Whether nothing keeps a block of this tier that nobody holds."""
        return not (
            block.nodes
            or block.in_recode
            or block.in_transfer
            or block.tier != self.tier
            or (block.twin is not None and self.tier == HOST)
        )

    def _pool_of(self, block: Block) -> BlockPool:
        if block.tier == self.tier:
            return self
        if self._other is None:
            raise IntegrityError(f"block {block.offset} of tier {block.tier} reached the pool of tier {self.tier}")
        return self._other

    def _not_idle(self, block: Block) -> None:
        if block in self.idle:
            self.idle.remove(block)
            self._drop_unshadowed(block)

    def _drop_unshadowed(self, block: Block) -> None:
        if self.unshadowed.pop(block.offset, None) is not None:
            self.unshadowed_bytes -= self.arena.block_bytes(block.block_class)

    # -- twins ----------------------------------------------------------------------------------------------------

    def link(self, block: Block, shadow: Block) -> None:
        """A device block and its copy on the host hold the same bytes now. Settle both afterwards."""
        if self.host is None:
            raise IntegrityError("a shadow without a host pool")
        block.twin, shadow.twin = shadow, block
        self._drop_unshadowed(block)
        self.host._shadows.setdefault(shadow.block_class, {})[shadow.offset] = shadow  # noqa: SLF001

    def unlink(self, block: Block) -> None:
        """A device block stands alone again; what was its shadow is settled: freed, unless it has a name by now."""
        shadow = block.twin
        if shadow is None or self.host is None:
            return
        block.twin = shadow.twin = None
        del self.host._shadows[shadow.block_class][shadow.offset]  # noqa: SLF001
        self.host.settle(shadow)

    def adopt_age(self, block: Block, sources: Sequence[Block]) -> None:
        """A converted block is as recently used, and as valuable, as the sources it replaces. Call while it is held
        or in recode.
        """
        block.last_used = max(source.last_used for source in sources)
        block.priority = max(source.priority for source in sources)
        block.floor = max(block.priority, *(source.floor for source in sources))  # another part may follow it
        self.lives.converted(block, sources)

    def use_policy(self, policy: PrefixPolicy) -> None:
        """Give idle blocks of both tiers up in another order from now on. O(blocks)."""
        host = self.host.blocks.values() if self.host is not None else ()
        self.idle.use_policy(policy, [*self.blocks.values(), *host])

    def take_place(self, block: Block, old: Block) -> None:
        """A block has the names of its counterpart in the other tier now, and is as old and valuable as that was."""
        pool = self._pool_of(block)
        pool._not_idle(block)  # noqa: SLF001 - of the same class
        pool.fill(block, old.filled)
        block.last_used = old.last_used
        block.priority, block.floor = old.priority, old.floor
        self.lives.converted(block, (old,))

    def drop_all_idle(self) -> None:
        """Give up the whole prefix cache that nobody holds."""
        for block in self.idle:
            self._give_up(block, CLEARED)

    def _free(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.offset in self.idle.blocks:
                self._not_idle(block)
            if block.is_stale:
                self.stale.discard(block)
            if block.twin is not None and self.tier == DEVICE:
                self.unlink(block)
            del self.blocks[block.offset]
        for block_class, run in groupby(blocks, key=_class_of):
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

    # -- idle blocks ----------------------------------------------------------------------------------------------

    def _reclaim(self, block_class: BlockClass, avoid_slab: int, *, spare_shadows: bool) -> bool:
        """Give up an idle block that makes room for a class, with its slab if that is needed."""
        shadows = self._shadows.get(block_class)
        if shadows and not spare_shadows:
            # The last one made: its block on the device is the last of those copied to be given up.
            self._give_up(next(reversed(shadows.values())), ROOM)
            return True
        found = self.idle.victim(block_class, avoid_slab)
        if found is None:
            return False
        block, with_slab = found
        if spare_shadows and block.twin is not None:
            return False
        for victim in list(self.blocks_in(self.arena.slab_of(block.offset))) if with_slab else [block]:
            self._give_up(victim, ROOM)
        return True

    def give_up_idle(self, slab: int) -> None:
        """Give up the idle blocks of a slab."""
        for block in list(self.blocks_in(slab)):
            self._give_up(block, ROOM)

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

    def _give_up(self, block: Block, reason: str) -> None:
        if block not in self.idle:
            return  # held, or gone with the start of its prefix
        if block.twin is not None:
            if self.tier == HOST:
                self._lose_shadow(block, block.twin)
                return
            if self.demote is not None:
                self.demote(block)
                return
        orphans = self._forget(block)
        if block.nodes:
            raise IntegrityError(f"block {block.offset} was given up but the prefix cache keeps it")
        self._left(block, reason)
        for orphan in orphans:
            self._left(orphan, ORPHANED)

    def _left(self, block: Block, reason: str) -> None:
        """A block is no longer cached."""
        if block.tier != self.tier:
            self._pool_of(block)._left(block, reason)  # noqa: SLF001 - of the same class
            return
        self.dropped_idle += block in self.idle
        self.lives.gone(block, reason)
        self.settle(block)

    def _lose_shadow(self, shadow: Block, block: Block) -> None:
        block.twin = shadow.twin = None
        del self._shadows[shadow.block_class][shadow.offset]
        self.settle(shadow)

    def hand_on_twin(self, source: Block, target: Block) -> None:
        """A device block's bytes have moved: its shadow, if any, is the target's now."""
        shadow = source.twin
        if shadow is not None:
            source.twin, target.twin, shadow.twin = None, shadow, target

    def num_shadows(self) -> int:
        """Shadows in this pool."""
        return sum(map(len, self._shadows.values()))


def _class_of(block: Block) -> BlockClass:
    return block.block_class
