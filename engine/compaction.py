"""When slots lie scattered where nobody can use them, and which slab is cheapest to empty. No torch.

Blocks of the chosen slab move in with others of their class, which frees the slab for any class. Idle blocks count as
slots, and those of the chosen slab are given up: scattered among held ones they would keep a slab from everybody else.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.block_pool import BlockPool
from engine.formats import NATIVE, BlockClass
from engine.pool_block import Block


def is_cramped(pool: BlockPool, block_size: int) -> bool:
    """No slab for requests, while slots worth a whole slab lie scattered where new blocks would not go."""
    arena, idle = pool.arena, pool.idle
    if arena.num_free_slabs + idle.num_whole_slabs > pool.reserve_slabs:
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
