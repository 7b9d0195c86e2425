"""Case F.23: bytes of both tiers add up at every point inside a step, recounted without the audit's help."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from cache_world import World, ids
from hypothesis import HealthCheck, given, settings

from engine.admission import AdmissionError
from engine.block_pool import BlockPool
from engine.formats import OFFSET_UNIT
from engine.request import RequestStatus
from engine.step_draft import StepDraft

PROMPTS = [ids(seed, 500) for seed in range(3)]
OPERATIONS = st.one_of(
    st.tuples(st.just("allocate"), st.integers(0, 2), st.integers(1, 480), st.integers(1, 120)),
    st.tuples(st.just("step"), st.integers(1, 20)),
    st.tuples(st.just("free"), st.integers(0, 20)),
    st.tuples(st.just("evict"), st.sampled_from(["window", "heavy_hitter", "none"])),
    st.tuples(st.just("give up"), st.booleans()),
    st.tuples(st.just("offload"), st.integers(0, 20)),
    st.tuples(st.just("restore")),
    st.tuples(st.just("switch"), st.sampled_from(["on", "off"])),
    st.tuples(st.just("recode"), st.sampled_from(["native", "int8", "int4"]), st.sampled_from([16, 64, 256])),
    st.tuples(st.just("cancel")),
)


@dataclass
class Bytes:
    """One tier's. ``slack``: ends of slabs that no block of their class fits."""

    total: int
    free: int = 0
    used: int = 0
    cached: int = 0
    slack: int = 0


def count(pool: BlockPool) -> Bytes:
    """From the slots up. Every slot is in exactly one state."""
    arena = pool.arena
    slab_bytes = arena.slab_units * OFFSET_UNIT
    found = Bytes(arena.num_slabs * slab_bytes)
    seen = set()
    for number, slab in enumerate(arena._slabs):
        if slab.block_class is None:
            found.free += slab_bytes
            continue
        size, slots = arena.block_bytes(slab.block_class), arena.per_slab(slab.block_class)
        found.slack += slab_bytes - size * slots
        for slot in range(slots):
            offset = number * arena.slab_units + slot * size // OFFSET_UNIT
            block, is_free = pool.blocks.get(offset), bool(slab.free >> slot & 1)
            assert is_free == (block is None), f"slot {offset} is free {is_free} and holds {block}"
            if block is None:
                found.free += size
                continue
            seen.add(offset)
            is_held = bool(block.holders) or block.in_recode or block.in_transfer
            assert is_held != (block in pool.idle), f"block {offset} is in two lists, or in none"
            if is_held:
                found.used += size
            else:
                found.cached += size
    assert seen == set(pool.blocks), "blocks outside all slabs"
    return found


def check(world: World) -> None:
    pools = world.cache._pools
    usage = world.cache.usage()
    hosts = [pool.host for pool in pools if pool.host is not None]
    assert len(hosts) == len(pools)
    for tier, used, cached, total in (
        (pools, usage.used_bytes, usage.cached_bytes, usage.pool_bytes),
        (hosts, usage.host_used_bytes, usage.host_cached_bytes, usage.host_pool_bytes),
    ):
        found = [count(pool) for pool in tier]
        assert all(each.free + each.used + each.cached + each.slack == each.total for each in found)
        assert (used, cached) == (sum(each.used for each in found), sum(each.cached for each in found))
        assert min(used, cached) >= 0
        assert used + cached + sum(each.free + each.slack for each in found) == total
        assert 0 <= used + cached <= total


def step(world: World) -> None:
    """A step, looked at wherever a block may change its tier."""
    for number in world.copier.arrived():
        world.cache.finish_transfers([number])
        check(world)
    plan = world.scheduler.schedule()
    check(world)
    world.copier.submit(world.cache.plan_transfers())
    check(world)
    world.finished += world.scheduler.update(plan, world.run_plan(plan))
    check(world)
    world.clock.advance_s(0.01)


def apply(world: World, operation: tuple[object, ...]) -> None:
    scheduler = world.scheduler
    match operation:
        case "allocate", int(which), int(shared), int(max_tokens):
            try:
                world.add([*PROMPTS[which][:shared], *ids(world.created, 20)], max_tokens)
            except AdmissionError as error:
                assert error.kind == "can_never_fit"  # noqa: PT017 - every other kind is a failure
        case "step", int(times):
            for _ in range(times):
                step(world)
        case "free", int(pick):
            requests = [*scheduler.running, *scheduler.waiting]
            if requests:
                scheduler.abort(requests[pick % len(requests)].request_id)
        case "evict", policy:
            world.apply(eviction=policy, keep_tokens=128)
        case "give up", bool(host):
            world.cache.drop_idle(host=host)
        case "offload", int(pick):
            running = [request for request in scheduler.running if request.status is RequestStatus.RUNNING]
            if running:
                scheduler._preemptor.preempt(running[pick % len(running)], StepDraft(0))
                step(world)
        case ("restore",):
            scheduler._planner._admitter.admit_next(StepDraft(0))
        case "switch", offload:
            world.apply(host_offload=offload)
        case "recode", kv_format, size:
            world.apply(kv_format=kv_format, block_size=size)
        case ("cancel",):
            pending, world.copier.pending = world.copier.pending, []
            for request_id in world.cache.cancel_transfers([transfer.number for _, transfer in pending]):
                scheduler.fail_load(request_id)
        case _:
            raise AssertionError(operation)
    check(world)


@given(
    operations=st.lists(OPERATIONS, min_size=5, max_size=40),
    slabs=st.integers(3, 6),
    host_slabs=st.sampled_from([1, 2, 8]),
    staging=st.sampled_from([0, 4]),
    windows=st.sampled_from([(None,), (None, 64)]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_bytes_of_both_tiers_add_up_inside_every_step(
    operations: list[tuple[object, ...]], slabs: int, host_slabs: int, staging: int, windows: tuple[int | None, ...]
) -> None:
    """NVIDIA/TensorRT-LLM#11879: a block that is offloaded while another is allocated is counted in one tier."""
    world = World(
        num_slabs=slabs, windows=windows, host_slabs=host_slabs, staging_slabs=staging, values={"host_offload": "on"}
    )  # fmt: skip
    check(world)
    for operation in operations:
        apply(world, operation)
    world.run(5_000)
    world.settle()
    check(world)
    usage = world.cache.usage()
    assert usage.used_bytes == usage.host_used_bytes == 0
