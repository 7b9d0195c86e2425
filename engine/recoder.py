"""Converts resident blocks of one group towards the class they should have, a few per step. No torch.

Which: a sealed block that every holder has left more than ``recent_tokens`` behind, or that is idle in the prefix
cache. To what: the current format, or the strictest floor among its holders, but never back to a less lossy one; in
blocks of the current size. A *unit* is what converts as a whole: one block, split or not, or neighbours that exactly
fill a larger aligned one. Where a sequence never fills it (shared prefix ends inside, evicted neighbours, another
floor), the largest aligned size that it does fill is taken, or for a lone 16 native tokens, nothing.

A block that its holders keep only in parts is *split* first, however young: into blocks of one tile, those that nobody
keeps and no cached prefix names left out, which gives their memory back. Blocks of a sequence under eviction merge only
where they fill a whole span of the current size. A dropped chunk never comes back, so what was split is not merged and
split again. What pins hold was admitted under a cap, so no conversion makes it more: see ``UnitFinder``.

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

from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence, CacheSettings
from engine.compaction import Compactor, is_cramped
from engine.formats import BlockClass
from engine.pool_block import DEVICE, Block
from engine.prefix_cache import PrefixCache
from engine.recode_targets import RecodeTargets
from engine.recode_unit import RecodeUnit
from engine.unit_finder import UnitFinder
from engine.unit_swaps import UnitSwaps

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
        self.pool = pool
        self.prefix = prefix
        self.sequences = sequences
        self.recent_tokens = recent_tokens
        self.targets = RecodeTargets(sequences, settings, recent_tokens=recent_tokens, lossiest=lossiest)
        self._swaps = UnitSwaps(group, pool, prefix, sequences)
        self._units = UnitFinder(group, pool, prefix, sequences, self.targets, self._swaps)
        self._compactor = Compactor(group, pool, sequences, self._swaps)
        # Pool version, free slabs and wanted tokens when nothing could be planned.
        self._stalled_at: tuple[int, int, int] | None = None

    # -- what should be converted ---------------------------------------------------------------------------------

    def consider(self, block: Block) -> None:
        """Note whether the block could be converted now. Call when what it depends on has changed."""
        if block.in_recode or block.in_transfer or block.tier != DEVICE:
            return
        is_sealed = block.filled >= block.block_class[1]
        if is_sealed and (self.targets.is_due(block) or self._units.wants_split(block)):
            self.pool.stale.add(block)
            self._stalled_at = None
        elif block.is_stale:
            self.pool.stale.discard(block)

    def consider_left(self, blocks: Sequence[Block]) -> None:
        """The same for blocks that a sequence has let go of; those that were freed are no more."""
        kind: BlockClass | None = None
        has_class = False
        for block in blocks:
            if block.block_class is not kind:
                kind = block.block_class
                has_class = self.targets.unheld_target(kind) == kind
            # Nobody holds it and it has its class: the usual case, in which there is nothing to do.
            if block.holders or (block.nodes and (block.is_stale or not has_class)):
                self.consider(block)

    def advance(self, sequence: CacheSequence) -> None:
        """Consider the blocks that a sequence has left behind since it was last looked at."""
        limit = (sequence.committed - self.recent_tokens) // self.targets.span * self.targets.span
        frontier = sequence.frontier[self.group]
        if limit <= frontier:
            return
        table = sequence.tables[self.group]
        # Only this sequence holds it, all of it, and it has its class: the usual case, in which there is nothing to do.
        done_class = None if self.targets.num_floored or table.hidden else self.targets.last_class
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
        self.targets.use(settings)
        self._stalled_at = None
        for blocks in list(self.pool.stale.by_slab.values()):
            for block in list(blocks.values()):
                self.pool.stale.discard(block)
        for sequence in self.sequences.values():
            sequence.frontier[self.group] = 0
            self.advance(sequence)
            if sequence.tables[self.group].hidden:
                for block in sequence.tables[self.group].blocks:
                    self.consider(block)
        for block in self.pool.idle:
            self.consider(block)

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
        return bool(self.pool.stale) or is_cramped(self.pool, self.targets.write_size(), wanted_tokens)

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
        if (blocked and not units) or (
            not is_spent and is_cramped(self.pool, self.targets.write_size(), wanted_tokens)
        ):
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
        for slab in sorted(self.pool.stale.by_slab, key=self._cost_to_empty):
            for block in list(self.pool.stale.by_slab.get(slab, {}).values()):
                if block.is_pinned or not block.is_stale:
                    continue
                if blocked and self._units.goal(block) in blocked:
                    continue
                unit = self._units.unit_of(block)
                if unit is None:
                    self.pool.stale.discard(block)
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
        for blocks in self.pool.stale.by_slab.values():
            for block in blocks.values():
                target = self._units.goal(block)
                size = self.pool.arena.block_bytes(block.block_class)
                waiting[target] = waiting.get(target, 0) + size
        return max(waiting, key=lambda target: (waiting[target], target), default=None)

    def _cost_to_empty(self, slab: int) -> tuple[int, int, int]:
        stale = len(self.pool.stale.by_slab[slab])
        return (self.pool.arena.slab_used(slab) - stale, stale, slab)

    # -- committing -----------------------------------------------------------------------------------------------

    def finish(self, unit: RecodeUnit, next_version: int) -> bool:
        """Swap a converted unit under all holders; False if it was given up because they or the settings changed."""
        if not self._units.is_wanted(unit):
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
