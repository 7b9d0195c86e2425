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

from collections.abc import Iterable, Sequence

from engine.arena import IntegrityError
from engine.pool_block import HOST, Block
from engine.pool_reclaim import PoolReclaim
from engine.prefix_policy import PrefixPolicy


class BlockPool(PoolReclaim):
    """Allocates, shares, caches and frees the blocks of one group.

    Its books: :mod:`engine.pool_state`; taking blocks: :mod:`engine.pool_reclaim`. Here are holders, and what a block
    inherits from another.
    """

    # -- holders --------------------------------------------------------------------------------------------------

    def hold(self, block: Block, sequence: int) -> None:
        """A sequence's table takes the block up."""
        block.holders[sequence] = None
        self._pool_of(block)._not_idle(block)  # noqa: SLF001 - of the same class

    def drop(self, block: Block, sequence: int) -> None:
        """A sequence's table lets go of the block."""
        self.drop_all((block,), sequence)

    def drop_all(self, blocks: Iterable[Block], sequence: int) -> None:
        """A sequence's table lets go of blocks, in this order."""
        used: list[Block] = []
        unused: list[Block] = []
        tier, next_tick, idle = self.tier, self._ticks.next, self.idle
        for block in blocks:
            holders = block.holders
            if sequence not in holders:
                raise IntegrityError(f"sequence {sequence} does not hold block {block.offset} of tier {block.tier}")
            del holders[sequence]
            block.last_used = next_tick()
            needed = block.in_recode or block.in_transfer or block.tier != tier
            if block.nodes:
                used.append(block)
                if not holders:
                    idle.rank(block)
                    if not needed:
                        self._rest(block)
                        continue
            elif not (holders or needed or (block.twin is not None and tier == HOST)):
                unused.append(block)
                continue
            self.settle(block)
            if holders and self.released is not None:
                self.released(block)
        self.lives.all_let_go(used)
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

    # -- what a block inherits ------------------------------------------------------------------------------------

    def link(self, block: Block, shadow: Block) -> None:
        """A device block and its copy on the host hold the same bytes now. Settle both afterwards."""
        if self.host is None:
            raise IntegrityError("a shadow without a host pool")
        block.twin, shadow.twin = shadow, block
        self._drop_unshadowed(block)
        self.host._shadows.setdefault(shadow.block_class, {})[shadow.offset] = shadow  # noqa: SLF001 - of the same class

    def hand_on_twin(self, source: Block, target: Block) -> None:
        """A device block's bytes have moved: its shadow, if any, is the target's now."""
        shadow = source.twin
        if shadow is not None:
            source.twin, target.twin, shadow.twin = None, shadow, target

    def adopt_age(self, block: Block, sources: Sequence[Block]) -> None:
        """A converted block is as recently used, and as valuable, as the sources it replaces. Call while it is held
        or in recode.
        """
        block.last_used = max(source.last_used for source in sources)
        block.priority = max(source.priority for source in sources)
        block.floor = max(block.priority, *(source.floor for source in sources))  # another part may follow it
        self.lives.converted(block, sources)

    def take_place(self, block: Block, old: Block) -> None:
        """A block has the names of its counterpart in the other tier now, and is as old and valuable as that was."""
        pool = self._pool_of(block)
        pool._not_idle(block)  # noqa: SLF001
        pool.fill(block, old.filled)
        block.last_used = old.last_used
        block.priority, block.floor = old.priority, old.floor
        self.lives.converted(block, (old,))

    def use_policy(self, policy: PrefixPolicy) -> None:
        """Give idle blocks of both tiers up in another order from now on. O(blocks)."""
        host = self.host.blocks.values() if self.host is not None else ()
        self.idle.use_policy(policy, [*self.blocks.values(), *host])
