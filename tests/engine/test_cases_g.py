"""Cases G.24 and G.27 with a host tier behind the pool: nobody blocks the queue, nothing is left in either tier."""

from __future__ import annotations

import random

import pytest
from cache_world import SLAB_BYTES, World, ids

from engine.admission import AdmissionError
from engine.request import FinishReason
from kernels.layout import BLOCK_SIZES


def tight(host_slabs: int = 8, **options: object) -> World:
    values = {"host_offload": "on", **options.pop("values", {})}  # type: ignore[dict-item]
    return World(num_slabs=4, host_slabs=host_slabs, recode_tokens=64, values=values, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("staging", [0, 4])
def test_a_prompt_of_a_block_more_than_the_pool_is_refused_whatever_the_host_could_take(
    block_size: int, staging: int
) -> None:
    """vllm-project/vllm#39734: refused at once, before and after the tuner has changed the block size."""
    world = tight(staging_slabs=staging, values={"block_size": 16})
    running = world.add(ids(0, 200), max_tokens=100)
    world.step()
    world.apply(block_size=block_size)
    most = world.cache.max_sequence_tokens()
    assert most <= 4 * 256
    for length in (most + 1, most + block_size):
        with pytest.raises(AdmissionError) as caught:
            world.add(ids(1, length), max_tokens=1)
        assert caught.value.kind == "can_never_fit"
    largest, short = world.add(ids(1, most), max_tokens=1), world.add(ids(2, 20), max_tokens=2)
    world.run(2_000, check=True)
    assert [len(request.output_ids) for request in (running, largest, short)] == [100, 1, 2]


@pytest.mark.parametrize("offload", ["on", "off"])
@pytest.mark.parametrize("after", BLOCK_SIZES)
@pytest.mark.parametrize("before", [16, 256])
def test_the_largest_is_parked_when_blocks_grow_and_yet_all_complete(before: int, after: int, offload: str) -> None:
    """vllm-project/vllm#39734: what is on the host when the room shrinks comes back, or ends in an error."""
    world = tight(values={"block_size": before})
    first = world.add(ids(1, 300), max_tokens=300)
    world.step()
    most = world.cache.max_sequence_tokens()
    large = world.add(ids(2, 250), max_tokens=most + 1 - 250)  # the last token's KV is never computed
    for _ in range(1000):
        if large.num_preemptions:
            break
        world.step()
    assert large.num_preemptions
    world.apply(block_size=after, host_offload=offload)
    short = world.add(ids(3, 20), max_tokens=2)
    world.run(4_000)
    world.check()
    assert large.finish_reason in {FinishReason.LENGTH, FinishReason.ERROR}
    assert large.finish_reason is FinishReason.LENGTH or "room" in str(large.error)
    assert [len(request.output_ids) for request in (first, short)] == [300, 2]


def storm(world: World, requests: int, seed: int) -> int:
    """Short and long ones, some given up by their clients wherever they are then; how many were."""
    rng = random.Random(seed)
    shared, todo, alive, aborted = ids(7, 400), requests, [], 0
    while todo or world.scheduler.has_work:
        while todo and world.scheduler.num_waiting < 40:
            length = rng.randrange(1, 40) if rng.random() < 0.6 else rng.randrange(100, 400)
            prompt = [*shared[:length], rng.randrange(1000)] if rng.random() < 0.5 else ids(rng.randrange(9999), length)
            policy = {"use_prefix_cache": rng.random() < 0.8, "allow_eviction": rng.random() < 0.8}
            alive.append(world.add(prompt, rng.choice([1, 3, 10, 100]), **policy))
            todo -= 1
        if rng.random() < 0.05:
            aborted += world.scheduler.abort(rng.choice(alive[-60:]).request_id) is not None
        world.step()
    return aborted


def rounds(requests: int) -> None:
    world = tight(host_slabs=6, values={"max_num_seqs": 32}, staging_slabs=2)
    aborted = 0
    for round_ in range(10):
        world.apply(
            kv_format=["native", "int8", "native", "int4"][round_ % 4],
            block_size=[16, 64, 256, 32][round_ % 4],
            eviction=["none", "window", "heavy_hitter"][round_ % 3],
            prefix_eviction=["lru", "lfu", "cost"][round_ % 3],
            keep_tokens=128,
        )
        aborted += storm(world, requests, round_)
        idle_ns = world.clock.now_ns()
        world.settle()
        assert world.clock.now_ns() - idle_ns < 5e9
        world.check()
        usage = world.cache.usage()
        assert usage.used_bytes == usage.host_used_bytes == usage.kv_usage == 0
        assert usage.cached_bytes <= 4 * SLAB_BYTES
        assert usage.host_cached_bytes <= 6 * SLAB_BYTES
        for left in (world.scheduler._queues.requests, world.cache._sequences, world.cache._by_request):
            assert not left
    assert world.counters.swapped_in > 2
    assert world.counters.host_hit_tokens > 500
    assert len(world.finished) + aborted == world.created == 10 * requests
    world.cache.drop_idle(host=True)
    for pool in world.cache._pools:
        assert pool.arena.num_free_slabs == pool.arena.num_slabs
        assert pool.host is not None
        assert pool.host.arena.num_free_slabs == pool.host.arena.num_slabs
    assert not world.cache._prefix.nodes


def test_ten_rounds_leave_nothing_in_either_tier() -> None:
    """sgl-project/sglang#6778, scaled down for every run."""
    rounds(40)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_rounds_of_a_thousand_leave_nothing_in_either_tier() -> None:
    """sgl-project/sglang#6778 in full."""
    rounds(1000)
