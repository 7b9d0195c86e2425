"""When slots lie scattered where nobody can use them, and which slab is cheapest to empty. No torch.

Blocks of the chosen slab move in with others of their class, which frees the slab for any class. Idle blocks count as
slots, and those of the chosen slab are given up: scattered among held ones they would keep a slab from everybody else.
A class is packed tighter by every move, so this ends, whatever is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.block_pool import BlockPool
from engine.cache_sequence import CacheSequence
from engine.formats import NATIVE, BlockClass
from engine.pool_block import Block
from engine.recode_unit import RecodeUnit
from engine.unit_swaps import UnitSwaps


def is_cramped(pool: BlockPool, block_size: int, wanted_tokens: int = 0) -> bool:
    """No slab for requests, or less than the room that is wanted for new blocks up to ``block_size``, while slots worth
    a whole slab lie scattered where new blocks would not go.
    """
    arena, idle = pool.arena, pool.idle
    has_slab = arena.num_free_slabs + idle.num_whole_slabs > pool.reserve_slabs
    if has_slab and (not wanted_tokens or pool.room.available_tokens(block_size) >= wanted_tokens):
        return False
    primary = BlockClass(NATIVE.name, block_size)
    return any(
        arena.free_slots(block_class) + idle.num_of(block_class) >= arena.per_slab(block_class)
        for block_class in pool.class_counts
        if block_class != primary or arena.num_free_slabs < pool.reserve_slabs
    )


def slab_to_empty(pool: BlockPool, is_movable: Callable[[Block], bool]) -> int | None:
    """The slab with the fewest held tokens, if all that is held in it can move into other slabs; None if none can."""
    arena, idle = pool.arena, pool.idle
    least, chosen = 0, None
    for slab in range(arena.num_slabs):
        block_class = arena.slab_class(slab)
        if block_class is None:
            continue
        used, num_idle = arena.slab_used(slab), idle.num_in(slab)
        held = used - num_idle
        if chosen is not None and held * block_class.block_size >= least:
            continue
        elsewhere = arena.free_slots(block_class) - (arena.per_slab(block_class) - used)
        elsewhere += idle.num_of(block_class) - num_idle
        if 0 < held <= elsewhere and all(block in idle or is_movable(block) for block in pool.blocks_in(slab)):
            least, chosen = held * block_class.block_size, slab
    return chosen


class Compactor:
    """Plans the moves of one group. ``sequences`` (by serial) is shared with the manager."""

    def __init__(self, group: int, pool: BlockPool, sequences: Mapping[int, CacheSequence], swaps: UnitSwaps) -> None:
        self._group = group
        self._pool = pool
        self._sequences = sequences
        self._swaps = swaps

    def plan(self, budget_tokens: int | None, *, in_step: bool, at_least_one: bool = True) -> list[RecodeUnit]:
        """Move blocks out of the slab that is cheapest to empty into slots of their class elsewhere.

        Up to a budget (None: all of the slab's); ``at_least_one``: one in any case.
        """
        chosen = slab_to_empty(self._pool, lambda block: self.is_movable(block, in_step))
        if chosen is None:
            return []
        first = next(self._pool.blocks_in(chosen))
        if budget_tokens is not None and budget_tokens < first.size and not at_least_one:
            return []
        self._pool.give_up_idle(chosen)
        units: list[RecodeUnit] = []
        left = budget_tokens
        for block in list(self._pool.blocks_in(chosen)):
            if left is not None and block.size > left and units:
                break
            unit = self._swaps.start([block], block.block_class, may_cut=False, avoid_slab=chosen)
            if unit is None:
                break
            units.append(unit)
            left = None if left is None else left - block.size
        return units

    def is_movable(self, block: Block, in_step: bool) -> bool:
        """Nothing will be written to it, or is converted from it, before it has moved."""
        if block.is_pinned:
            return False
        if block.is_sealed or not in_step:
            return True
        return not any(self._grows_under(block, self._sequences[holder]) for holder in block.holders)

    def _grows_under(self, block: Block, sequence: CacheSequence) -> bool:
        """Whether the sequence may still write into the block: it uses more of it than it has computed."""
        table = sequence.tables[self._group]
        return sequence.committed < table.stops[table.index_from(block.first)]
