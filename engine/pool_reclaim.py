"""How a block pool makes room: who gives way, and what becomes of the storage. No torch.

A pool that has served for a while is full of cached blocks, so nearly every block that is taken comes from one of them.
The usual case is therefore short: the block that goes first is of the class that is wanted and alone in leaving, and
its storage is taken over on the spot, which is where the arena would have put the new block.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.arena import IntegrityError
from engine.block_lives import CLEARED, ORPHANED, ROOM
from engine.formats import BlockClass
from engine.pool_block import HOST, Block
from engine.pool_state import PoolState


class PoolReclaim(PoolState):
    """A part of :class:`engine.block_pool.BlockPool`: takes blocks, giving up idle ones if need be."""

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
        size, gone = block_class.block_size, list[Block]()
        blocks = self._allocate(block_class, first, number, keep_slabs, avoid_slab)
        while len(blocks) < number:
            found = self._next_victim(block_class, avoid_slab, spare_shadows=spare_shadows)
            if found is None:
                break
            victim, with_slab = found
            is_alone = not with_slab and victim.twin is None and self._is_kept_slab(victim)
            orphans = self._forgotten(victim) if is_alone else ()
            if is_alone and not orphans:
                blocks.append(self._take_over(victim, first + len(blocks) * size))
                gone.append(victim)
                continue
            if is_alone:
                self._have_left(victim, ROOM, orphans)
            else:
                for other in list(self.blocks_in(self.arena.slab_of(victim.offset))) if with_slab else (victim,):
                    self._give_up(other, ROOM)
            start = first + len(blocks) * size
            blocks += self._allocate(block_class, start, number - len(blocks), keep_slabs, avoid_slab)
        if gone:
            self.dropped_idle += len(gone)
            self.lives.all_gone(gone, ROOM)
        return blocks

    def _allocate(
        self, block_class: BlockClass, first: int, number: int, keep_slabs: int, avoid_slab: int
    ) -> list[Block]:
        """Blocks in what is free, up to a number."""
        offsets = self.arena.allocate_run(block_class, number, keep_slabs=keep_slabs, avoid_slab=avoid_slab)
        if not offsets:
            return []
        blocks, size, tier = list[Block](), block_class.block_size, self.tier
        for offset in offsets:
            block = self.blocks[offset] = Block(offset, block_class, first, tier=tier)
            blocks.append(block)
            first += size
        self.class_counts[block_class] = self.class_counts.get(block_class, 0) + len(blocks)
        self.resident_bytes += len(blocks) * self.arena.block_bytes(block_class)
        self._slabs_changed(offsets)
        return blocks

    # -- who gives way --------------------------------------------------------------------------------------------

    def _next_victim(
        self, block_class: BlockClass, avoid_slab: int, *, spare_shadows: bool
    ) -> tuple[Block, bool] | None:
        """The idle block that makes room for a class, and whether its slab is needed for that; None if none does."""
        if spare_shadows:
            found = self.idle.victim(block_class, avoid_slab)
            return None if found is None or found[0].twin is not None else found
        shadows = self._shadows.get(block_class) if self._shadows else None
        if shadows:
            # The last one made: its block on the device is the last of those copied to be given up.
            return next(reversed(shadows.values())), False
        return self.idle.victim(block_class, avoid_slab)

    def _is_kept_slab(self, block: Block) -> bool:
        """Whether a block's slab would stay with its class without it: not given back for anybody to cut."""
        return self.arena.slab_used(self.arena.slab_of(block.offset)) > 1

    def _take_over(self, old: Block, first: int) -> Block:
        """A fresh block in the storage of an idle one that nothing names any more.

        For when its class has no free slot and no slab to cut: once it was freed, its slot would be the only one. Its
        life is still to be ended.
        """
        offset, kind = old.offset, old.block_class
        self.idle.remove(old)
        if self.unshadowed:
            self._drop_unshadowed(old)
        if old.is_stale:
            self.stale.discard(old)
        if old.filled:
            self.class_tokens[kind] -= old.filled
        self.version += 1
        del self.blocks[offset]  # the new one comes last
        block = self.blocks[offset] = Block(offset, kind, first, tier=self.tier)
        return block

    # -- giving up ------------------------------------------------------------------------------------------------

    def give_up_idle(self, slab: int) -> None:
        """Give up the idle blocks of a slab."""
        for block in list(self.blocks_in(slab)):
            self._give_up(block, ROOM)

    def drop_all_idle(self) -> None:
        """Give up the whole prefix cache that nobody holds."""
        for block in self.idle:
            self._give_up(block, CLEARED)

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
        self._have_left(block, reason, self._forgotten(block))

    def _forgotten(self, block: Block) -> Sequence[Block]:
        """Take a block out of the prefix cache; returns others that went with it."""
        orphans = self._forget(block)
        if block.nodes:
            raise IntegrityError(f"block {block.offset} was given up but the prefix cache keeps it")
        return orphans

    def _have_left(self, block: Block, reason: str, orphans: Sequence[Block]) -> None:
        """A block is no longer cached, nor is what followed it."""
        self._left(block, reason)
        for orphan in orphans:
            self._left(orphan, ORPHANED)

    def _left(self, block: Block, reason: str) -> None:
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
