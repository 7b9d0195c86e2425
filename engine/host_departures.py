"""What leaves the device for the host, and in which order. Bookkeeping only: no torch.

First the blocks that nobody needs on the device any more, then copies of idle cached blocks (*shadows*), made ahead
while room is getting scarce there.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.block_pool import BlockPool
from engine.host_books import HostBooks, Move
from engine.pool_block import DEVICE, Block

# Idle cached blocks are copied ahead, all of them, while less than this share of the pool's slabs is free.
_FREE_SHARE = 0.5


class HostDepartures:
    """Blocks that wait to leave, by layer group, and whether the host has room for the next one."""

    def __init__(self, books: HostBooks) -> None:
        self._books = books
        self._pools, self._hosts = books.pools, books.hosts
        self._leaving: list[dict[int, Block]] = [{} for _ in books.pools]  # by offset, in order
        self._blocked_at: int | None = None  # the host pools' version when the next leaving block found no room
        self._shadows_blocked_at: list[int | None] = [None] * len(books.pools)  # the same for shadows, by group

    def released(self, group: int, block: Block) -> None:
        """Somebody let go of a block, or may do without it here: if that goes for all its holders, it may leave."""
        if block.tier != DEVICE or not self._books.is_dispensable(group, block) or block.is_pinned:
            return
        if block.twin is not None:
            self._books.demote(group, block)
        else:
            self._leaving[group][block.offset] = block

    def look_again(self) -> None:
        """Whatever found no room so far may find some."""
        self._blocked_at = None
        self._shadows_blocked_at = [None] * len(self._pools)

    def moves(self) -> Iterator[Move]:
        """What goes next, its place on the host taken. Ask for no more of them than are carried out."""
        for group, leaving in enumerate(self._leaving):
            while leaving and not self.is_host_full:
                block = leaving[next(iter(leaving))]
                if not self._may_leave(group, block):
                    del leaving[block.offset]
                    continue
                target = self._hosts[group].take(block.block_class, block.first, keep_slabs=0)
                if target is None:
                    self._blocked_at = self._books.host_version()
                    break
                del leaving[block.offset]
                yield group, block, target
        for group, pool in enumerate(self._pools):
            while self._wants_shadows(group, pool):
                block = next(iter(pool.unshadowed.values()))
                target = self._hosts[group].take(block.block_class, block.first, keep_slabs=0, spare_shadows=True)
                if target is None:
                    self._shadows_blocked_at[group] = self._hosts[group].version
                    break
                if block in pool.idle:
                    yield group, block, target
                else:
                    self._hosts[group].settle(target)  # making room there has cost the block the start of its prefix

    def _may_leave(self, group: int, block: Block) -> bool:
        alive = self._pools[group].blocks.get(block.offset) is block
        return alive and not block.is_pinned and self._books.is_dispensable(group, block)

    def _wants_shadows(self, group: int, pool: BlockPool) -> bool:
        if not pool.unshadowed or self._shadows_blocked_at[group] == self._hosts[group].version:
            return False
        return pool.arena.num_free_slabs < _FREE_SHARE * pool.arena.num_slabs

    @property
    def is_host_full(self) -> bool:
        """Whether the next block that is to leave has found no room, and none has appeared since."""
        return self._blocked_at is not None and self._blocked_at == self._books.host_version()

    def has_any(self) -> bool:
        """Whether :meth:`moves` may find something."""
        if any(self._leaving) and not self.is_host_full:
            return True
        return any(self._wants_shadows(group, pool) for group, pool in enumerate(self._pools))

    def queued_bytes(self) -> int:
        """Bytes of all blocks that wait to leave."""
        return sum(
            self._books.size(group, block) for group, leaving in enumerate(self._leaving) for block in leaving.values()
        )

    def coming_bytes(self, group: int) -> int:
        """Bytes of a group's device pool that will become available as soon as blocks have left that wait to."""
        if self.is_host_full:
            return 0
        leaving = [block for block in self._leaving[group].values() if self._may_leave(group, block)]
        return min(sum(self._books.size(group, block) for block in leaving), self._books.host_room_bytes(group))
