"""Why cached blocks went, how long they lived and lay idle, and how long until they were used again."""

from __future__ import annotations

from typing import Any

from cache_world import World, ids

from engine.block_lives import AGE_BOUNDS_S, BlockLives
from engine.buckets import Buckets
from engine.clock import ManualClock
from engine.formats import BlockClass
from engine.pool_block import Block


def use(world: World, prompt: list[int], **policy: Any) -> None:
    world.add(prompt, 1, **policy)
    world.run(check=True)


def count(buckets: Buckets) -> int:
    return sum(buckets.counts)


def within(buckets: Buckets, low_s: float, high_s: float) -> int:
    """Values in buckets that end in (low, high]."""
    return sum(n for bound, n in zip(buckets.bounds, buckets.counts, strict=False) if low_s < bound <= high_s)


def test_ages_by_the_clock() -> None:
    clock = ManualClock(start_ns=7)
    lives = BlockLives(clock)
    block = Block(0, BlockClass("native", 16), 0)
    lives.cached(block)
    clock.advance_s(4)
    lives.cached(block)  # more of it; no new life
    clock.advance_s(4)
    lives.reused(block)
    clock.advance_s(1)
    lives.let_go(block)
    clock.advance_s(0.05)
    lives.gone(block, "room")
    assert (lives.lifetime.total, lives.idle.total, lives.reuse_gap.total) == (9.05, 0.05, 8.0)
    lives.cached(block)
    lives.gone(block, "orphaned")
    assert (count(lives.lifetime), lives.lifetime.total) == (2, 9.05)
    assert lives.dropped == {"room": 1, "unpinned": 0, "orphaned": 1, "displaced": 0, "cleared": 0}
    copy = lives.copy()
    lives.reused(block)
    assert count(copy.reuse_gap) == 1
    assert list(AGE_BOUNDS_S) == sorted(AGE_BOUNDS_S)


def test_given_up_for_room() -> None:
    world = World(num_slabs=3)
    lives = world.cache.lives
    use(world, ids(1, 160))
    world.clock.advance_s(50)
    use(world, ids(1, 161))
    assert count(lives.reuse_gap) == 10 - 1 + 1  # the first prompt's whole chunks
    assert within(lives.reuse_gap, 30, 60) == 10
    world.clock.advance_s(500)
    use(world, ids(2, 480))
    assert lives.dropped["room"] == count(lives.lifetime) == count(lives.idle) == 8
    assert within(lives.lifetime, 300, 600) == within(lives.idle, 300, 600) == 8
    assert sum(lives.dropped.values()) == 8


def test_converting_ends_no_life() -> None:
    world = World(num_slabs=8, recode_tokens=10_000)
    lives = world.cache.lives
    use(world, ids(1, 160))
    world.clock.advance_s(100)
    world.apply(kv_format="int8", block_size=32)
    use(world, ids(2, 40))
    assert sum(lives.dropped.values()) == count(lives.lifetime) == 0
    world.clock.advance_s(100)
    use(world, ids(1, 161))
    assert within(lives.reuse_gap, 180, 300) == 5
    world.cache.drop_idle()
    assert within(lives.lifetime, 180, 300) == 5
    assert lives.dropped["cleared"] == count(lives.lifetime)


def test_displaced_by_better() -> None:
    world = World(num_slabs=8, values={"kv_format": "int4"}, sync=True)
    use(world, ids(1, 320))
    world.apply(kv_format="native")
    use(world, ids(1, 320))
    dropped = world.cache.lives.dropped
    assert dropped["displaced"] == 10
    assert sum(dropped.values()) == 10


def test_unpinned() -> None:
    world = World(num_slabs=5)
    use(world, ids(1, 160), prefix_ttl_s=10.0)
    use(world, ids(2, 160), prefix_ttl_s=10.0)
    world.clock.advance_s(20)
    use(world, ids(2, 161))  # used after its pin: as any other from now on
    for seed in range(10, 30):
        use(world, ids(seed, 100))
    dropped = world.cache.lives.dropped
    assert dropped["unpinned"] == 10
    assert dropped["room"] > 10


def test_orphaned() -> None:
    """A whole slab went to another class; blocks elsewhere that follow what was in it went with it."""
    world = World(num_slabs=3)
    use(world, ids(1, 400))
    world.cache._pools[0].give_up_idle(0)
    world.check()
    dropped = world.cache.lives.dropped
    assert dropped["room"] + dropped["orphaned"] == 25
    assert dropped["orphaned"] >= 9
    assert world.cache.usage().cached_bytes == 0


def test_restoring_a_snapshot_takes_nothing_back() -> None:
    world = World(num_slabs=3)
    use(world, ids(1, 160))
    snapshot = world.scheduler.snapshot()
    world.cache.drop_idle()
    world.scheduler.restore(snapshot)
    assert world.cache.lives.dropped["cleared"] == 10
