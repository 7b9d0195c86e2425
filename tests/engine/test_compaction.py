"""Room that a waiting request needs is made of slots that lie scattered, not waited for."""

from __future__ import annotations

import pytest
from cache_world import World, ids

from engine.compaction import is_cramped
from engine.request import Request, RequestStatus

SLAB_TOKENS = 256


def scattered(kv_format: str, block_size: int, *, recode_tokens: int = 64) -> tuple[World, list[Request]]:
    """Half-empty slabs of a lossy class: many have run, every third still does. Some slabs are free."""
    world = World(
        num_slabs=16, recode_tokens=recode_tokens, recent_tokens=0,
        values={"kv_format": kv_format, "block_size": block_size, "max_num_batched_tokens": 2048, "max_num_seqs": 64},
    )  # fmt: skip
    requests = []
    for index in range(24):
        requests.append(world.add(ids(index, 120), max_tokens=400, use_prefix_cache=False))
        for _ in range(2):
            world.step()
    for index, request in enumerate(requests):
        if index % 3:
            world.scheduler.abort(request.request_id)
    world.cache.check_integrity()
    return world, [request for index, request in enumerate(requests) if index % 3 == 0]


@pytest.mark.parametrize("kv_format", ["int8", "k8v4", "int4"])
@pytest.mark.parametrize("block_size", [32, 64])
def test_a_long_prompt_gets_room_that_lies_scattered(kv_format: str, block_size: int) -> None:
    world, others = scattered(kv_format, block_size)
    pool = world.cache._pools[0]
    assert all(request.status is RequestStatus.RUNNING for request in others)
    free = pool.arena.num_free_slabs
    assert free > pool.reserve_slabs + 1, "the scene needs slabs that anybody could have"
    head = world.add(ids(99, pool.room.available_tokens(16) + SLAB_TOKENS // 2), max_tokens=2, use_prefix_cache=False)
    steps = 0
    while head.status is RequestStatus.WAITING:
        plan = world.step()
        world.cache.check_integrity()
        assert sum(batch.num_tokens for batch in plan.recodes) <= 64
        assert (steps := steps + 1) < 40, "the head waits for what could be had"
    assert all(request.status is RequestStatus.RUNNING for request in others)
    assert world.counters.preemptions == 0
    world.run(check=True)


def test_nothing_is_moved_while_nobody_waits() -> None:
    world, _ = scattered("int8", 32)
    for _ in range(20):  # what is due is converted
        world.step()
    arena = world.cache._pools[0].arena
    before = [arena.slab_used(slab) for slab in range(arena.num_slabs)]
    assert not world.cache.plan_recodes(64)
    assert before == [arena.slab_used(slab) for slab in range(arena.num_slabs)]


def test_moves_end_whatever_is_wanted() -> None:
    world, _ = scattered("int8", 32)
    arena = world.cache._pools[0].arena
    steps, free, first = 0, arena.num_free_slabs, arena.num_free_slabs
    while batches := world.cache.plan_recodes(64, wanted_tokens=10**6):
        for batch in batches:
            world.arenas[batch.group].recode(batch)
        world.cache.finish_recodes(batches)
        world.check()
        assert arena.num_free_slabs >= free, "a slab that was emptied is filled again"
        free = arena.num_free_slabs
        assert (steps := steps + 1) < 200, "moving does not end"
    assert free > first
    assert not is_cramped(world.cache._pools[0], 16, 10**6)


def test_what_is_wanted_is_what_the_head_lacks() -> None:
    world, _ = scattered("int8", 32, recode_tokens=0)
    planner = world.scheduler._planner
    assert planner.wanted_tokens == 0
    head = world.add(ids(99, world.cache.room_tokens() + 300), max_tokens=2, use_prefix_cache=False)
    world.step()
    assert head.status is RequestStatus.WAITING
    assert planner.wanted_tokens >= world.cache.room_tokens() + 1
    world.apply(max_num_seqs=4)  # it waits for its turn now, whatever the room
    world.step()
    assert planner.wanted_tokens == 0
    world.apply(max_num_seqs=64)
    world.step()
    assert planner.wanted_tokens > 0
    world.scheduler.abort(head.request_id)
    assert planner.wanted_tokens == 0
