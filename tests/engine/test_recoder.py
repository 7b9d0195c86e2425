"""Live conversion of resident blocks: what is converted to what, when, and that it always can go on."""

from __future__ import annotations

import pytest
from cache_world import World, ids

from engine.events import BlocksRecoded, RecodesCancelled
from engine.plan import RecodeBatch

FORMATS = ["native", "int8", "k8v4", "int4"]
SIZES = [16, 32, 64, 128, 256]


def settle(world: World, most: int = 400) -> int:
    """Recode between steps until nothing is left, with bytes checked; the tokens that it took."""
    total = 0
    while batches := world.cache.plan_recodes(256):
        assert (most := most - 1) > 0, "recoding does not end"
        for batch in batches:
            world.arenas[batch.group].recode(batch)
            total += batch.num_tokens
        world.cache.finish_recodes(batches)
        world.check()
    return total


def old_part(world: World, request: object, recent: int = 32) -> set[tuple[str, int]]:
    """Classes of the blocks that end before the recent tokens and the last whole span of 256."""
    limit = (request.num_computed_tokens - recent) // 256 * 256  # type: ignore[attr-defined]
    entries, sizes = world.table(request), world.sizes(request)  # type: ignore[arg-type]
    return {size for (_, _, first, valid), size in zip(entries, sizes, strict=True) if first + valid <= limit}


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("block_size", SIZES)
def test_every_switch_converges_to_the_target_class(kv_format: str, block_size: int) -> None:
    world = World(num_slabs=16, recode_tokens=0)
    request = world.add(ids(1, 600), max_tokens=100)
    for _ in range(3):
        world.step()
    assert world.cache.converged_fraction() == 1.0
    world.apply(kv_format=kv_format, block_size=block_size)
    settle(world)
    size = block_size if kv_format == "native" else max(32, block_size)
    assert old_part(world, request) == {(kv_format, size)}
    assert world.cache.converged_fraction() == 1.0
    kinds = [kind for kind, *_ in world.table(request)]
    assert kinds[-2:] == ["native", "native"]  # the recent tokens
    assert not world.cache.has_recode_work()


@pytest.mark.parametrize(("block_size", "part"), [(16, 16), (32, 16), (64, 16), (128, 32), (256, 64)])
def test_what_is_old_of_a_block_that_is_not_full_is_quantised_and_later_merged(block_size: int, part: int) -> None:
    """New tokens go to parts of a block, so at most a part and a tile more than the recent tokens stay native."""
    world = World(num_slabs=16, sync=True, recent_tokens=64, values={"kv_format": "int4", "block_size": block_size})
    request = world.add(ids(1, 300), max_tokens=230)
    tile, size = max(32, part), max(32, block_size)
    while world.scheduler.has_work:
        world.step()
        world.check()
        if len(request.output_ids) < 3 or not world.cache.holds(request):
            continue
        sizes, computed = world.sizes(request), request.num_computed_tokens
        native = [size for kind, size in sizes if kind == "native"]
        assert set(native) == {part}
        assert sum(native) <= 64 + tile + part
        assert sizes.count(("int4", size)) >= (computed - 1 - 64) // size  # as of the step before
        assert {kind for kind in sizes if kind[0] == "int4"} <= {("int4", size), ("int4", tile)}
    assert world.cache.converged_fraction() == 1.0


def test_sequences_that_stay_native_write_whole_blocks() -> None:
    world = World(num_slabs=16, lossiest=("native", None), windows=(None, None), values={"block_size": 256})
    world.apply(kv_format="int4")
    free, floored = world.add(ids(1, 300)), world.add(ids(2, 300), kv_format_floor="native")
    world.step()
    assert {size for _, size in world.sizes(free, 0)} == {size for _, size in world.sizes(floored, 1)} == {256}
    assert ("native", 64) in world.sizes(free, 1)


def test_formats_only_get_lossier_and_what_is_held_below_is_told() -> None:
    world = World(num_slabs=16, values={"kv_format": "int4", "block_size": 64})
    request = world.add(ids(1, 600), max_tokens=200)
    for _ in range(20):
        world.step()
    assert old_part(world, request) == {("int4", 64)}
    assert world.cache.usage().held_below_format_bytes == 0
    world.apply(kv_format="int8", block_size=32)
    for _ in range(20):
        world.step()
    assert old_part(world, request) == {("int4", 32)}  # split, bit-equal
    assert world.cache.usage().held_below_format_bytes > 0
    world.apply(kv_format="native")
    for _ in range(150):
        world.step()
    kinds = [kind for kind, *_ in world.table(request)]
    assert kinds == sorted(kinds, key=FORMATS.index, reverse=True)
    assert kinds.count("native") > 5  # what came after stays native


def test_budget_bounds_a_step() -> None:
    world = World(num_slabs=16, recode_tokens=64, values={"kv_format": "int8"})
    world.add(ids(1, 640), max_tokens=50)
    used = [sum(batch.num_tokens for batch in world.step().recodes) for _ in range(20)]
    assert max(used) == 64
    assert sum(used) == 608  # 640 + 20 computed, less 32 recent, in whole tiles
    world.apply(block_size=256)
    assert max(sum(batch.num_tokens for batch in world.step().recodes) for _ in range(5)) == 256  # one unit at least


def test_shared_blocks_are_converted_once_under_all_holders_and_the_cache() -> None:
    world = World(num_slabs=16, recode_tokens=0)
    base = ids(1, 256)
    requests = []
    for i in range(4):
        requests.append(world.add([*base, *ids(10 + i, 80)], max_tokens=60))
        world.step()
        world.step()
    assert [request.num_cached_tokens for request in requests] == [0, 256, 256, 256]
    world.apply(kv_format="int8", block_size=64)
    tokens = settle(world)
    assert tokens == 256 + 4 * 32  # of 256..320, their own, half is old: one tile each
    tables = [world.table(request)[:4] for request in requests]
    assert tables[0] == tables[1] == tables[2] == tables[3]
    assert {entry[0] for entry in tables[0]} == {"int8"}
    late = world.add([*base, 1, 2, 3], max_tokens=2)
    world.step()
    assert late.num_cached_tokens == 256
    assert world.table(late)[:4] == tables[0]
    world.run(check=True)


def test_a_floor_keeps_blocks_and_those_shared_with_it() -> None:
    world = World(num_slabs=16, recode_tokens=0)
    base = ids(1, 256)
    strict = world.add([*base, *ids(2, 100)], max_tokens=200, kv_format_floor="native")
    world.step()
    mild = world.add([*base, *ids(3, 100)], max_tokens=200, kv_format_floor="int8")
    world.step()
    free = world.add([*base, *ids(4, 100)], max_tokens=200)
    world.step()
    world.apply(kv_format="int4")
    settle(world)
    assert {entry[0] for entry in world.table(strict)} == {"native"}
    assert {entry[0] for entry in world.table(mild)} == {"native", "int8"}
    assert {entry[0] for entry in world.table(free)} == {"native", "int4"}
    assert {entry[0] for entry in world.table(free) if entry[2] < 256} == {"native"}
    world.scheduler.abort(strict.request_id)  # the next strictest holder decides
    settle(world)
    assert {entry[0] for entry in world.table(free) if entry[2] < 256} == {"int8"}
    world.scheduler.abort(mild.request_id)
    settle(world)
    assert {entry[0] for entry in world.table(free) if entry[2] < 256} == {"int4"}
    world.check()


def test_shared_blocks_wait_until_the_youngest_holder_has_left_them() -> None:
    world = World(num_slabs=16, recent_tokens=64, recode_tokens=0, values={"kv_format": "int8"})
    base = ids(1, 128)
    old = world.add([*base, *ids(2, 200)], max_tokens=100)
    world.step()
    young = world.add([*base, 5], max_tokens=100)
    world.step()
    settle(world)
    assert [entry[0] for entry in world.table(old) if entry[2] < 128] == ["int8", "int8"] + ["native"] * 4
    for _ in range(70):
        world.step()
    settle(world)
    assert {entry[0] for entry in world.table(young) if entry[2] < 128} == {"int8"}


@pytest.mark.parametrize("ran", [True, False])
def test_cancelled_between_plan_and_finish(ran: bool) -> None:
    world = World(num_slabs=16, recode_tokens=0)
    request = world.add(ids(1, 400), max_tokens=20, use_prefix_cache=False)
    world.step()
    world.apply(kv_format="int8")
    batches = world.cache.plan_recodes(10_000)
    world.scheduler.abort(request.request_id)
    world.cache.check_integrity()
    assert world.cache.usage().used_bytes > 0  # storage with conversions in flight
    if ran:
        world.arenas[0].recode(batches[0])
        world.cache.finish_recodes(batches)
    else:
        world.cache.cancel_recodes(batches)
    assert world.cache.usage().used_bytes == world.cache.usage().cached_bytes == 0
    assert len(world.events.of(RecodesCancelled)) == 1
    assert not world.events.of(BlocksRecoded)
    world.check()


def test_a_strict_hit_between_plan_and_finish_keeps_the_blocks() -> None:
    world = World(num_slabs=16, recode_tokens=0)
    world.add(ids(1, 400), max_tokens=1)
    world.run()
    world.apply(kv_format="int8")
    batches = world.cache.plan_recodes(10_000)
    strict = world.request([*ids(1, 400), 7], kv_format_floor="native")
    assert world.cache.match_prefix(strict) == 400
    world.arenas[0].recode(batches[0])
    world.cache.finish_recodes(batches)
    assert {entry.format_code for entry in world.cache.entries(strict, 0)} == {0}
    world.check()


def test_settings_that_went_back_stop_what_was_planned() -> None:
    world = World(num_slabs=16, recode_tokens=0)
    request = world.add(ids(1, 400), max_tokens=20)
    world.step()
    world.apply(kv_format="int4")
    batches = world.cache.plan_recodes(10_000)
    world.apply(kv_format="native")
    world.arenas[0].recode(batches[0])
    world.cache.finish_recodes(batches)
    assert {entry[0] for entry in world.table(request)} == {"native"}
    assert world.cache.usage().held_below_format_bytes == 0


def test_idle_cached_blocks_are_converted_too() -> None:
    world = World(num_slabs=16, recode_tokens=0)
    world.add(ids(1, 400), max_tokens=1)
    world.run()
    before = world.cache.usage().cached_bytes
    world.apply(kv_format="int4", block_size=64)
    settle(world)
    rows = {(row.kv_format, row.block_size): row.tokens for row in world.cache.resident()}
    # 384 tokens in blocks of 64; the last 16 are half a tile, which nothing can complete any more.
    assert rows == {("int4", 64): 384, ("native", 16): 16}
    assert world.cache.usage().cached_bytes < 0.6 * before
    late = world.add([*ids(1, 400), 7], max_tokens=3)
    world.step()
    assert late.num_cached_tokens == 400
    world.run(check=True)


def test_an_evicted_holder_gets_no_dropped_tokens_back_by_a_merge() -> None:
    world = World(num_slabs=16, recode_tokens=0, values={"eviction": "window", "keep_tokens": 128})
    base = ids(1, 256)
    keeper = world.add([*base, *ids(2, 40)], max_tokens=100, allow_eviction=False)
    world.step()
    dropper = world.add([*base, *ids(3, 40)], max_tokens=200)
    for _ in range(10):
        world.step()
    assert dropper.num_evicted_tokens == 160  # 16 .. 176 of 306 - 128 = 178
    assert keeper.num_evicted_tokens == 0
    world.apply(block_size=256)
    settle(world)
    firsts = [entry[2] for entry in world.table(dropper)]
    assert not [first for first in firsts if 16 <= first < 176]
    world.run(check=True)


@pytest.mark.parametrize("late", [True, False])
def test_a_moved_block_that_grew_meanwhile_stays_where_it_was(late: bool) -> None:
    world = World(num_slabs=16, recode_tokens=0)
    request = world.add(ids(1, 40), max_tokens=20)
    world.step()
    table = world.table(request)
    tail = world.cache._by_request[request.request_id].tables[0].blocks[-1]
    unit = world.cache._recoders[0]._swaps.start([tail], tail.block_class, may_cut=True)
    assert unit is not None
    world.cache._in_flight[0] = [unit]
    batch = RecodeBatch(0, tuple(unit.jobs()), unit.num_tokens)
    world.arenas[0].recode(batch)
    if late:
        world.step()
    world.cache.finish_recodes([batch])
    assert (world.table(request)[-1][1] == table[-1][1]) == late
    assert len(world.events.of(RecodesCancelled)) == late
    world.run(check=True)


def test_sync_mode_converts_everything_at_the_next_boundary() -> None:
    world = World(num_slabs=16, sync=True, recode_tokens=0)
    request = world.add(ids(1, 600), max_tokens=100)
    for _ in range(3):
        world.step()
    world.apply(kv_format="int8", block_size=64)
    world.step()
    assert world.cache.converged_fraction() == 1.0
    assert old_part(world, request) == {("int8", 64)}


def test_a_second_plan_waits_for_the_first() -> None:
    world = World(num_slabs=16, recode_tokens=0)
    world.add(ids(1, 400), max_tokens=20)
    world.step()
    world.apply(kv_format="int8")
    batches = world.cache.plan_recodes(32)
    assert batches
    assert world.cache.plan_recodes(32) == ()
    world.cache.cancel_recodes(batches)
    assert world.cache.plan_recodes(32) == batches  # the same targets again


@pytest.mark.parametrize("kv_format", ["int8", "k8v4", "int4"])
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("count", [1, 5, 14])
def test_a_full_pool_still_converts_through_the_reserve(kv_format: str, block_size: int, count: int) -> None:
    world = World(num_slabs=8, recode_tokens=0, values={"max_num_batched_tokens": 2048})
    each = 7 * 16 // count * 16 - 1
    requests = [world.add(ids(i, each), max_tokens=2, use_prefix_cache=False) for i in range(count)]
    world.step()
    pool = world.cache._pools[0]
    assert len(world.scheduler.running) == count
    assert pool.arena.num_free_slabs == 1
    before = pool.room.available_tokens(16)
    assert before <= 32
    world.apply(kv_format=kv_format, block_size=block_size)
    eligible = sum((each - 32) // max(block_size, 32) * max(block_size, 32) for _ in requests)
    assert settle(world) >= eligible
    stored = sum(row.tokens for row in world.cache.resident() if row.kv_format == kv_format)
    assert stored >= eligible
    if kv_format == "int4" and eligible:
        assert pool.room.available_tokens(block_size) > before + eligible // 4


def test_compaction_frees_a_slab_when_strict_blocks_pin_them_all() -> None:
    world = World(num_slabs=6, recode_tokens=0, recent_tokens=0, values={"max_num_batched_tokens": 2048})
    strict, free = [], []
    for i in range(20):  # interleaved, so that every slab holds blocks of both kinds
        free.append(world.add(ids(i, 48), max_tokens=40, use_prefix_cache=False))
        strict.append(world.add(ids(100 + i, 16), max_tokens=40, use_prefix_cache=False, kv_format_floor="native"))
        world.step()
    world.cache.check_integrity()
    pool = world.cache._pools[0]
    assert pool.arena.num_free_slabs == 1
    world.apply(kv_format="int8")
    for _ in range(100):
        batches = world.cache.plan_recodes(64)
        if not batches:
            break
        world.cache.finish_recodes(batches)
        world.cache.check_integrity()
    assert world.cache.converged_fraction() == 1.0
    # 20 int8 blocks in two slabs, 40 native ones in three: the reserve is back.
    assert pool.arena.num_free_slabs == 1


def test_blocks_that_a_step_writes_are_not_movable_inside_it() -> None:
    world = World(num_slabs=16, recode_tokens=0, values={"max_num_batched_tokens": 64})
    request = world.add(ids(1, 150), max_tokens=20)
    world.step()
    world.apply(max_num_batched_tokens=128)
    recoder = world.cache._recoders[0]
    plan = world.scheduler.schedule()  # writes 64 .. 150
    blocks = world.cache._by_request[request.request_id].tables[0].blocks
    assert [recoder._compactor.is_movable(block, in_step=True) for block in blocks] == [True] * 4 + [False] * 6
    world.scheduler.update(plan, world.run_plan(plan))
    assert all(recoder._compactor.is_movable(block, in_step=False) for block in blocks)


def test_idle_blocks_between_held_ones_do_not_keep_slabs_from_requests() -> None:
    world = World(num_slabs=8, recode_tokens=0, recent_tokens=0, values={"max_num_batched_tokens": 2048})
    requests = []
    for i in range(27):
        requests.append(world.add(ids(i, 66), max_tokens=60))
        world.step()
    world.apply(kv_format="int8")
    settle(world)
    pool = world.cache._pools[0]
    for i in range(27, 60):  # int8 leaves room for more of the same
        requests.append(world.add(ids(i, 66), max_tokens=60))
        world.step()
        settle(world)
    for index, request in enumerate(requests):
        if index % 4 and request.request_id in world.scheduler._queues.requests:
            world.scheduler.abort(request.request_id)
    world.cache.check_integrity()
    held = {block.offset // pool.arena.slab_units for block in pool.blocks.values() if block.holders}
    spare = pool.arena.num_free_slabs + pool.idle.num_whole_slabs
    settle(world)
    world.cache.check_integrity()
    left = {block.offset // pool.arena.slab_units for block in pool.blocks.values() if block.holders}
    assert spare <= pool.reserve_slabs, "the scene needs a pool without a slab to spare"
    assert len(left) < len(held)
    assert pool.arena.num_free_slabs + pool.idle.num_whole_slabs > pool.reserve_slabs
