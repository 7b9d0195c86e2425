"""One sequence's blocks in one layer group, in position order, and what changed in them since when. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from engine.arena import IntegrityError
from engine.plan import Entry
from engine.pool_block import Block


class BlockTable:
    """Blocks with, for each, the position up to which the sequence may use it (``stops``, exclusive).

    Evicted ranges are gaps between entries. Positions are absolute and never change. Changes are logged as (version,
    lowest index); versions come from one counter for the whole cache, so a reader never meets an old one again.
    """

    __slots__ = ("_log", "blocks", "stops", "version")

    def __init__(self, version: int) -> None:
        self.blocks: list[Block] = []
        self.stops: list[int] = []
        self.version = version
        self._log: list[tuple[int, int]] = [(version, 0)]

    @property
    def capacity(self) -> int:
        """Position up to which tokens can be written without another block."""
        return self.stops[-1] if self.stops else 0

    def append(self, block: Block, stop: int, version: int) -> None:
        """Add the next block. The entry before it stops growing, so it counts as changed."""
        self._changed(max(0, len(self.blocks) - 1), version)
        self.blocks.append(block)
        self.stops.append(stop)

    def pop(self, version: int) -> Block:
        """Undo the last ``append``."""
        self.stops.pop()
        block = self.blocks.pop()
        self._changed(max(0, len(self.blocks) - 1), version)
        return block

    def replace(
        self, start: int, stop: int, blocks: Sequence[Block], stops: Sequence[int], version: int
    ) -> list[Block]:
        """Put other blocks in place of entries ``start .. stop`` (none: drop them); returns the old ones."""
        old = self.blocks[start:stop]
        self.blocks[start:stop] = blocks
        self.stops[start:stop] = stops
        self._changed(start, version)
        return old

    def _changed(self, index: int, version: int) -> None:
        # Kept increasing in both columns: a later change further down hides earlier ones at or above it.
        while self._log and self._log[-1][1] >= index:
            self._log.pop()
        self._log.append((version, index))
        self.version = version

    def first_changed(self, since: int) -> int:
        """Lowest index changed after version ``since``; the number of entries if none is."""
        if since >= self.version:
            return len(self.blocks)
        return min(self._log[bisect_right(self._log, since, key=_version)][1], len(self.blocks))

    def index_at(self, position: int) -> int:
        """Index of the entry that covers a position; raises IntegrityError for a gap or beyond the table."""
        index = bisect_right(self.blocks, position, key=_first) - 1
        if index < 0 or position >= self.stops[index]:
            raise IntegrityError(f"no block holds position {position}")
        return index

    def index_from(self, position: int) -> int:
        """Index of the first entry that starts at or after a position."""
        return bisect_right(self.blocks, position - 1, key=_first)

    def entries(self, start: int, end: int) -> list[Entry]:
        """Entries from an index on, of which tokens before position ``end`` are valid."""
        return [
            Entry(
                block.offset, block.block_class.format.code, block.first, min(stop, end) - block.first, block.tier > 0
            )
            for block, stop in zip(self.blocks[start:], self.stops[start:], strict=True)
        ]

    def slot_runs(self, start: int, num_tokens: int) -> list[tuple[int, int, int]]:
        """(block offset, first token index in the block, tokens) for positions ``start .. + num_tokens``."""
        runs: list[tuple[int, int, int]] = []
        position, stop = start, start + num_tokens
        index = len(self.blocks) - 1
        while index > 0 and self.blocks[index].first > start:  # new tokens lie at the end: no search
            index -= 1
        while position < stop:
            if index >= len(self.blocks) or not self.blocks[index].first <= position < self.stops[index]:
                raise IntegrityError(f"no block holds position {position}")
            block, until = self.blocks[index], min(stop, self.stops[index])
            runs.append((block.offset, position - block.first, until - position))
            position = until
            index += 1
        return runs


def _first(block: Block) -> int:
    return block.first


def _version(change: tuple[int, int]) -> int:
    return change[0]
