"""How long cached blocks live, lie idle and wait to be reused, and why they go. No torch.

Bounded cost: three integers on the block, a clock reading per hit and per block let go, fixed buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.buckets import Buckets
from engine.clock import Clock, ManualClock
from engine.pool_block import Block

AGE_BOUNDS_S: Final = (1.0, 5.0, 30.0, 60.0, 180.0, 300.0, 600.0, 3600.0, 21600.0, 86400.0)

ROOM, UNPINNED, ORPHANED, DISPLACED, CLEARED = "room", "unpinned", "orphaned", "displaced", "cleared"
REASONS: Final = {
    ROOM: "given up for room",
    UNPINNED: "given up for room once its pin had ended, and before anyone used it again",
    ORPHANED: "of no use after the start of its prefix went",
    DISPLACED: "less lossy KV of the same tokens, or equal KV nearer, took its place",
    CLEARED: "the whole cache was given up for a lone request",
}


class BlockLives:
    """Histograms in seconds, and blocks gone by reason, cumulative over all groups."""

    def __init__(self, clock: Clock | None = None) -> None:
        """Without a clock all ages are 0."""
        self._clock: Clock = clock or ManualClock()
        self.lifetime = Buckets(AGE_BOUNDS_S)  # first cached to gone
        self.idle = Buckets(AGE_BOUNDS_S)  # last use to gone
        self.reuse_gap = Buckets(AGE_BOUNDS_S)  # between uses, at each hit
        self.dropped = dict.fromkeys(REASONS, 0)

    def cached(self, block: Block) -> None:
        """Something of the block is cached, perhaps for the first time."""
        self.all_cached((block,))

    def all_cached(self, blocks: Sequence[Block]) -> None:
        """The same for several, at the same moment."""
        new = [block for block in blocks if block.cached_ns < 0]
        if new:
            now_ns = self._clock.now_ns()
            for block in new:
                block.cached_ns = block.used_ns = now_ns

    def reused(self, block: Block) -> None:
        """A hit on a cached block."""
        now_ns = self._clock.now_ns()
        self.reuse_gap.observe((now_ns - block.used_ns) / 1e9)
        block.used_ns = now_ns
        block.was_pinned = False

    def let_go(self, block: Block) -> None:
        """A request that used the block lets go of it."""
        block.used_ns = self._clock.now_ns()

    def all_let_go(self, blocks: Sequence[Block]) -> None:
        """The same for several, at the same moment."""
        if blocks:
            now_ns = self._clock.now_ns()
            for block in blocks:
                block.used_ns = now_ns

    def converted(self, target: Block, sources: Sequence[Block]) -> None:
        """A block takes the place of others: no life ends."""
        target.cached_ns = min((source.cached_ns for source in sources if source.cached_ns >= 0), default=-1)
        target.used_ns = max(source.used_ns for source in sources)
        target.was_pinned = any(source.was_pinned for source in sources)

    def copy(self) -> BlockLives:
        """As it is now."""
        other = BlockLives(self._clock)
        other.lifetime, other.idle, other.reuse_gap = self.lifetime.copy(), self.idle.copy(), self.reuse_gap.copy()
        other.dropped = dict(self.dropped)
        return other

    def gone(self, block: Block, reason: str) -> None:
        """The block has left the cache."""
        self.all_gone((block,), reason)

    def all_gone(self, blocks: Sequence[Block], reason: str) -> None:
        """The same for several, at the same moment."""
        now_ns = self._clock.now_ns()
        lifetime, idle, dropped = self.lifetime, self.idle, self.dropped
        for block in blocks:
            lifetime.observe((now_ns - block.cached_ns) / 1e9)
            idle.observe((now_ns - block.used_ns) / 1e9)
            dropped[UNPINNED if block.was_pinned and reason == ROOM else reason] += 1
            block.cached_ns = -1
