"""Exact block offsets and free-list order: what the executor is told for a fixed history, number by number.

Shape: 1 layer, 1 head of 8 channels, 2 bytes: a native token is 32 bytes, so a native block of 16 tokens is 2 units of
256 bytes; int8 tiles of 32 tokens are 672 bytes, so an int8 block of 32 tokens is 3 units, and one slab of 256 native
tokens (32 units) holds 16 native blocks of 16, or 10 int8 blocks of 32.
"""

from __future__ import annotations

from cache_world import SHAPE, SLAB_BYTES, World, ids

from engine.arena import Arena
from engine.formats import BlockClass
from kernels.layout import INT8

NATIVE16, NATIVE64 = BlockClass("native", 16), BlockClass("native", 64)


def test_shape_is_as_described() -> None:
    assert SLAB_BYTES == 32 * 256
    assert SHAPE.tile_stride(INT8) == 32 * 8 * 2 + 2 * 8 * 2 + 2 * 32 * 2 == 672


def test_arena_fills_the_fullest_slab_then_the_lowest() -> None:
    arena = Arena(SHAPE, 3, SLAB_BYTES)
    assert [arena.allocate(NATIVE16) for _ in range(17)] == [2 * i for i in range(16)] + [32]
    assert [arena.allocate(NATIVE64) for _ in range(2)] == [64, 72]
    arena.free(4)  # slab 0 has one hole, slab 1 has fifteen
    arena.free(0)
    assert [arena.allocate(NATIVE16) for _ in range(3)] == [0, 4, 34]
    for offset in (32, 34):
        arena.free(offset)
    assert arena.num_free_slabs == 1
    assert [arena.allocate(NATIVE64) for _ in range(3)] == [80, 88, 32]  # the freed slab went to another class
    assert arena.allocate(NATIVE64, keep_slabs=0, avoid_slab=1) is None


def test_sequence_history() -> None:
    world = World(num_slabs=6, recent_tokens=32, recode_tokens=0)
    first = world.add(ids(1, 40), max_tokens=50)
    second = world.add(ids(2, 20), max_tokens=50)
    world.step()
    assert world.table(first) == [("native", 0, 0, 16), ("native", 2, 16, 16), ("native", 4, 32, 8)]
    assert world.table(second) == [("native", 6, 0, 16), ("native", 8, 16, 4)]
    world.apply(block_size=64)
    for _ in range(13):
        world.step()
    # Position 48 is a multiple of 16 only, 32 of 32: the largest size up to 64 that divides the position.
    assert world.table(first) == [
        ("native", 0, 0, 16),
        ("native", 2, 16, 16),
        ("native", 4, 32, 16),
        ("native", 10, 48, 5),
    ]
    assert world.table(second) == [("native", 6, 0, 16), ("native", 8, 16, 16), ("native", 32, 32, 1)]
    for _ in range(12):
        world.step()
    assert world.table(first)[4] == ("native", 64, 64, 1)
    assert world.table(first)[3] == ("native", 10, 48, 16)


def test_recode_and_free_order() -> None:
    world = World(num_slabs=6, recent_tokens=32, recode_tokens=64)
    request = world.add(ids(1, 100), max_tokens=50)
    world.step()
    assert [entry[1] for entry in world.table(request)] == [0, 2, 4, 6, 8, 10, 12]
    world.apply(kv_format="int8")
    plan = world.step()
    # Two int8 blocks of one 32-token tile each, in a fresh slab (slab 1 starts at unit 32); rows: dst format, offset,
    # tile, src format, offset, tile, second source offset, tile.
    assert plan.recodes[0].jobs == ((1, 32, 0, 0, 0, 0, 2, 0), (1, 35, 0, 0, 4, 0, 6, 0))
    assert world.table(request)[:3] == [("int8", 32, 0, 32), ("int8", 35, 32, 32), ("native", 8, 64, 16)]
    world.step()
    other = world.add(ids(2, 33), max_tokens=4)
    world.step()
    assert world.table(other) == [("native", 0, 0, 16), ("native", 2, 16, 16), ("native", 4, 32, 1)]  # freed, reused
    world.check()


def test_block_size_change_copies_tiles() -> None:
    world = World(num_slabs=6, recent_tokens=0, recode_tokens=64, values={"kv_format": "int8"})
    request = world.add(ids(1, 128), max_tokens=50)
    for _ in range(4):
        world.step()
    assert world.table(request)[:4] == [("int8", 32 + 3 * i, 32 * i, 32) for i in range(4)]
    world.apply(block_size=64)
    plan = world.step()
    # int8 blocks of 64 are two tiles, 1344 bytes = 6 units with padding, in slab 2.
    assert plan.recodes[0].jobs == ((1, 64, 0, 1, 32, 0, -1, -1), (1, 64, 1, 1, 35, 0, -1, -1))
    world.step()
    assert world.table(request)[:2] == [("int8", 64, 0, 64), ("int8", 70, 64, 64)]
    world.check()


def test_prefix_hit_inside_a_block_goes_on_in_a_fresh_one() -> None:
    world = World(num_slabs=6, values={"block_size": 64})
    base = ids(1, 120)
    one = world.add(base, max_tokens=30)
    world.step()
    two = world.add([*base[:90], *ids(2, 40)], max_tokens=30)
    world.step()
    assert two.num_cached_tokens == 80
    assert world.table(one)[:2] == [("native", 0, 0, 64), ("native", 8, 64, 57)]
    assert world.table(two) == [
        ("native", 0, 0, 64),
        ("native", 8, 64, 16),  # shared, read-only, half used
        ("native", 32, 80, 16),
        ("native", 64, 96, 32),
        ("native", 16, 128, 2),
    ]
    world.check()


def test_least_recently_used_prefix_goes_first_and_its_end_before_its_start() -> None:
    world = World(num_slabs=3)  # 512 tokens for requests
    for seed in (1, 2, 3):
        world.add(ids(seed, 160), max_tokens=1)
        world.run()
    assert len(world.cache._pools[0].idle) == 30
    hit = world.add(ids(1, 160), max_tokens=1)  # now the most recently used
    world.run()
    assert hit.num_cached_tokens == 144
    world.add(ids(4, 100), max_tokens=1)
    world.run()
    cached = {}
    for seed in (1, 2, 3):
        request = world.add(ids(seed, 160), max_tokens=1)
        cached[seed] = request
        world.step()
        world.scheduler.abort(request.request_id)
    assert cached[1].num_cached_tokens == 144
    # Seven blocks were needed, two were free: prompt 1's last block, which the hit did not use, and four of prompt 2.
    assert cached[2].num_cached_tokens == 96
    assert cached[3].num_cached_tokens > 0
