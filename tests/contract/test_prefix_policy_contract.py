"""What every prefix policy promises, whatever its order: one suite over all of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from cache_world import World, ids

from engine.idle_blocks import IdleBlocks
from engine.pool_block import Block
from engine.tunables import TUNABLES

POLICIES = TUNABLES["prefix_eviction"].values


def use(world: World, prompt: list[int], max_tokens: int = 1, **policy: Any) -> int:
    """Send a prompt, let it end; how much of it was a hit."""
    request = world.add(prompt, max_tokens, **policy)
    world.run()
    return request.num_cached_tokens


def conversations(world: World, seed: int, turns: int) -> list[int]:
    """Sessions that grow, and prompts that come once; the hits of each."""
    rng = random.Random(seed)
    sessions = [ids(i, 40) for i in range(4)]
    hits = []
    for turn in range(turns):
        if rng.random() < 0.5:
            hits.append(use(world, ids(1000 + turn, rng.randrange(20, 200))))
        else:
            index = rng.randrange(4)
            hits.append(use(world, sessions[index]))
            sessions[index] = (sessions[index] + ids(2000 + turn, rng.randrange(10, 50)))[:400]
    return hits


def brute_force(idle: IdleBlocks, block_class: Any) -> tuple[float, int] | None:
    """(priority, last use) of what should go first, looked for among everything."""
    found = [(b.priority, b.last_used) for b in idle.blocks.values() if b.block_class == block_class]
    choose = max if idle._policy.spares_best else min
    for slab, (other, _) in idle._whole.items():
        if other != block_class:
            found.append(choose((b.priority, b.last_used) for b in idle._blocks_in(slab)))
    return min(found, default=None)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_lowest_goes_first_and_nothing_outlives_its_start(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = 0
    original = IdleBlocks.victim

    def victim(idle: IdleBlocks, block_class: Any, avoid_slab: int) -> tuple[Block, bool] | None:
        nonlocal checked
        expected = brute_force(idle, block_class)
        found = original(idle, block_class, avoid_slab)
        if avoid_slab < 0:
            assert (found is None) == (expected is None)
        if found is not None and expected is not None and avoid_slab < 0:
            block, with_slab = found
            choose = max if idle._policy.spares_best else min
            blocks = idle._blocks_in(idle._arena.slab_of(block.offset)) if with_slab else [block]
            assert choose((b.priority, b.last_used) for b in blocks) == expected
            assert with_slab == (block.block_class != block_class)
            checked += 1
        return found

    monkeypatch.setattr(IdleBlocks, "victim", victim)
    world = World(num_slabs=6, values={"prefix_eviction": policy}, recode_tokens=64)
    for round_ in range(6):
        conversations(world, round_, 12)
        world.check()
        world.apply(block_size=[16, 64, 32][round_ % 3], kv_format=["native", "int8"][round_ % 2])
    assert checked > 10


@pytest.mark.parametrize("policy", POLICIES)
def test_a_life_repeats_exactly_also_from_a_snapshot(policy: str) -> None:
    def life(world: World) -> tuple[list[int], list[int]]:
        return conversations(world, 3, 40), sorted(world.cache._pools[0].idle.blocks)

    world = World(num_slabs=5, values={"prefix_eviction": policy})
    conversations(world, 1, 30)
    snapshot = world.scheduler.snapshot()
    state, created = world.random.getstate(), world.created
    expected = life(world)
    assert any(expected[0])
    for _ in range(2):
        world.scheduler.restore(snapshot)
        world.random.setstate(state)
        world.created = created
        world._hashes.clear()
        assert life(world) == expected
        world.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_switching_at_any_time_loses_no_block(policy: str) -> None:
    """A switch reorders; it gives nothing up, and what is chosen next is what that policy chooses."""
    world = World(num_slabs=6, values={"prefix_eviction": policy})
    conversations(world, 5, 20)
    before = set(world.cache._pools[0].idle.blocks)
    for other in (*POLICIES, policy):
        world.apply(prefix_eviction=other)
        world.check()
        assert set(world.cache._pools[0].idle.blocks) == before
        assert world.cache._pools[0].idle._policy.name == other
    running = world.add(ids(77, 300), max_tokens=40)
    for step in range(40):
        world.step()
        world.apply(prefix_eviction=POLICIES[step % 3])
        world.check()
    world.run()
    assert len(running.output_ids) == 40


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recoded_block_keeps_its_place(policy: str) -> None:
    world = World(num_slabs=8, recode_tokens=0, values={"prefix_eviction": policy})
    for _ in range(3):
        use(world, ids(1, 129))
    use(world, ids(2, 129))
    idle = world.cache._pools[0].idle
    order = {block.first: (block.priority, block.last_used) for block in idle if _is_of(world, block, ids(1, 129))}
    world.apply(kv_format="int8", block_size=32)
    world.run()
    while batches := world.cache.plan_recodes(10_000):
        world.arenas[0].recode(batches[0])
        world.cache.finish_recodes(batches)
    world.check()
    merged = {block.first: (block.priority, block.last_used) for block in idle if _is_of(world, block, ids(1, 129))}
    assert merged == {first: max(order[first], order[first + 16]) for first in range(0, 128, 32)}


def _is_of(world: World, block: Block, prompt: list[int]) -> bool:
    path = set(world.cache._prefix._path(prompt, ""))
    return any(node in path for node in block.nodes.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_slab_that_another_class_needs_is_found(policy: str) -> None:
    """Room is room: idle blocks of one size do not keep a request of another size out."""
    world = World(num_slabs=4, values={"prefix_eviction": policy})
    for seed in range(6):
        use(world, ids(seed, 200))
    world.apply(block_size=256)
    request = world.add(ids(50, 700), max_tokens=2)
    world.run(check=True)
    assert len(request.output_ids) == 2
    assert request.num_preemptions == 0
