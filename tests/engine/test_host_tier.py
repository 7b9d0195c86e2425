"""The host tier's bookkeeping, with real bytes and copies that are made as late as they may be."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from cache_world import World, ids

from engine.events import RequestParked
from engine.request import FinishReason, Request, RequestStatus
from engine.step_draft import StepDraft


def tight(**options: object) -> World:
    """A pool in which four requests of some 250 tokens do not fit together, and a host that takes everything."""
    values = {"host_offload": "on", **options.pop("values", {})}  # type: ignore[dict-item]
    return World(num_slabs=4, host_slabs=8, recode_tokens=64, values=values, **options)  # type: ignore[arg-type]


def test_preempted_sequences_are_swapped_and_nothing_is_computed_again() -> None:
    world = tight()
    requests = [world.add(ids(i, 150), max_tokens=150, use_prefix_cache=False) for i in range(4)]
    world.run(check=True)
    assert world.counters.swapped_out > 0
    assert world.counters.swapped_in == world.counters.swapped_out == len(world.events.of(RequestParked))
    assert world.counters.recomputed_tokens == 0
    assert world.counters.host_out_bytes > 0
    for request in requests:
        assert request.finish_reason is FinishReason.LENGTH
        assert len(request.output_ids) == 150
    world.settle()
    assert world.cache.usage().used_bytes == 0


def test_knob_needs_a_host_pool() -> None:
    world = World()
    with pytest.raises(ValueError, match="--host-pool-bytes"):
        world.apply(host_offload="on")
    with pytest.raises(ValueError, match="--host-pool-bytes"):
        World(values={"host_offload": "on"})


def test_idle_prefixes_move_to_the_host_and_are_hit_there() -> None:
    world = tight()
    world.add(ids(1, 300), max_tokens=2)
    world.run(check=True)
    for seed in range(2, 8):  # pushes the first one out of the device's pool
        world.add(ids(seed, 300), max_tokens=2)
        world.run(check=True)
        world.settle()
    assert world.counters.host_out_bytes > 0
    before = world.counters.host_in_bytes
    again = world.add(ids(1, 300), max_tokens=2)
    world.run(check=True)
    assert again.num_cached_tokens == 288
    assert world.counters.host_in_bytes > before
    assert world.counters.host_hit_tokens == 288
    assert world.counters.host_loads == 1


def preempt(world: World, request: Request) -> None:
    """As if an older request needed the room."""
    world.scheduler._preemptor.preempt(request, StepDraft(0))


def until(world: World, condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        world.step()
        world.check()
    pytest.fail("it never came to that")


def test_a_tail_that_grew_after_it_came_back_is_copied_again() -> None:
    """Its old copy on the host lacks the tokens since; they do not fill a chunk, so only the bytes can tell."""
    world = tight(values={"block_size": 64})
    request = world.add(ids(1, 100), max_tokens=100)
    for _ in range(2):
        world.step()
        world.step()
        world.step()
        preempt(world, request)
        world.scheduler._planner.max_seqs = 0  # nobody comes back yet
        world.settle()
        assert world.cache.usage().used_bytes == 0
        world.scheduler._planner.max_seqs = 1
        until(world, lambda: request.status is RequestStatus.RUNNING)
    world.run(check=True)
    assert world.counters.swapped_in == 2
    assert world.counters.recomputed_tokens == 0


def test_nothing_is_written_to_a_block_that_is_being_copied() -> None:
    """Case F.21: the request comes back before its last block has left, and waits for that."""
    world = tight(lag=9)
    request = world.add(ids(1, 100), max_tokens=40)
    for _ in range(4):
        world.step()
    preempt(world, request)
    world.scheduler._planner.max_seqs = 0
    world.step()  # the copies begin
    world.scheduler._planner.max_seqs = 1
    waited = 0
    while request.status is not RequestStatus.RUNNING:
        waited += 1
        world.step()  # World.write checks every block that it writes to
        world.check()
    assert waited
    world.run(check=True)


def test_case_f21_two_hundred_times_what_was_written_is_what_comes_back() -> None:
    """Case F.21: copies that end late, under load; bytes are compared after every step."""
    world = World(num_slabs=5, host_slabs=10, recode_tokens=100, lag=4, values={"host_offload": "on"})
    rng = random.Random(21)
    world.add(ids(0, 200), max_tokens=700)
    for round_ in range(200):
        if len(world.scheduler.running) < 3:
            world.add(ids(round_, rng.randrange(20, 200)), max_tokens=100)
        for _ in range(rng.randrange(1, 5)):
            world.step()
            world.check()  # the bytes of all requests, parked ones on the host too
        running = world.scheduler.running
        if running:
            preempt(world, rng.choice(running))
        if round_ % 10 == 0:
            world.apply(kv_format=rng.choice(["native", "int8"]), block_size=rng.choice([16, 64]))
    world.run(check=True)
    assert world.counters.swapped_out >= 150
    assert world.counters.swapped_in >= 150


def test_loading_gives_way_to_a_running_request() -> None:
    world = tight(link_bytes_per_s=2e4)
    first = world.add(ids(1, 200), max_tokens=500)
    world.step()
    second = world.add(ids(2, 300), max_tokens=100)
    until(world, lambda: len(second.output_ids) > 5)
    preempt(world, second)
    until(world, lambda: second.status is RequestStatus.LOADING)
    third = world.add(ids(3, 150), max_tokens=20)
    until(world, lambda: third.status is not RequestStatus.WAITING or not world.scheduler.has_work)
    world.run(check=True)
    assert [len(request.output_ids) for request in (first, second, third)] == [500, 100, 20]


@pytest.mark.parametrize("status", [RequestStatus.LOADING, RequestStatus.PREEMPTED])
def test_cancelling_a_request_that_is_not_on_the_device(status: RequestStatus) -> None:
    world = tight(link_bytes_per_s=2e4)
    request = world.add(ids(1, 300), max_tokens=100, use_prefix_cache=False)
    until(world, lambda: len(request.output_ids) > 5)
    preempt(world, request)
    if status is RequestStatus.LOADING:
        until(world, lambda: request.status is RequestStatus.LOADING)
    else:
        world.step()
        world.scheduler._preemptor.stop_loading(request) if request in world.scheduler.loading else None
    assert world.scheduler.abort(request.request_id) is request
    world.check()
    world.settle()
    usage = world.cache.usage()
    assert usage.used_bytes == usage.host_used_bytes == 0


def test_host_full_means_recompute() -> None:
    world = World(num_slabs=4, host_slabs=1, recode_tokens=64, values={"host_offload": "on"})
    requests = [world.add(ids(i, 150), max_tokens=150, use_prefix_cache=False) for i in range(5)]
    world.run(check=True)
    assert world.counters.recomputed_tokens > 0
    assert world.counters.preemptions > world.counters.swapped_out
    assert all(len(request.output_ids) == 150 for request in requests)


def test_swap_or_recompute_by_cost_but_lossy_kv_is_kept() -> None:
    world = tight()
    request = world.add(ids(1, 200), max_tokens=100)
    until(world, lambda: len(request.output_ids) > 5)
    world.counters.prefill_time_ns = world.counters.prefill_tokens_computed * 10  # 10 ns a token: no link beats that
    assert not world.cache.should_park(request)
    world.counters.prefill_time_ns = world.counters.prefill_tokens_computed * 10_000_000
    assert world.cache.should_park(request)
    world.counters.prefill_time_ns = world.counters.prefill_tokens_computed * 10
    world.apply(kv_format="int8")
    until(world, lambda: any(row.kv_format == "int8" for row in world.cache.resident()))
    assert world.cache.should_park(request)


def test_a_hit_on_the_host_is_taken_only_if_it_is_faster() -> None:
    world = tight()
    world.add(ids(1, 300), max_tokens=2)
    world.run()
    for seed in range(2, 8):
        world.add(ids(seed, 300), max_tokens=2)
        world.run()
        world.settle()
    world.counters.prefill_time_ns = world.counters.prefill_tokens_computed * 10
    again = world.add(ids(1, 300), max_tokens=2)
    world.run(check=True)
    assert again.num_cached_tokens < 288
    assert world.counters.host_loads == 0


def test_case_b7_on_the_host_too_only_good_enough_kv_is_hit() -> None:
    world = tight(values={"kv_format": "int4"}, recent_tokens=0)
    world.add(ids(1, 300), max_tokens=2)
    world.run()
    for seed in range(2, 12):
        world.add(ids(seed, 300), max_tokens=2)
        world.run()
        world.settle()
    assert world.cache.usage().host_cached_bytes > 0
    world.apply(kv_format="native")
    cold = world.add(ids(1, 300), max_tokens=2)
    world.run(check=True)
    assert cold.num_cached_tokens == 0
    world.apply(kv_format="int4")
    floored = world.add(ids(5, 300), max_tokens=2, kv_format_floor="int8")
    world.run(check=True)
    assert floored.num_cached_tokens == 0


def test_switched_off_everything_comes_back_and_nothing_is_killed() -> None:
    world = tight()
    requests = [world.add(ids(i, 150), max_tokens=150) for i in range(5)]
    until(world, lambda: world.counters.swapped_out > 1)
    world.apply(host_offload="off")
    out = world.counters.host_out_bytes
    in_flight = sum(transfer.num_bytes for _, transfer in world.copier.pending if transfer.direction == "out")
    world.run(check=True)
    assert world.counters.host_out_bytes <= out + in_flight
    assert all(len(request.output_ids) == 150 for request in requests)
    world.settle()
    usage = world.cache.usage()
    assert usage.host_used_bytes == usage.host_cached_bytes == 0


def test_an_idle_engine_copies_ahead_what_it_may_have_to_give_up() -> None:
    """Then giving a block up costs nothing, and no device block is counted twice."""
    world = tight()
    for seed in range(3):
        world.add(ids(seed, 220), max_tokens=2)
        world.run()
    world.settle()
    usage = world.cache.usage()
    assert 0 < usage.host_cached_bytes <= usage.cached_bytes
    world.cache.drop_idle()
    world.check()
    assert world.cache.usage().cached_bytes == 0
    assert world.cache.usage().host_cached_bytes == usage.host_cached_bytes


def streaming(**options: Any) -> World:
    return World(num_slabs=6, host_slabs=8, staging_slabs=4, values={"host_offload": "on"}, **options)


def test_pressed_for_room_a_running_sequence_has_old_blocks_on_the_host() -> None:
    """Instead of being preempted; and gets them back when the others have gone."""
    world = streaming()
    first = world.add(ids(1, 600), max_tokens=100)
    late = world.add(ids(2, 600), max_tokens=200)
    on_host = 0
    while first.status is not RequestStatus.FINISHED:
        world.step()
        world.check()
        if late.status is RequestStatus.RUNNING:
            entries = world.cache.entries(late, 0)
            on_host = max(on_host, sum(entry.on_host for entry in entries))
            assert not any(entry.on_host for entry in entries[-2:])  # the recent ones are here
    assert on_host >= 4
    assert first.num_preemptions == late.num_preemptions == 0
    until(world, lambda: not any(entry.on_host for entry in world.cache.entries(late, 0)))
    world.run(check=True)
    assert len(late.output_ids) == 200
    world.settle()
    assert world.cache.usage().host_used_bytes == 0


def test_a_parked_sequence_that_does_not_fit_whole_comes_back_with_old_blocks_on_the_host() -> None:
    world = streaming()
    world.add(ids(1, 600), max_tokens=300)
    late = world.add(ids(2, 600), max_tokens=200)
    until(world, lambda: len(late.output_ids) > 5)
    preempt(world, late)
    world.scheduler._planner.max_seqs = 1
    for _ in range(100):
        world.step()
    world.add(ids(3, 200), max_tokens=100)  # takes some of the room
    world.scheduler._planner.max_seqs = 64
    until(world, lambda: late.status is RequestStatus.RUNNING)
    assert any(entry.on_host for entry in world.cache.entries(late, 0))
    world.run(check=True)
    assert late.num_recomputed_tokens == 0
    assert len(late.output_ids) == 200


def test_a_link_that_is_too_slow_is_not_streamed_over() -> None:
    world = streaming(link_bytes_per_s=1e5)
    world.add(ids(1, 600), max_tokens=200)
    late = world.add(ids(2, 600), max_tokens=200)
    while world.scheduler.has_work:
        assert not len(world.cache.host.streams)  # type: ignore[union-attr]
        world.step()
        world.check()
    assert late.num_preemptions > 0
    assert len(late.output_ids) == 200


def test_what_is_streamed_fits_the_buffers() -> None:
    """4 slabs of 8 KiB make two buffers of 16 KiB; a slot is a tile of one layer and 256 bytes: 21 native tiles."""
    world = streaming()
    for seed in range(3):
        world.add(ids(seed, 400), max_tokens=300)
    most = 0
    while world.scheduler.has_work:
        world.step()
        tiles = sum(entry.on_host for request in world.scheduler.running for entry in world.cache.entries(request, 0))
        most = max(most, tiles)
        assert tiles * 768 <= world.cache.stream_buffers[0]
    assert most > 10
