"""Converts resident blocks of one group towards the class they should have, a few per step. No torch.

Which: a sealed block that every holder has left more than ``recent_tokens`` behind, or that is idle in the prefix
cache. To what: the current format, or the strictest floor among its holders, but never back to a less lossy one; in
blocks of the current size. A *unit* is what converts as a whole: one block, split or not, or neighbours that exactly
fill a larger aligned one. Where a sequence never fills it (shared prefix ends inside, evicted neighbours, another
floor), the largest aligned size that it does fill is taken, or for a lone 16 native tokens, nothing.

A block that its holders keep only in parts is *split* first, however young: into blocks of one tile, those that nobody
keeps and no cached prefix names left out, which gives their memory back. Blocks of a sequence under eviction merge only
where they fill a whole span of the current size. A dropped chunk never comes back, so what was split is not merged and
split again. What pins hold was admitted under a cap, so no conversion makes it more: see ``_grows_pins``.

How: out of place, and swapped under all holders when it is done (:mod:`engine.unit_swaps`). Slabs that are cheapest to
empty come first, then longest waiting. When no slab is free for a target, or while slots lie scattered in other classes
none is free for requests or too few for the one that waits, the blocks of the least used slab are moved in with others
of their class (:mod:`engine.compaction`), which frees one. A block that still grows can be moved between steps, when
nothing writes to it, but not inside one.

Idle cached blocks are converted like any others: they then hold more prefixes in the same bytes, and giving up the
least recently used ones makes room for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence, CacheSettings
from engine.chunks import chunk_mask
from engine.compaction import Compactor, is_cramped
from engine.formats import CHUNK_TOKENS, FORMATS, NATIVE, BlockClass, lossiness_of
from engine.partial_blocks import kept_chunks, wants_split
from engine.pool_block import DEVICE, Block
from engine.prefix_cache import PrefixCache
from engine.recode_unit import RecodeUnit
from engine.unit_swaps import UnitSwaps

_BY_LOSSINESS = {kind.lossiness: kind for kind in FORMATS}
_HOLDERS_TRIED = 4  # holders whose neighbours are looked at for a larger unit
_PARTS = 4  # native blocks that make one quantised block, where it is that large
_RETRY_AFTER = 16  # blocks given back, unless a whole slab is


class Recoder:
    """Finds, plans and commits the conversions of one group. ``sequences`` (by serial) is shared with the manager."""

    def __init__(
        self,
        group: int,
        pool: BlockPool,
        prefix: PrefixCache,
        sequences: Mapping[int, CacheSequence],
        settings: CacheSettings,
        *,
        recent_tokens: int,
        lossiest: str | None = None,
    ) -> None:
        """``lossiest``: the lossiest format that the group allows (None: any)."""
        self.group = group
        self.max_lossiness = lossiness_of(lossiest)
        self.pool = pool
        self.prefix = prefix
        self.sequences = sequences
        self.recent_tokens = recent_tokens
        self.num_floored = 0  # sequences with a floor: without any, holders need not be asked
        self._swaps = UnitSwaps(group, pool, prefix, sequences)
        self._compactor = Compactor(group, pool, sequences, self._swaps)
        # Pool version, free slabs and wanted tokens when nothing could be planned.
        self._stalled_at: tuple[int, int, int] | None = None
        self._targets: dict[BlockClass, BlockClass] = {}  # under these settings, for blocks that no floor protects
        self._use(settings)

    def _use(self, settings: CacheSettings) -> None:
        """Settings in force, and what follows from them for sequences without a floor."""
        self.settings = settings
        self._lossiness = min(settings.lossiness, self.max_lossiness)
        self._part_size = max(CHUNK_TOKENS, settings.block_size // _PARTS)
        self._span = max(self.write_size(), _BY_LOSSINESS[self._lossiness].tile_tokens)
        self._last_class = self._target_of(BlockClass(NATIVE.name, settings.block_size), self._lossiness)
        self._targets.clear()

    # -- what should be converted ---------------------------------------------------------------------------------

    def target_class(self, block: Block) -> BlockClass:
        """The class that a block should have, whatever its neighbours and what is kept of it allow."""
        if self.num_floored and block.holders:
            floor = min(self.sequences[holder].max_lossiness for holder in block.holders)
            return self._target_of(block.block_class, min(self._lossiness, floor))
        target = self._targets.get(block.block_class)
        if target is None:
            target = self._targets[block.block_class] = self._target_of(block.block_class, self._lossiness)
        return target

    def _target_of(self, block_class: BlockClass, lossiness: int) -> BlockClass:
        kind = _BY_LOSSINESS[max(lossiness, block_class.lossiness)]
        return BlockClass(kind.name, max(self.settings.block_size, kind.tile_tokens))

    def tile_tokens(self, sequence: CacheSequence) -> int:
        """Tokens of a tile of the format that a sequence's blocks are converted to."""
        return _BY_LOSSINESS[min(self._lossiness, sequence.max_lossiness)].tile_tokens

    def write_size(self, max_lossiness: int | None = None) -> int:
        """Size of the native blocks that new tokens of a sequence with this floor (None: without one) go to.

        A quarter of a block where they will be quantised, so that what is old of a block that is not full need not wait
        for the rest.
        """
        return self._part_size if self._lossiness and max_lossiness != 0 else self.settings.block_size

    def wants_split(self, block: Block) -> bool:
        """See :func:`engine.partial_blocks.wants_split`."""
        sequences, group = self.sequences, self.group
        for holder in block.holders:
            if sequences[holder].tables[group].hidden:
                break
        else:
            return False  # the usual case: nobody has dropped part of anything
        return block.size > block.block_class.format.tile_tokens and wants_split(block, self._swaps.tables(block))

    def _goal(self, block: Block) -> BlockClass:
        """The class of what a block becomes next: split in its own format, or converted."""
        if self.wants_split(block):
            return BlockClass(block.block_class.kv_format, block.block_class.format.tile_tokens)
        return self.target_class(block)

    def consider(self, block: Block) -> None:
        """Note whether the block could be converted now. Call when what it depends on has changed."""
        if block.in_recode or block.in_transfer or block.tier != DEVICE:
            return
        is_sealed = block.filled >= block.block_class[1]
        if is_sealed and (self._is_due(block) or self.wants_split(block)):
            self.pool.mark_stale(block)
            self._stalled_at = None
        elif block.is_stale:
            self.pool.unmark_stale(block)

    def _is_due(self, block: Block) -> bool:
        target = self.target_class(block)
        return target != block.block_class and self._is_old(block) and not self._waits(block, target)

    def _waits(self, block: Block, target: BlockClass) -> bool:
        """Whether nothing is left to do but to merge it, and its span may still fill up: its last part merges all."""
        is_part = block.size < target.block_size and block.block_class.kv_format == target.kv_format
        return is_part and not self._is_span_past(block, target.block_size)

    def advance(self, sequence: CacheSequence) -> None:
        """Consider the blocks that a sequence has left behind since it was last looked at."""
        limit = (sequence.committed - self.recent_tokens) // self._span * self._span
        frontier = sequence.frontier[self.group]
        if limit <= frontier:
            return
        table = sequence.tables[self.group]
        # Only this sequence holds it, all of it, and it has its class: the usual case, in which there is nothing to do.
        done_class = None if self.num_floored or table.hidden else self._last_class
        for block in table.blocks[table.index_from(frontier) :]:
            end = block.first + block.block_class[1]
            if end > limit:
                break
            if block.block_class != done_class or block.is_stale or len(block.holders) > 1:
                self.consider(block)
            frontier = end
        sequence.frontier[self.group] = frontier

    def rescan(self, settings: CacheSettings) -> None:
        """Settings changed: consider everything again."""
        self._use(settings)
        self._stalled_at = None
        for blocks in list(self.pool.stale.values()):
            for block in list(blocks.values()):
                self.pool.unmark_stale(block)
        for sequence in self.sequences.values():
            sequence.frontier[self.group] = 0
            self.advance(sequence)
            if sequence.tables[self.group].hidden:
                for block in sequence.tables[self.group].blocks:
                    self.consider(block)
        for block in self.pool.idle:
            self.consider(block)

    def _is_old(self, block: Block) -> bool:
        limit = block.end + self.recent_tokens
        return all(self.sequences[holder].committed >= limit for holder in block.holders)

    # -- units ----------------------------------------------------------------------------------------------------

    def unit_of(self, block: Block) -> tuple[list[Block], BlockClass] | None:
        """Sources of the unit that a block would convert in, and the class of its targets; None if it cannot now."""
        target = self._goal(block)
        if block.size >= target.block_size:
            is_done = block.block_class == target or self._grows_pins([block], target)
            return None if is_done else ([block], target)
        size = target.block_size
        is_evicted = any(self.sequences[holder].is_evicted for holder in block.holders)
        while size > block.size:
            merges = not is_evicted or size in (target.block_size, target.format.tile_tokens)
            for sources in self._spans(block, size) if merges else ():
                merged = BlockClass(target.kv_format, size)
                if self._fits_together(sources, target) and not self._grows_pins(sources, merged):
                    return sources, merged
            if size == target.block_size and not self._is_span_past(block, size):  # it may still fill up
                if self._waits(block, target) or target.block_size == target.format.tile_tokens:
                    return None
                size = max(block.size, target.format.tile_tokens)
                continue  # what is old is quantised, no more
            size //= 2
        if block.block_class.kv_format == target.kv_format or block.size < target.format.tile_tokens:
            return None
        alone = BlockClass(target.kv_format, block.size)
        return None if self._grows_pins([block], alone) else ([block], alone)

    def _is_span_past(self, block: Block, size: int) -> bool:
        """Whether no holder will come to fill the span. Pins never grow."""
        limit = (block.first // size + 1) * size + self.recent_tokens
        return all(holder < 0 or self.sequences[holder].committed >= limit for holder in block.holders)

    def _spans(self, block: Block, size: int) -> list[list[Block]]:
        """Runs of blocks around ``block`` that exactly fill an aligned span, as holders or the prefix cache see it."""
        start = block.first // size * size
        found: list[list[Block]] = []
        for holder in list(block.holders)[:_HOLDERS_TRIED]:
            table = self.sequences[holder].tables[self.group]
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
            before = self.prefix.previous(block, self.group)
            while before is not None and before.first >= start:
                run.insert(0, before)
                before = self.prefix.previous(before, self.group)
            if run[0].first == start:
                found.append(run)
        return found

    def _fits_together(self, sources: Sequence[Block], target: BlockClass) -> bool:
        lets_go = sources[0].holders.keys() - sources[-1].holders.keys()
        if any(self.sequences[holder].is_evicted for holder in lets_go):
            return False  # it would keep a block for part of it again
        return self._is_nested(sources) and all(
            block.is_sealed
            and block.tier == DEVICE
            and not block.is_pinned
            and not self.wants_split(block)
            and self.target_class(block).kv_format == target.kv_format
            and self._is_old(block)
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
            tables = [self.sequences[pin].tables[self.group] for pin in pins & source.holders.keys()]
            held += self.pool.arena.block_bytes(source.block_class) if tables else 0
            kept |= kept_chunks(source, tables)
        firsts = range(sources[0].first, sources[-1].end, target.block_size)
        needed = sum(bool(chunk_mask(first, first + target.block_size) & kept) for first in firsts)
        return needed * self.pool.arena.block_bytes(target) > held

    @staticmethod
    def _is_nested(sources: Sequence[Block]) -> bool:
        """Whoever holds a later source holds the earlier ones too, so that it gets no tokens that it has dropped."""
        return all(b.holders.keys() <= a.holders.keys() for a, b in pairwise(sources))

    # -- planning -------------------------------------------------------------------------------------------------

    def has_work(self, wanted_tokens: int = 0) -> bool:
        """Whether a plan could find anything to do. After one that found no room, not before some has appeared, or
        more is wanted.
        """
        if self._stalled_at is not None:
            version, free_slabs, wanted = self._stalled_at
            is_same = self.pool.version < version + _RETRY_AFTER and self.pool.arena.num_free_slabs <= free_slabs
            if is_same and wanted_tokens <= wanted:
                return False
        return bool(self.pool.stale) or is_cramped(self.pool, self.write_size(), wanted_tokens)

    def plan(self, budget_tokens: int | None, *, in_step: bool, wanted_tokens: int = 0) -> list[RecodeUnit]:
        """Units to convert in this step, up to a budget in tokens (None: all), at least one if there is room.

        ``in_step``: other tokens are written between now and ``finish``. ``wanted_tokens``: native room that somebody
        waits for; blocks are moved to make it, with what conversions leave of the budget.
        """
        if not self.has_work(wanted_tokens):
            return []
        favoured = self._favoured_class()
        units, blocked = self._plan_units(budget_tokens, favoured)
        if not units and blocked and favoured is not None:
            units, blocked = self._plan_units(budget_tokens, None)
        left = None if budget_tokens is None else budget_tokens - sum(unit.num_tokens for unit in units)
        is_spent = bool(units) and left is not None and left <= 0
        if (blocked and not units) or (not is_spent and is_cramped(self.pool, self.write_size(), wanted_tokens)):
            units += self._compactor.plan(left, in_step=in_step, at_least_one=not units)
        if not units:
            self._stalled_at = (self.pool.version, self.pool.arena.num_free_slabs, wanted_tokens)
        return units

    def _plan_units(
        self, budget_tokens: int | None, favoured: BlockClass | None
    ) -> tuple[list[RecodeUnit], set[BlockClass]]:
        """Units in order until the budget is used, and the target classes for which there was no room."""
        units: list[RecodeUnit] = []
        blocked: set[BlockClass] = set()
        left = budget_tokens
        for slab in sorted(self.pool.stale, key=self._cost_to_empty):
            for block in list(self.pool.stale.get(slab, {}).values()):
                if block.is_pinned or not block.is_stale:
                    continue
                if blocked and self._goal(block) in blocked:
                    continue
                unit = self.unit_of(block)
                if unit is None:
                    self.pool.unmark_stale(block)
                    continue
                sources, target = unit
                if target in blocked:
                    continue
                num_tokens = sum(source.size for source in sources)
                if left is not None and num_tokens > left and units:
                    return units, blocked
                planned = self._swaps.start(sources, target, may_cut=favoured in (None, target))
                if planned is None:
                    blocked.add(target)
                    continue
                units.append(planned)
                if left is not None:
                    left -= num_tokens
                    if left <= 0:
                        return units, blocked
        return units, blocked

    def _favoured_class(self) -> BlockClass | None:
        """When one slab is left, the class that has most to convert gets it; None when there is enough for all.

        It fills the slab, which empties another one. A class with little to convert would keep it half empty.
        """
        if self.pool.arena.num_free_slabs != 1:
            return None
        waiting: dict[BlockClass, int] = {}
        for blocks in self.pool.stale.values():
            for block in blocks.values():
                target = self._goal(block)
                size = self.pool.arena.block_bytes(block.block_class)
                waiting[target] = waiting.get(target, 0) + size
        return max(waiting, key=lambda target: (waiting[target], target), default=None)

    def _cost_to_empty(self, slab: int) -> tuple[int, int, int]:
        stale = len(self.pool.stale[slab])
        return (self.pool.arena.slab_used(slab) - stale, stale, slab)

    # -- committing -----------------------------------------------------------------------------------------------

    def finish(self, unit: RecodeUnit, next_version: int) -> bool:
        """Swap a converted unit under all holders; False if it was given up because they or the settings changed."""
        if not self._is_wanted(unit):
            self.cancel(unit)
            return False
        self._swaps.swap(unit, next_version)
        for target in unit.targets:
            if target.holders or target.nodes:
                self.consider(target)
        return True

    def cancel(self, unit: RecodeUnit) -> None:
        """Drop a unit's targets; sources stay as they are."""
        self._swaps.release(unit)
        for source in unit.sources:
            if source.holders or source.nodes:
                self.consider(source)

    def _is_wanted(self, unit: RecodeUnit) -> bool:
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
            lossiness <= max(source.block_class.lossiness, self.target_class(source).lossiness)
            for source in unit.sources
        )
