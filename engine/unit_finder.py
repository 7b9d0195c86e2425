"""Finds what converts as a whole with a block: itself, split or not, or neighbours that fill a larger one. No torch.

See :mod:`engine.recoder` for what a unit is and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence
from engine.chunks import chunk_mask
from engine.formats import BlockClass
from engine.partial_blocks import kept_chunks, wants_split
from engine.pool_block import DEVICE, Block
from engine.prefix_cache import PrefixCache
from engine.recode_targets import RecodeTargets
from engine.recode_unit import RecodeUnit
from engine.unit_swaps import UnitSwaps

_HOLDERS_TRIED = 4  # holders whose neighbours are looked at for a larger unit


class UnitFinder:
    """Of one group. ``sequences`` (by serial) is shared with the manager."""

    def __init__(
        self,
        group: int,
        pool: BlockPool,
        prefix: PrefixCache,
        sequences: Mapping[int, CacheSequence],
        targets: RecodeTargets,
        swaps: UnitSwaps,
    ) -> None:
        self._group = group
        self._pool = pool
        self._prefix = prefix
        self._sequences = sequences
        self._targets = targets
        self._swaps = swaps

    def wants_split(self, block: Block) -> bool:
        """See :func:`engine.partial_blocks.wants_split`."""
        sequences, group = self._sequences, self._group
        for holder in block.holders:
            if sequences[holder].tables[group].hidden:
                break
        else:
            return False  # the usual case: nobody has dropped part of anything
        return block.size > block.block_class.format.tile_tokens and wants_split(block, self._swaps.tables(block))

    def goal(self, block: Block) -> BlockClass:
        """The class of what a block becomes next: split in its own format, or converted."""
        if self.wants_split(block):
            return BlockClass(block.block_class.kv_format, block.block_class.format.tile_tokens)
        return self._targets.target_class(block)

    def unit_of(self, block: Block) -> tuple[list[Block], BlockClass] | None:
        """Sources of the unit that a block would convert in, and the class of its targets; None if it cannot now."""
        target = self.goal(block)
        if block.size >= target.block_size:
            is_done = block.block_class == target or self._grows_pins([block], target)
            return None if is_done else ([block], target)
        size = target.block_size
        is_evicted = any(self._sequences[holder].is_evicted for holder in block.holders)
        while size > block.size:
            merges = not is_evicted or size in (target.block_size, target.format.tile_tokens)
            for sources in self._spans(block, size) if merges else ():
                merged = BlockClass(target.kv_format, size)
                if self._fits_together(sources, target) and not self._grows_pins(sources, merged):
                    return sources, merged
            if size == target.block_size and not self._targets.is_span_past(block, size):  # it may still fill up
                if self._targets.waits(block, target) or target.block_size == target.format.tile_tokens:
                    return None
                size = max(block.size, target.format.tile_tokens)
                continue  # what is old is quantised, no more
            size //= 2
        if block.block_class.kv_format == target.kv_format or block.size < target.format.tile_tokens:
            return None
        alone = BlockClass(target.kv_format, block.size)
        return None if self._grows_pins([block], alone) else ([block], alone)

    def _spans(self, block: Block, size: int) -> list[list[Block]]:
        """Runs of blocks around ``block`` that exactly fill an aligned span, as holders or the prefix cache see it."""
        start = block.first // size * size
        found: list[list[Block]] = []
        for holder in list(block.holders)[:_HOLDERS_TRIED]:
            table = self._sequences[holder].tables[self._group]
            position, run = start, []
            for index in range(table.index_from(start), len(table.blocks)):
                inner = table.blocks[index]
                if inner.first != position or table.stops[index] != inner.end or inner.end > start + size:
                    break
                run.append(inner)
                position = inner.end
            if position == start + size:
                found.append(run)
        if not block.holders and block.end == start + size:
            run = [block]
            before = self._prefix.previous(block, self._group)
            while before is not None and before.first >= start:
                run.insert(0, before)
                before = self._prefix.previous(before, self._group)
            if run[0].first == start:
                found.append(run)
        return found

    def _fits_together(self, sources: Sequence[Block], target: BlockClass) -> bool:
        lets_go = sources[0].holders.keys() - sources[-1].holders.keys()
        if any(self._sequences[holder].is_evicted for holder in lets_go):
            return False  # it would keep a block for part of it again
        return self._is_nested(sources) and all(
            block.is_sealed
            and block.tier == DEVICE
            and not block.is_pinned
            and not self.wants_split(block)
            and self._targets.target_class(block).kv_format == target.kv_format
            and self._targets.is_old(block)
            for block in sources
        )

    def _grows_pins(self, sources: Sequence[Block], target: BlockClass) -> bool:
        """Whether pins would hold more bytes than now: larger blocks where a prefix ends between the sources, or as
        many smaller ones, each rounded up to 256 bytes.
        """
        pins = {holder for holder in sources[0].holders if holder < 0}
        if not pins:
            return False  # nor of later sources: holders are nested
        held = kept = 0
        for source in sources:
            tables = [self._sequences[pin].tables[self._group] for pin in pins & source.holders.keys()]
            held += self._pool.arena.block_bytes(source.block_class) if tables else 0
            kept |= kept_chunks(source, tables)
        firsts = range(sources[0].first, sources[-1].end, target.block_size)
        needed = sum(bool(chunk_mask(first, first + target.block_size) & kept) for first in firsts)
        return needed * self._pool.arena.block_bytes(target) > held

    @staticmethod
    def _is_nested(sources: Sequence[Block]) -> bool:
        """Whoever holds a later source holds the earlier ones too, so that it gets no tokens that it has dropped."""
        return all(b.holders.keys() <= a.holders.keys() for a, b in pairwise(sources))

    def is_wanted(self, unit: RecodeUnit) -> bool:
        """Planned conversions are checked again: holders may have come, gone or dropped blocks, settings changed."""
        if not any(source.holders or source.nodes for source in unit.sources) or not self._is_nested(unit.sources):
            return False
        if self._swaps.has_grown(unit):
            return False
        covered = sum(chunk_mask(target.first, target.end) for target in unit.targets)
        if self._swaps.needed(unit.sources) & ~covered or self._grows_pins(unit.sources, unit.targets[0].block_class):
            return False
        lossiness = unit.targets[0].block_class.lossiness
        return all(
            lossiness <= max(source.block_class.lossiness, self._targets.target_class(source).lossiness)
            for source in unit.sources
        )
