"""Prefixes pinned for a while: they stay, within a cap, expire by the clock, and never keep a request out for ever."""

from __future__ import annotations

from typing import Any

import pytest
from cache_world import SLAB_BYTES, World, ids

from engine.admission import AdmissionError
from engine.request import Request, RequestStatus


def use(world: World, prompt: list[int], max_tokens: int = 1, **policy: Any) -> Request:
    request = world.add(prompt, max_tokens, **policy)
    world.run(check=True)
    return request


def fill(world: World, seed: int = 500, times: int = 20) -> None:
    """Others want the whole pool, several times over."""
    for number in range(times):
        use(world, ids(seed + number, 200))


def hit(world: World, prompt: list[int], **policy: Any) -> int:
    return use(world, [*prompt, 1], **policy).num_cached_tokens


@pytest.mark.parametrize("policy", ["lru", "lfu", "cost"])
def test_a_pinned_prefix_stays_and_an_expired_one_goes(policy: str) -> None:
    world = World(num_slabs=6, values={"prefix_eviction": policy})
    use(world, ids(1, 160), prefix_ttl_s=60.0)
    use(world, ids(2, 160))
    fill(world)
    assert world.clock.now_ns() < 60e9
    assert world.cache._prefix.match(ids(1, 160), "", 0).num_tokens == 160
    assert world.cache._prefix.match(ids(2, 160), "", 0).num_tokens == 0
    usage = world.cache.usage()
    assert usage.pinned_bytes == 10 * 512
    assert usage.used_bytes == 0
    assert usage.kv_usage == 0.0
    world.clock.advance_s(61)
    assert world.cache.usage().pinned_bytes == 0
    assert hit(world, ids(1, 160)) == 160  # unpinned, not dropped
    world.clock.advance_s(61)
    fill(world, 700)
    assert world.cache._prefix.match(ids(1, 160), "", 0).num_tokens == 0


def test_use_of_the_whole_prefix_renews_and_use_of_a_part_does_not() -> None:
    world = World(num_slabs=6)
    use(world, ids(1, 160), prefix_ttl_s=10.0)
    for _ in range(5):
        world.clock.advance_s(6)
        assert hit(world, ids(1, 160)) == 160
        fill(world, times=8)
    assert len(world.cache.pins) == 1
    world.clock.advance_s(6)
    hit(world, ids(1, 96))
    world.clock.advance_s(6)
    world.step()
    assert len(world.cache.pins) == 0


def test_the_time_counts_from_the_end_of_the_last_use() -> None:
    world = World(num_slabs=6)
    request = world.add(ids(1, 160), max_tokens=100, prefix_ttl_s=1.0)
    while world.scheduler.has_work:
        world.step()
        world.clock.advance_s(0.05)
    assert request.finished_ns is not None
    (row,) = world.cache.pins.to_json()
    assert row["request_id"] == request.request_id
    assert row["num_tokens"] == 160
    assert row["bytes"] == 10 * 512
    assert row["ttl_s"] == 1.0
    assert row["expires_in_s"] > 0.9


def test_the_cap_is_kept_and_the_request_runs_unpinned() -> None:
    world = World(num_slabs=8)  # a quarter: 2 slabs of 16 blocks
    pins = world.cache.pins
    assert pins.max_bytes == 2 * SLAB_BYTES
    use(world, ids(1, 320), prefix_ttl_s=1000.0)
    use(world, ids(2, 320), prefix_ttl_s=1000.0)
    assert (len(pins), world.counters.prefix_pins_made, world.counters.prefix_pins_refused) == (1, 1, 1)
    use(world, ids(1, 320) + ids(3, 192), prefix_ttl_s=1000.0)  # shares what is pinned already
    assert len(pins) == 1  # the longer one took over
    assert pins.num_bytes() == pins.max_bytes
    assert world.counters.prefix_pins_made == 2
    use(world, ids(1, 320) + ids(3, 192), prefix_ttl_s=2000.0)
    assert world.counters.prefix_pins_made == 2  # the same prefix: renewed
    assert pins.to_json()[0]["ttl_s"] == 2000.0


def test_a_shorter_pin_that_ends_later_stays() -> None:
    world = World(num_slabs=8)
    use(world, ids(1, 160), prefix_ttl_s=1000.0)
    use(world, ids(1, 160) + ids(2, 96), prefix_ttl_s=10.0)
    assert [row["num_tokens"] for row in world.cache.pins.to_json()] == [256, 160]
    world.clock.advance_s(20)
    world.step()
    assert [row["num_tokens"] for row in world.cache.pins.to_json()] == [160]
    world.check()


def test_a_lone_request_gets_the_room_and_it_is_counted() -> None:
    world = World(num_slabs=8)
    use(world, ids(1, 240), prefix_ttl_s=1000.0)
    use(world, ids(2, 240), prefix_ttl_s=2000.0)
    assert len(world.cache.pins) == 2
    large = world.add(ids(9, 1760), max_tokens=30)  # 1,789 of the 1,792 that a request may need; 2,048 are there
    world.run(check=True)
    assert len(large.output_ids) == 30
    assert world.counters.prefix_pins_broken == 1
    (row,) = world.cache.pins.to_json()
    assert row["ttl_s"] == 2000.0  # soonest to end goes first


def test_pins_give_way_one_by_one_also_to_a_first_step() -> None:
    world = World(num_slabs=8, values={"max_num_batched_tokens": 2048})
    use(world, ids(1, 240), prefix_ttl_s=1000.0)
    use(world, ids(2, 240), prefix_ttl_s=2000.0)
    large = world.add(ids(9, 1540), max_tokens=2)  # 1,792 less what one pin holds
    world.run(check=True)
    assert len(large.output_ids) == 2
    assert world.counters.prefix_pins_broken == 1
    assert len(world.cache.pins) == 1


@pytest.mark.parametrize("policy", ["lru", "lfu", "cost"])
def test_what_was_pinned_is_as_old_as_its_last_use(policy: str) -> None:
    world = World(num_slabs=6, values={"prefix_eviction": policy})
    use(world, ids(1, 160))
    use(world, ids(2, 160), prefix_ttl_s=1000.0)
    world.cache.pins.unpin()
    use(world, ids(3, 980), use_prefix_cache=False)  # room for all but one of the two
    assert world.cache._prefix.match(ids(1, 160), "", 0).num_tokens < 160
    assert world.cache._prefix.match(ids(2, 160), "", 0).num_tokens == 160


def test_dropping_everything_idle_ends_pins_too() -> None:
    world = World(num_slabs=8)
    use(world, ids(1, 240), prefix_ttl_s=1000.0)
    world.cache.drop_idle()
    assert world.counters.prefix_pins_broken == 1
    assert world.cache.usage().cached_bytes == 0
    world.check()


def test_requests_share_the_rest_of_the_pool_and_all_end() -> None:
    world = World(num_slabs=5)
    use(world, ids(1, 240), prefix_ttl_s=1e5)
    requests = [world.add(ids(10 + i, 150), max_tokens=60) for i in range(8)]
    world.run(check=True)
    assert all(len(request.output_ids) == 60 for request in requests)
    assert len(world.cache.pins) == 1


def test_unpinning_by_hand() -> None:
    world = World(num_slabs=8)
    for seed in range(1, 4):
        use(world, ids(seed, 100), prefix_ttl_s=1000.0)
    ids_ = [row["id"] for row in world.cache.pins.to_json()]
    assert world.cache.pins.unpin(ids_[1]) == 1
    assert world.cache.pins.unpin(ids_[1]) == 0
    assert [row["id"] for row in world.cache.pins.to_json()] == [ids_[0], ids_[2]]
    world.check()
    assert world.cache.pins.unpin() == 2
    assert world.cache.pins.num_bytes() == 0
    world.check()
    assert hit(world, ids(1, 96)) == 96


def test_pinned_blocks_are_recoded_like_others_and_a_floor_holds() -> None:
    world = World(num_slabs=10, recode_tokens=10_000)
    use(world, ids(1, 256), prefix_ttl_s=1000.0)
    use(world, ids(2, 256), prefix_ttl_s=1000.0, kv_format_floor="native")
    world.apply(kv_format="int8", block_size=64)
    use(world, ids(3, 50))
    world.run(check=True)
    assert hit(world, ids(1, 256)) == 256
    assert hit(world, ids(2, 256), kv_format_floor="native") == 256
    tables = [s.tables[0].blocks for s in world.cache._sequences.values()]
    # The last recent_tokens stay native while pinned, as they do under a request that ends there.
    assert [{b.block_class for b in blocks if b.end <= 192} for blocks in tables] == [{("int8", 64)}, {("native", 64)}]
    assert world.cache.pins.num_bytes() < 2 * SLAB_BYTES


def test_a_merge_that_takes_in_what_follows_a_pinned_prefix_does_not_outgrow_the_cap() -> None:
    """A pin of 112 tokens with room for 256 beyond the cap of others: 7 blocks of 16 would become one of 256."""
    world = World(num_slabs=8, recent_tokens=0, recode_tokens=10_000)
    pins = world.cache.pins
    use(world, ids(1, 304), prefix_ttl_s=1000.0)
    use(world, ids(2, 112), prefix_ttl_s=1000.0)
    assert (len(pins), pins.num_bytes()) == (2, 26 * 512)  # of 32
    request = world.add(ids(2, 112) + ids(3, 400), max_tokens=30)
    world.step()
    world.apply(block_size=256)
    for _ in range(20):
        world.step()
        world.check()
        assert pins.num_bytes() <= pins.max_bytes
    assert request.num_cached_tokens == 112
    assert [size for _, size in world.sizes(request)][:6] == [64, 32, 16, 16, 128, 256]
    pins.unpin()
    world.step()
    world.step()
    assert [size for _, size in world.sizes(request)][:2] == [256, 256]


def test_a_pin_made_while_its_blocks_are_converted_does_not_grow_either() -> None:
    world = World(num_slabs=8, recent_tokens=0)
    long = world.add(ids(1, 300), max_tokens=40)
    world.step()
    world.apply(block_size=256)
    batches = world.cache.plan_recodes(10_000)
    assert batches
    match = world.cache._prefix.match(ids(1, 48), "", 0)
    assert world.cache.pins.pin("other", match, 100.0, 3)
    for batch in batches:
        world.arenas[batch.group].recode(batch)
    world.cache.finish_recodes(batches)
    world.check()
    assert world.cache.pins.num_bytes() == 3 * 512
    world.run(check=True)
    assert len(long.output_ids) == 40


def test_a_split_into_blocks_that_are_rounded_up_does_not_outgrow_the_cap() -> None:
    world = World(num_slabs=6, values={"kv_format": "int4", "block_size": 256}, sync=True, recent_tokens=0)
    pins = world.cache.pins
    for seed in (1, 2):
        use(world, ids(seed, 256), max_tokens=20, prefix_ttl_s=1000.0)
    assert (len(pins), pins.num_bytes()) == (2, 2 * 3328)  # in blocks of 32: 2 x 8 x 512
    pins.max_bytes = pins.num_bytes()
    world.apply(block_size=32)
    use(world, ids(3, 50))
    assert pins.num_bytes() == 2 * 3328
    pins.unpin()
    use(world, ids(3, 50))
    assert hit(world, ids(1, 256)) == 256
    assert ("int4", 256) not in world.cache._pools[0].class_counts


def test_a_pin_follows_to_better_blocks() -> None:
    """After int4 went back to native, somebody computes the prefix natively: that is what stays pinned."""
    world = World(num_slabs=10, values={"kv_format": "int4"}, sync=True)
    use(world, ids(1, 256), prefix_ttl_s=1000.0)
    world.apply(kv_format="native")
    use(world, ids(1, 257))
    assert len(world.cache.pins) == 1
    fill(world)
    assert hit(world, ids(1, 256)) == 256
    assert world.cache.usage().held_below_format_bytes == 0


@pytest.mark.parametrize("windows", [(None, 64), (40,)])
def test_groups_with_windows_pin_what_a_hit_needs(windows: tuple[int | None, ...]) -> None:
    world = World(num_slabs=10, windows=windows)
    use(world, ids(1, 250), max_tokens=60, prefix_ttl_s=1000.0)
    fill(world)
    assert hit(world, ids(1, 250)) == 240


def test_what_cannot_be_pinned() -> None:
    world = World()
    for ttl in (0, -1.0, float("nan"), float("inf"), 8 * 86_400):
        with pytest.raises(AdmissionError, match="prefix_ttl_s"):
            world.add(ids(1, 50), 1, prefix_ttl_s=ttl)
    with pytest.raises(AdmissionError, match="use_prefix_cache"):
        world.add(ids(1, 50), 1, prefix_ttl_s=5.0, use_prefix_cache=False)
    use(world, ids(1, 15), prefix_ttl_s=5.0)  # no whole chunk
    assert len(world.cache.pins) == 0
    assert world.counters.prefix_pins_refused == 0
    with pytest.raises(ValueError, match="pin_share"):
        world.cache.__class__(
            world.cache.groups, 8 * SLAB_BYTES, world.values, recent_tokens=0, sinks=0, watermark=0.0,
            clock=world.clock, events=world.events, pin_share=1.5,
        )  # fmt: skip


def test_cancelled_and_preempted_requests_keep_their_pins() -> None:
    world = World(num_slabs=6)
    request = world.add(ids(1, 200), max_tokens=50, prefix_ttl_s=100.0)
    world.step()
    assert len(world.cache.pins) == 1
    world.scheduler.abort(request.request_id)
    assert request.status is RequestStatus.FINISHED
    assert hit(world, ids(1, 192)) == 192
    world.check()


def test_snapshots_keep_pins() -> None:
    world = World(num_slabs=8)
    use(world, ids(1, 160), prefix_ttl_s=50.0)
    snapshot = world.scheduler.snapshot()
    world.cache.pins.unpin()
    world.scheduler.restore(snapshot)
    world.check()
    assert len(world.cache.pins) == 1
    world.clock.advance_s(60)
    assert world.cache.usage().pinned_bytes == 0
    world.check()


@pytest.mark.parametrize("window", [1, 2, 16, 17])
def test_a_pin_holds_what_the_next_token_attends(window: int) -> None:
    """With a window of 1 that is nothing."""
    world = World(num_slabs=6, windows=(window,))
    request = world.add(ids(1, 64), max_tokens=4, prefix_ttl_s=50.0)
    while request.status is not RequestStatus.FINISHED:
        world.step()
        world.check()
    assert len(world.cache.pins) == 1
    assert (world.cache.usage().pinned_bytes == 0) == (window == 1)
    assert hit(world, ids(1, 64)) == 64
    world.clock.advance_s(60)
    world.cache.pins.expire()
    world.check()
