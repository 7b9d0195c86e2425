"""The cache's face: slots and tables, all-or-nothing allocation, incremental reading, settings, gauges, snapshots."""

from __future__ import annotations

import random

import pytest
from cache_world import SLAB_BYTES, World, ids

from engine.arena import IntegrityError
from engine.plan import Entry


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_every_offered_block_size_at_every_length(block_size: int) -> None:
    """Case C.11, the bookkeeping's half: tables cover exactly what was written, whatever the length."""
    world = World(values={"block_size": block_size}, num_slabs=6)
    for length in [*range(1, 50), 63, 64, 65, 127, 128, 129, 255, 256, 257, 3 * block_size + 1]:
        if length > 3 * block_size + 1:
            continue
        request = world.request(ids(length, length), use_prefix_cache=False)
        assert world.cache.allocate(request, length)
        table = world.table(request)
        assert sum(valid for *_, valid in table) == length
        assert [first for _, _, first, _ in table] == list(range(0, length, block_size))
        slots = world.cache.slots(request, 0, length, 0)
        offsets = {first: offset for _, offset, first, _ in table}
        assert slots == [(offsets[i // block_size * block_size], i % block_size) for i in range(length)]
        world.cache.free(request)
        world.cache.check_integrity()


@pytest.mark.parametrize("size", [0, 1, 8, 24, 48, 512, -16, "16 tokens"])
def test_any_other_block_size_is_refused_with_the_list(size: object) -> None:
    world = World()
    with pytest.raises(ValueError, match="16, 32, 64, 128, 256"):
        world.cache.apply({**world.values, "block_size": size})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="block_size"):
        World(values={"block_size": size})
    assert world.cache._settings.block_size == 16


def test_construction_refuses_what_cannot_work() -> None:
    with pytest.raises(ValueError, match="at least"):
        World(num_slabs=2)
    with pytest.raises(ValueError, match="recent_tokens"):
        World(recent_tokens=33)
    with pytest.raises(ValueError, match="sinks"):
        World(sinks=-16)
    with pytest.raises(ValueError, match="watermark"):
        World(watermark=1.0)


def test_failed_allocation_changes_nothing() -> None:
    world = World(num_slabs=3)  # two slabs, 512 tokens, for requests
    first, second = world.request(ids(1, 400)), world.request(ids(2, 400))
    assert world.cache.allocate(first, 400)
    before = (world.cache.usage(), world.cache.entries_version(first, 0), world.table(first))
    assert not world.cache.allocate(second, 200)
    first.num_computed_tokens = 400
    assert not world.cache.allocate(first, 113)
    assert (world.cache.usage(), world.cache.entries_version(first, 0), world.table(first)) == before
    assert not world.cache.holds(second)
    assert world.cache.allocate(first, 112)
    world.cache.check_integrity()


def test_a_group_without_room_undoes_the_others() -> None:
    world = World(num_slabs=3, windows=(None, 64))
    request = world.request(ids(1, 600))
    assert not world.cache.allocate(request, 600)
    assert world.cache.usage().used_bytes == 0
    world.cache.check_integrity()


def test_max_sequence_is_what_really_fits() -> None:
    for block_size in (16, 64, 256):
        world = World(num_slabs=5, values={"block_size": block_size})
        most = world.cache.max_sequence_tokens()
        assert most == 4 * 256
        assert world.cache.can_ever_fit(most)
        assert not world.cache.can_ever_fit(most + 1)
        request = world.request(ids(1, most))
        assert world.cache.allocate(request, most)
        request.num_computed_tokens = most
        assert not world.cache.allocate(request, 1)


def test_when_no_slab_is_left_other_sizes_are_used() -> None:
    world = World(num_slabs=3)
    small = world.request(ids(1, 250), use_prefix_cache=False)
    large = world.request(ids(2, 300), use_prefix_cache=False)
    assert world.cache.allocate(small, 240)  # 15 of 16 blocks of a slab
    world.cache.apply({**world.values, "block_size": 256})
    assert world.cache.allocate(large, 256)
    large.num_computed_tokens = 256
    assert world.cache.allocate(large, 10)
    assert [first for _, _, first, _ in world.table(large)] == [0, 256]
    assert world.sizes(large) == [("native", 256), ("native", 16)]
    world.cache.check_integrity()


def test_a_plan_that_was_not_run_gives_its_surplus_back() -> None:
    world = World()
    request = world.request(ids(1, 200))
    assert world.cache.allocate(request, 128)
    assert world.cache.allocate(request, 40)
    assert sum(valid for *_, valid in world.table(request)) == 40
    assert world.cache.num_entries(request, 0) == 3
    world.cache.check_integrity()


def test_incremental_reading_equals_reading_everything() -> None:
    """Random life; a reader that follows the documented recipe always has the whole table right."""
    rng = random.Random(5)
    world = World(num_slabs=12, recode_tokens=96, values={"max_num_batched_tokens": 128}, windows=(None, 64))
    seen: dict[tuple[str, int], tuple[int, list[Entry]]] = {}
    requests = [world.add(ids(i % 3, 200) + ids(50 + i, 40), max_tokens=150) for i in range(6)]
    partial = 0
    for step in range(230):
        if step % 23 == 5:
            world.apply(
                kv_format=rng.choice(["native", "int8", "int4"]), block_size=rng.choice([16, 32, 64, 256]),
                eviction=rng.choice(["none", "window", "heavy_hitter"]), keep_tokens=128,
            )  # fmt: skip
        plan = world.scheduler.schedule()
        for sequence in plan.sequences:
            for group in range(2):
                key = (sequence.request.request_id, group)
                version, rows = seen.get(key, (0, []))
                count = world.cache.num_entries(sequence.request, group)
                changed = world.cache.first_changed_index(sequence.request, group, version)
                start = min(changed, count - 1)
                partial += start > 0
                rows = [*rows[:start], *world.cache.entries(sequence.request, group, start)]
                assert rows == world.cache.entries(sequence.request, group)
                assert len(rows) == count
                now = world.cache.entries_version(sequence.request, group)
                assert (changed == count) or now > version
                seen[key] = (now, rows)
        world.scheduler.update(plan, world.run_plan(plan))
    assert partial > 200
    assert any(request.output_ids for request in requests)


def test_versions_never_repeat_after_a_preemption() -> None:
    world = World(num_slabs=3)
    request = world.request(ids(1, 64), use_prefix_cache=False)
    assert world.cache.allocate(request, 64)
    before = world.cache.entries_version(request, 0)
    world.cache.free(request)
    assert world.cache.allocate(request, 64)
    assert world.cache.entries_version(request, 0) > before
    assert world.cache.first_changed_index(request, 0, before) == 0


def test_slots_of_what_is_not_allocated_are_a_bug() -> None:
    world = World()
    request = world.request(ids(1, 64))
    assert world.cache.allocate(request, 20)
    with pytest.raises(IntegrityError):
        world.cache.slots(request, 16, 17, 0)
    with pytest.raises(KeyError):
        world.cache.entries(world.request([1]), 0)


def test_free_is_idempotent_and_a_second_match_is_a_bug() -> None:
    world = World()
    world.add(ids(1, 100), max_tokens=1)
    world.run()
    request = world.request(ids(1, 100))
    assert world.cache.match_prefix(request) == 96
    with pytest.raises(IntegrityError):
        world.cache.match_prefix(request)
    world.cache.free(request)
    world.cache.free(request)
    world.cache.check_integrity()


def test_gauges_add_up() -> None:
    world = World(num_slabs=8, recode_tokens=0)
    assert world.cache.usage().kv_usage == 0.0
    assert world.cache.usage().pool_bytes == 8 * SLAB_BYTES
    request = world.add(ids(1, 512), max_tokens=20)
    world.step()
    usage = world.cache.usage()
    assert usage.kv_usage == 512 / (7 * 256)
    assert (usage.used_bytes, usage.cached_bytes, usage.resident_tokens) == (2 * SLAB_BYTES, 0, 512)
    world.apply(kv_format="int4")
    assert 0 < world.cache.converged_fraction() < 1
    batches = world.cache.plan_recodes(100_000)
    assert world.cache.usage().kv_usage > usage.kv_usage  # both copies for now
    world.arenas[0].recode(batches[0])
    world.cache.finish_recodes(batches)
    rows = world.cache.resident()
    assert [(row.kv_format, row.block_size, row.tokens) for row in rows] == [("native", 16, 32), ("int4", 32, 480)]
    assert sum(row.bytes for row in rows) == world.cache.usage().used_bytes
    world.scheduler.abort(request.request_id)
    assert world.cache.usage().kv_usage == 0.0
    assert world.cache.usage().cached_bytes == sum(row.bytes for row in world.cache.resident()) > 0


def test_idle_ends_at_zero_round_after_round() -> None:
    """Case G.27: nothing is left held when nothing runs, and nothing grows."""
    world = World(num_slabs=6, recode_tokens=128, values={"max_num_seqs": 16})
    cached = []
    for round_ in range(6):
        for i in range(40):
            world.add(ids(i % 7, 20 + 9 * (i % 11)), max_tokens=1 + i % 5)
        world.apply(kv_format=["native", "int8", "int4"][round_ % 3], block_size=[16, 64][round_ % 2])
        world.run()
        world.check()
        assert world.cache.usage().used_bytes == 0
        cached.append(world.cache.usage().cached_bytes)
    assert max(cached) <= 6 * SLAB_BYTES
    world.cache.drop_idle()
    assert world.cache.resident() == []
    assert world.cache._pools[0].arena.num_free_slabs == 6


def test_snapshot_and_restore_are_exact_and_repeatable() -> None:
    def life(world: World, steps: int) -> list[object]:
        tables = []
        for _ in range(steps):
            plan = world.scheduler.schedule()
            world.scheduler.update(plan, world.run_plan(plan))
            tables.append([(r.request_id, world.table(r), list(r.output_ids)) for r in world.scheduler.running])
        return tables

    world = World(num_slabs=8, values={"kv_format": "int8"}, recode_tokens=64)
    for i in range(5):
        world.add(ids(i % 2, 150) + ids(i + 9, 30), max_tokens=60)
    life(world, 6)
    snapshot, arena, rng = world.scheduler.snapshot(), world.arenas[0].data.copy(), world.random.getstate()
    expected = life(world, 40)
    for _ in range(2):
        world.scheduler.restore(snapshot)
        world.arenas[0].data[:] = arena
        world.random.setstate(rng)
        world.check()
        assert life(world, 40) == expected
        world.check()


def test_integrity_check_can_fail() -> None:
    world = World()
    request = world.add(ids(1, 100), max_tokens=20)
    world.step()
    pool = world.cache._pools[0]
    block = world.cache._by_request[request.request_id].tables[0].blocks[0]
    for harm, mend in [
        (block.holders.clear, lambda: block.holders.update({1: None})),
        (lambda: pool.idle.blocks.update({block.offset: block}), pool.idle.blocks.clear),
        (lambda: setattr(block, "filled", 300), lambda: setattr(block, "filled", 16)),
        (lambda: setattr(block, "in_recode", True), lambda: setattr(block, "in_recode", False)),
        (lambda: setattr(pool, "resident_bytes", 1), lambda: setattr(pool, "resident_bytes", 7 * 512)),
    ]:
        harm()
        with pytest.raises(IntegrityError):
            world.cache.check_integrity()
        mend()
        world.cache.check_integrity()
