"""One sequence's blocks in one layer group, in position order, and what changed in them since when. No torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

from engine.arena import IntegrityError
from engine.chunks import chunk_mask, runs_of
from engine.formats import FORMATS, OFFSET_UNIT, KVShape
from engine.plan import Entry
from engine.pool_block import Block


def tile_units(shape: KVShape) -> dict[str, int]:
    """Per format, a tile's length in units of 256 bytes; 0 where that is no whole number (odd, tiny shapes).

    Where it is one, an entry may begin at any tile of a block, and what a sequence has dropped of a block that it still
    holds is not attended any more. Where it is none, such a block is attended whole until it has been split.
    """
    strides = {kind.name: shape.tile_stride(kind) for kind in FORMATS}
    return {name: 0 if stride % OFFSET_UNIT else stride // OFFSET_UNIT for name, stride in strides.items()}


class BlockTable:
    """Blocks with, for each, the position up to which the sequence may use it (``stops``, exclusive).

    Evicted ranges are gaps between entries. Positions are absolute and never change. ``hidden``: chunks of 16 (bit c:
    positions 16 c .. 16 c + 15) that the sequence has dropped though it still holds their block, because it keeps
    others of it; an executor gets an entry for each kept run. Indices of blocks and of entries differ then.

    Changes are logged as (version, lowest block index); versions come from one counter for the whole cache, so a reader
    never meets an old one again.
    """

    __slots__ = ("_log", "_runs", "_tile_units", "blocks", "hidden", "stops", "version")

    def __init__(self, version: int, tile_units: Mapping[str, int] | None = None) -> None:
        """``tile_units``: see :func:`tile_units`; without it partly dropped blocks are shown whole."""
        self.blocks: list[Block] = []
        self.stops: list[int] = []
        self.hidden = 0
        self.version = version
        self._log: list[tuple[int, int]] = [(version, 0)]
        self._tile_units = tile_units or {}
        self._runs: tuple[int, list[tuple[int, int, int]]] = (-1, [])  # of a version: block index, start, stop

    @property
    def capacity(self) -> int:
        """Position up to which tokens can be written without another block."""
        return self.stops[-1] if self.stops else 0

    def append(self, block: Block, stop: int, version: int) -> None:
        """Add the next block. The entry before it stops growing, so it counts as changed."""
        self._changed(max(0, len(self.blocks) - 1), version)
        self.blocks.append(block)
        self.stops.append(stop)

    def extend(self, blocks: Sequence[Block], version: int) -> None:
        """Add the next blocks, whole."""
        if blocks:
            self._changed(max(0, len(self.blocks) - 1), version)
            self.blocks += blocks
            self.stops += [block.first + block.block_class[1] for block in blocks]

    def pop(self, version: int) -> Block:
        """Undo the last ``append``."""
        stop = self.stops.pop()
        block = self.blocks.pop()
        self.hidden &= ~chunk_mask(block.first, stop)
        self._changed(max(0, len(self.blocks) - 1), version)
        return block

    def replace(
        self, start: int, stop: int, blocks: Sequence[Block], stops: Sequence[int], version: int
    ) -> list[Block]:
        """Put other blocks in place of blocks ``start .. stop`` (none: drop them); returns the old ones.

        What is hidden stays hidden where a new block covers it.
        """
        old = self.blocks[start:stop]
        if self.hidden:
            for block, end in zip(old, self.stops[start:stop], strict=True):
                covered = sum(chunk_mask(new.first, new_end) for new, new_end in zip(blocks, stops, strict=True))
                self.hidden &= ~chunk_mask(block.first, end) | covered
        self.blocks[start:stop] = blocks
        self.stops[start:stop] = stops
        self._changed(start, version)
        return old

    # -- dropped parts of held blocks -----------------------------------------------------------------------------

    def hide(self, index: int, chunks: int, version: int) -> None:
        """Drop chunks (a mask by position) of a block that stays because others of it are kept."""
        self.hidden |= chunks
        self._changed(index, version)

    def kept(self, index: int) -> int:
        """The chunks of a block that the sequence may use and has not dropped, as a mask by position."""
        return chunk_mask(self.blocks[index].first, self.stops[index]) & ~self.hidden

    def kept_in(self, start: int, stop: int) -> int:
        """The chunks kept among positions ``start .. stop``, as a mask by position."""
        found = 0
        for index in range(max(0, self.index_from(start + 1) - 1), len(self.blocks)):
            if self.blocks[index].first >= stop:
                break
            found |= self.kept(index)
        return found & chunk_mask(start, stop)

    def _changed(self, index: int, version: int) -> None:
        # Kept increasing in both columns: a later change further down hides earlier ones at or above it.
        while self._log and self._log[-1][1] >= index:
            self._log.pop()
        self._log.append((version, index))
        self.version = version

    @property
    def num_entries(self) -> int:
        """How many entries an executor gets."""
        return len(self._kept_runs()) if self.hidden else len(self.blocks)

    def first_changed(self, since: int) -> int:
        """Lowest index of an entry changed after version ``since``; the number of entries if none is."""
        if since >= self.version:
            return self.num_entries
        index = min(self._log[bisect_right(self._log, since, key=_version)][1], len(self.blocks))
        return bisect_left(self._kept_runs(), index, key=_block_index) if self.hidden else index

    def _kept_runs(self) -> list[tuple[int, int, int]]:
        """(block index, start, stop) of every run of positions that is shown to an executor."""
        version, runs = self._runs
        if version != self.version:
            runs = []
            for index, (block, stop) in enumerate(zip(self.blocks, self.stops, strict=True)):
                mask = chunk_mask(block.first, stop)
                kind = block.block_class.format
                if not mask & self.hidden or not self._tile_units.get(kind.name):
                    runs.append((index, block.first, stop))
                else:
                    parts = runs_of(mask & ~self.hidden, kind.tile_tokens)
                    runs += [(index, start, min(end, stop)) for start, end in parts]
            self._runs = (self.version, runs)
        return runs

    def index_at(self, position: int) -> int:
        """Index of the block that covers a position; raises IntegrityError for a gap or beyond the table."""
        index = bisect_right(self.stops, position)
        if index == len(self.stops) or self.blocks[index].first > position:
            raise IntegrityError(f"no block holds position {position}")
        return index

    def index_from(self, position: int) -> int:
        """Index of the first block that starts at or after a position."""
        index = bisect_right(self.stops, position)
        return index + (index < len(self.stops) and self.blocks[index].first < position)

    def entries(self, start: int, end: int) -> list[Entry]:
        """Entries from an index on, of which tokens before position ``end`` are valid."""
        if self.hidden:
            return [self._entry(*run, end) for run in self._kept_runs()[start:]]
        return [
            Entry(
                block.offset, block.block_class.format.code, block.first, min(stop, end) - block.first, block.tier > 0
            )
            for block, stop in zip(self.blocks[start:], self.stops[start:], strict=True)
        ]

    def _entry(self, index: int, start: int, stop: int, end: int) -> Entry:
        block = self.blocks[index]
        kind = block.block_class.format
        offset = block.offset + (start - block.first) // kind.tile_tokens * self._tile_units.get(kind.name, 0)
        return Entry(offset, kind.code, start, min(stop, end) - start, block.tier > 0)

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


def _version(change: tuple[int, int]) -> int:
    return change[0]


def _block_index(run: tuple[int, int, int]) -> int:
    return run[0]
