"""However full the pool is and however its blocks lie, recoding goes on.

From one class it gets everything into the class that it should have, except ends of sequences that would need a slab of
a class of their own where none is left; these follow when something is freed. When blocks of several formats have to
change at once (floors, switches in a row) more than the reserve may be needed: then it must end, and harm nothing.
"""

from __future__ import annotations

import hypothesis.strategies as st
from cache_world import World, ids
from hypothesis import HealthCheck, given, settings

FORMATS = ["native", "int8", "k8v4", "int4"]
SIZES = [16, 32, 64, 128, 256]


def only_ends_are_left(world: World) -> bool:
    """Whether what should be converted and is not are ends of sequences: parts of a span that is not full become
    blocks of a tile, a second class, for which the reserve of one slab may leave no room.
    """
    left = [
        (block, recoder.targets.target_class(block))
        for recoder in world.cache._recoders
        for block in recoder.pool.blocks.values()
        if block.is_sealed
        and recoder.targets.target_class(block) != block.block_class
        and recoder.targets.is_old(block)
    ]
    return all(block.size < target.block_size for block, target in left)


@given(
    slabs=st.integers(3, 9),
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=40),
    interleave=st.sampled_from([16, 48, 400]),
    first_size=st.sampled_from(SIZES),
    switches=st.lists(st.tuples(st.sampled_from(FORMATS), st.sampled_from(SIZES)), min_size=1, max_size=3),
    floors=st.sampled_from([(None,), (None,), ("native", None), (None, "int8", "native")]),
    recent=st.sampled_from([0, 32]),
    budget=st.sampled_from([32, 300]),
    wanted=st.sampled_from([0, 600, 10**6]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_full_pool_goes_on(
    slabs: int,
    lengths: list[int],
    interleave: int,
    first_size: int,
    switches: list[tuple[str, int]],
    floors: tuple[str | None, ...],
    recent: int,
    budget: int,
    wanted: int,
) -> None:
    world = World(num_slabs=slabs, recent_tokens=recent, recode_tokens=0, values={"block_size": first_size})
    requests = [
        world.request(ids(i, length), use_prefix_cache=False, kv_format_floor=floors[i % len(floors)])
        for i, length in enumerate(lengths)
    ]
    progress = True
    while progress:  # all grow in turns until the pool is full
        progress = False
        for request in requests:
            count = min(interleave, len(request.prompt_ids) - request.num_computed_tokens)
            if count and world.cache.allocate(request, count):
                world.write(request, request.num_computed_tokens, count)
                request.num_computed_tokens += count
                world.cache.commit(request, request.num_computed_tokens)
                progress = True
    for index, (kv_format, block_size) in enumerate(switches):
        world.cache.apply({**world.values, "kv_format": kv_format, "block_size": block_size})
        steps = 0
        while batches := world.cache.plan_recodes(budget, wanted_tokens=wanted):
            assert (steps := steps + 1) < 3000, "recoding does not end"
            for batch in batches:
                assert batch.num_tokens <= max(budget, 256)
                world.arenas[batch.group].recode(batch)
            world.cache.finish_recodes(batches)
            world.cache.check_integrity()
        if floors == (None,) and index == 0:
            assert world.cache.converged_fraction() == 1.0 or only_ends_are_left(world)
        for request in requests:
            if world.cache.holds(request):
                world.read_all(request, 0, request.num_computed_tokens)
