"""Heavy hitters: which chunks stay, that block sizes play no part in it, and what becomes of blocks kept in parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cache_world import World, ids

from engine.attention_mass import DECAY, LEAST_QUERIES, OBSERVED_PROMPT_TOKENS, ChunkScores, ObservedMass
from engine.chunks import chunk_mask, runs_of
from engine.events import BlocksRecoded, TokensEvicted
from engine.eviction import heavy_hitter_eviction
from engine.plan import ScheduledSequence
from engine.request import Request
from kernels.layout import KVShape

HEAVY = {"eviction": "heavy_hitter", "keep_tokens": 128}
# Tiles of every format are a multiple of 256 bytes, as with all models of usual size.
ALIGNED = KVShape(num_layers=8, num_kv_heads=1, head_dim=8, element_bytes=2)


class Pointed(World):
    """All attention goes to the chunks in ``heavy``, and a little, evenly, to all others."""

    heavy: tuple[int, ...] = ()

    def attention(self, sequence: ScheduledSequence) -> ObservedMass | None:
        found = super().attention(sequence)
        if found is not None:
            for row in found.groups:
                row[:] = 0.001
                row[[chunk for chunk in self.heavy if chunk < len(row)]] = 0.5
        return found


def scores_of(values: list[float], queries: int = 32) -> ChunkScores:
    scores = ChunkScores()
    scores.observe(np.array(values, np.float32) / queries, queries)
    return scores


# -- scores and choice ------------------------------------------------------------------------------------------------


def test_scores_fade_with_every_later_query_and_grow_with_the_sequence() -> None:
    scores = ChunkScores()
    scores.observe(np.array([0.75, 0.25], np.float32), 4)
    scores.observe(np.array([0.0, 0.5, 0.5], np.float32), 1)
    assert scores.queries == 5
    assert scores.values[:3] == pytest.approx([3 * DECAY, 1 * DECAY + 0.5, 0.5])
    assert scores.of(2) == pytest.approx([3 * DECAY, DECAY + 0.5])


def test_neighbours_of_what_is_asked_for_count_too() -> None:
    assert scores_of([0, 0, 8, 0, 0, 1]).of(6).tolist() == [0, 4, 8, 4, 0.5, 1]


@pytest.mark.parametrize(
    ("computed", "keep", "recent", "unit", "expected"),
    [
        # Chunks 0 .. 19 with scores as below, 1, 4 and 15 at half of a neighbour's 9; chunk 0 is the sink.
        (320, 128, 64, 16, [1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15]),
        (319, 128, 64, 16, [1, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        (320, 128, 128, 16, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),  # all of it recent: a window
        (320, 128, 4096, 16, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (320, 304, 64, 16, []),
        (320, 300, 64, 16, []),  # what is over is less than a chunk
        (320, 288, 64, 16, [10]),
        (320, 128, 64, 32, [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]),  # the sink's tile stays whole: one chunk more
    ],
)
def test_lowest_scores_go_and_of_equal_ones_the_older(
    computed: int, keep: int, recent: int, unit: int, expected: list[int]
) -> None:
    scores = scores_of([9, 4, 9, 9, 3, 3, 3, 3, 3, 3, 0.5, 1, 3, 7, 8, 0.75, 9, 9, 9, 9])
    dropped = heavy_hitter_eviction(
        chunk_mask(0, 320), computed, scores, sinks=16, keep_tokens=keep, recent_tokens=recent, unit=unit
    )
    assert [start // 16 for run in runs_of(dropped) for start in range(*run, 16)] == expected


@pytest.mark.parametrize("context", [1, 2, 3, 15, 16, 17, 33])
@pytest.mark.parametrize("keep", [0, 1, 2])
@pytest.mark.parametrize("unit", [16, 32])
def test_the_current_token_and_the_sinks_always_stay(context: int, keep: int, unit: int) -> None:
    """NVIDIA/kvpress#264: a budget that rounds to nothing must not empty the cache."""
    held = chunk_mask(0, -(-context // 16) * 16)
    dropped = heavy_hitter_eviction(
        held, context, scores_of([1.0] * 4), sinks=16, keep_tokens=keep, recent_tokens=0, unit=unit
    )
    kept = held & ~dropped
    assert kept & 1
    assert kept >> ((context - 1) // 16) & 1


# -- what stays, whatever the block size ------------------------------------------------------------------------------

SCRIPTS: dict[str, dict[int, dict[str, Any]]] = {
    "heavy from the start": {0: HEAVY},
    "window from the start": {0: {"eviction": "window", "keep_tokens": 128}},
    "switched on while it runs": {30: {"eviction": "heavy_hitter", "keep_tokens": 256}, 90: {"keep_tokens": 128}},
    "window, heavy, none, heavy": {
        0: {"eviction": "window", "keep_tokens": 256},
        40: HEAVY,
        80: {"eviction": "none"},
        120: HEAVY,
    },
}
SWITCHED_SIZES = {10: 256, 25: 16, 45: 64, 60: 32, 95: 128, 110: 16, 140: 256}


def history(script: dict[int, dict[str, Any]], sizes: dict[int, int], **options: Any) -> Iterator[list[set[int]]]:
    """What every request of a run could attend, step by step."""
    world = World(num_slabs=16, **options)
    requests = [world.add(ids(seed, length), max_tokens=160) for seed, length in enumerate((500, 40))]
    for step in range(170):
        changes = {**script.get(step, {}), **({"block_size": sizes[step]} if step in sizes else {})}
        if changes:
            world.apply(**changes)
        world.step()
        if step % 16 == 0:
            world.check()
        yield [
            world.positions(request, group) if world.cache.holds(request) else set()
            for request in requests
            for group in range(len(world.arenas))
        ]
    assert world.counters.evicted_tokens > 200


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_kept_sets_are_the_same_at_every_step(script: dict[int, dict[str, Any]], sync: bool) -> None:
    runs = [history(script, {0: size}, sync=sync, windows=(None, 200)) for size in (16, 32, 128, 256)]
    runs.append(history(script, SWITCHED_SIZES, sync=sync, windows=(None, 200)))
    for step, (expected, *others) in enumerate(zip(*runs, strict=True)):
        assert all(_attended(found) == _attended(expected) for found in others), step


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_quantised_blocks_keep_whole_tiles_whatever_their_size(
    script: dict[int, dict[str, Any]], kv_format: str
) -> None:
    values = {"kv_format": kv_format}
    runs = [history(script, {0: size}, sync=True, shape=ALIGNED, values=values) for size in (16, 64, 256)]
    for step, (expected, *others) in enumerate(zip(*runs, strict=True)):
        assert all(found == expected for found in others), step


def _attended(sets: list[set[int]]) -> list[set[int]]:
    """Without what the second group's own window of 200 hides: blocks there go when all of them is outside."""
    return [
        {position for position in kept if not index % 2 or position > max(kept) - 199}
        for index, kept in enumerate(sets)
        if kept
    ]


def test_what_is_attended_most_stays_until_it_is_not() -> None:
    world = Pointed(num_slabs=16, values={**HEAVY, "keep_tokens": 256, "block_size": 64})
    world.heavy = (9, 15)
    request = world.add(ids(1, 400), max_tokens=400)
    for _ in range(100):
        world.step()
    for chunk in (8, 9, 10, 14, 15, 16):
        assert set(range(16 * chunk, 16 * chunk + 16)) <= world.positions(request)
    world.heavy = tuple(range(24, 40))
    for _ in range(200):
        world.step()
    assert set(range(144, 160)) & world.positions(request) == set()
    assert world.counters.evicted_by_attention_tokens == world.counters.evicted_tokens > 0
    assert all(event.by_attention for event in world.events.of(TokensEvicted))


def test_without_a_report_of_attention_the_most_recent_stay() -> None:
    runs = [
        history({0: {**HEAVY, "eviction": eviction}}, {0: 64}, reports_attention=False)
        for eviction in ("heavy_hitter", "window")
    ]
    for heavy, window in zip(*runs, strict=True):
        assert heavy == window


def test_nothing_is_dropped_on_a_hunch() -> None:
    """Switched on in the middle of an answer: a few queries must have been seen first."""
    world = World(num_slabs=16)
    request = world.add(ids(1, 400), max_tokens=100)
    for _ in range(20):
        world.step()
    world.apply(**HEAVY)
    for _ in range(LEAST_QUERIES - 1):
        world.step()
        assert request.num_evicted_tokens == 0
    world.step()  # in the middle of a chunk: what block sizes or other settings do must not decide when
    assert request.num_computed_tokens % 16
    assert request.num_evicted_tokens > 200
    world.apply(eviction="none")
    before = request.num_evicted_tokens
    world.run(check=True)
    assert request.num_evicted_tokens == before


def test_only_requests_that_it_can_reach_are_observed() -> None:
    world = World(num_slabs=16, values=HEAVY)
    long = world.add(ids(1, 400), max_tokens=10)
    world.add(ids(2, 100), max_tokens=44)  # ends at 144: sinks and keep_tokens
    world.add(ids(3, 400), max_tokens=10, allow_eviction=False)
    seen: dict[str, list[int]] = {}
    while world.scheduler.running or world.scheduler.waiting:
        for sequence in world.step().sequences:
            seen.setdefault(sequence.request.request_id, []).append(sequence.observed)
    assert {name for name, counts in seen.items() if any(counts)} == {long.request_id}
    assert sum(seen[long.request_id]) == OBSERVED_PROMPT_TOKENS + 9


@pytest.mark.parametrize("budget", [64, 128, 512])
def test_the_end_of_a_prompt_is_observed_however_it_is_cut_also_after_a_hit(budget: int) -> None:
    world = World(num_slabs=16, values={**HEAVY, "max_num_batched_tokens": budget})
    for cached in (0, 384):
        request = world.add(ids(1, 410), max_tokens=100)
        observed = []
        while request.num_computed_tokens < 410:
            observed += [(s.start + s.num_tokens, s.observed) for s in world.step().sequences]
        assert sum(count for _, count in observed) == OBSERVED_PROMPT_TOKENS
        assert all(stop > 394 for stop, count in observed if count)
        world.run()
        assert request.num_cached_tokens == cached


# -- blocks kept in parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", ["window", "heavy_hitter"])
@pytest.mark.parametrize("block_size", [32, 64, 256])
def test_splitting_gives_the_memory_back_and_happens_once(eviction: str, block_size: int) -> None:
    plain = World(num_slabs=16, values={**HEAVY, "eviction": eviction}, sync=True)
    world = World(num_slabs=16, values={**HEAVY, "eviction": eviction, "block_size": block_size}, sync=True)
    for each in (plain, world):
        each.add(ids(1, 600), max_tokens=400, use_prefix_cache=False)
    for step in range(380):
        plain.step()
        world.step()
        if step > 2:
            # Beyond what 16s need: the block that grows, and the one that is being split.
            spare = 2 * block_size / 16 * plain.cache._pools[0].arena.block_bytes(("native", 16))  # type: ignore[arg-type]
            assert world.cache.usage().used_bytes <= plain.cache.usage().used_bytes + spare
    recoded = sum(event.num_tokens for event in world.events.of(BlocksRecoded))
    assert 0 < recoded <= 1000
    assert world.cache.converged_fraction() == 1.0


def test_dropped_parts_that_are_held_are_reported() -> None:
    world = World(num_slabs=16, values={**HEAVY, "block_size": 256}, recode_tokens=0)
    request = world.add(ids(1, 510), max_tokens=50, use_prefix_cache=False)
    for _ in range(3):
        world.step()
    usage = world.cache.usage()
    assert usage.evicted_tokens == request.num_evicted_tokens == 510 - 2 - 128 - 16 + 4
    assert usage.hidden_bytes == usage.evicted_tokens * 32  # bytes of a native token
    assert usage.used_bytes == 512 * 32
    world.run(check=True)


def test_a_shared_block_is_not_copied_to_drop_part_of_it() -> None:
    world = World(num_slabs=16, values={"eviction": "window", "keep_tokens": 128, "block_size": 256}, sync=True)
    base = ids(1, 512)
    keeper = world.add([*base, 1], max_tokens=20, allow_eviction=False)
    world.step()
    dropper = world.add([*base, 2], max_tokens=60)
    for _ in range(15):
        world.step()
        world.check()
    assert world.positions(dropper) == {*range(16), *range(384, dropper.num_computed_tokens)}
    assert world.positions(keeper) == set(range(keeper.num_computed_tokens))
    assert world.sizes(dropper)[0] == ("native", 256)
    assert world.counters.recoded_tokens == 0
    while world.cache.holds(keeper):
        world.step()
    for _ in range(2):
        world.step()
    assert world.sizes(dropper)[0] == ("native", 16)  # alone now
    world.run(check=True)
    late = world.add([*base, 3], max_tokens=1)
    world.step()
    assert late.num_cached_tokens == 512  # what it dropped is still cached


def test_a_part_that_is_named_between_plan_and_swap_is_not_lost() -> None:
    world = World(num_slabs=16, values={"eviction": "window", "keep_tokens": 128, "block_size": 256}, recode_tokens=0)
    request = world.add(ids(1, 512), max_tokens=60, use_prefix_cache=False)
    for _ in range(2):
        world.step()
    batches = world.cache.plan_recodes(10_000)
    assert sum(len(batch.jobs) for batch in batches) == 1 + 8  # the sinks, and of the second block the recent half
    prefix, block = world.cache._prefix, world.cache._by_request["r1"].tables[0].blocks[0]
    first = prefix.child(prefix.root(""), request.prompt_ids[:16])
    second = prefix.child(first, request.prompt_ids[16:32])
    for position, node in ((0, first), (16, second)):
        prefix.put(node, 0, block, position, 0)
    world.arenas[0].recode(batches[0])
    world.cache.finish_recodes(batches)
    world.check()
    assert world.sizes(request)[0] == ("native", 256)
    assert [size for _, size in world.sizes(request)[1:]] == [16] * 8 + [256]
    world.run(check=True)


def test_a_block_that_grew_with_holes_is_split_once_it_is_full() -> None:
    values = {"eviction": "window", "keep_tokens": 128, "block_size": 256}
    world = World(num_slabs=16, values=values, sync=True)
    request = world.add(ids(1, 300), max_tokens=300, use_prefix_cache=False)
    while request.num_computed_tokens < 450:
        world.step()
    world.apply(eviction="none")  # nothing is dropped any more that would bring it to mind
    assert world.cache.usage().hidden_bytes > 0
    while request.num_computed_tokens < 520:
        world.step()
        world.check()
    assert world.cache.usage().hidden_bytes == 0


def test_a_token_counts_once_also_when_it_is_computed_and_dropped_again() -> None:
    world = World(num_slabs=4, values={**HEAVY, "block_size": 32}, windows=(None, None))
    requests: list[Request] = [world.add(ids(i, 300), max_tokens=200, use_prefix_cache=False) for i in range(5)]
    for _ in range(30):
        world.step()
    victim = world.scheduler.running[-1]
    assert victim.num_evicted_tokens > 0
    for limit in (1, 64):  # fewer at a time does not preempt; a full pool does
        world.apply(max_num_seqs=limit)
    world.run(check=True)
    assert world.counters.preemptions > 0
    assert any(request.num_preemptions and request.num_evicted_tokens for request in requests)
    for request in requests:
        assert request.num_evicted_tokens < request.num_tokens - 16 - 64
    assert world.counters.evicted_tokens == sum(request.num_evicted_tokens for request in requests)
