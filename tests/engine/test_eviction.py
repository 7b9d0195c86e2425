"""Window eviction and the model's own window: which positions stay, exactly, at every block size."""

from __future__ import annotations

import pytest
from cache_world import World, ids

from engine.block_table import BlockTable
from engine.chunks import runs_of
from engine.events import TokensEvicted
from engine.eviction import outside_window, window_eviction
from engine.formats import BlockClass
from engine.pool_block import Block


def table_of(*sizes: int) -> BlockTable:
    table, position = BlockTable(1), 0
    for offset, size in enumerate(sizes):
        table.append(Block(offset, BlockClass("native", size), position), position + size, offset + 2)
        position += size
    return table


@pytest.mark.parametrize(
    ("computed", "sinks", "keep", "unit", "expected"),
    [
        (320, 16, 128, 16, (16, 192)),
        (319, 16, 128, 16, (16, 176)),  # 176 .. 192 would cut into the last 128
        (320, 0, 128, 16, (0, 192)),
        (320, 32, 128, 16, (32, 192)),
        (143, 16, 128, 16, None),
        (160, 16, 128, 16, (16, 32)),
        (340, 16, 128, 32, (32, 192)),  # whole tiles: of the sinks' one half stays beside them
        (16, 16, 0, 16, None),
        (32, 0, 0, 16, (0, 16)),  # the last token always stays
        (1, 0, 0, 16, None),
        (2, 0, 1, 16, None),
        (3, 16, 0, 32, None),
    ],
)
def test_window_keeps_sinks_and_recent(
    computed: int, sinks: int, keep: int, unit: int, expected: tuple[int, int] | None
) -> None:
    found = window_eviction(computed, sinks, keep, unit)
    assert runs_of(found) == ([] if expected is None else [expected])


@pytest.mark.parametrize("window", [1, 8, 16, 17, 40])
def test_model_window_counts_the_current_token(window: int) -> None:
    """Position t attends t - window + 1 .. t; a block is let go as soon as the next token cannot attend it."""
    for computed in range(1, 100):
        table = table_of(*[16] * (-(-computed // 16)))
        start, stop = outside_window(table, computed, window)
        assert start == 0
        needed = max(0, computed - window + 1)
        for index, block in enumerate(table.blocks[:-1]):
            assert (index < stop) == (block.end <= needed)
        assert stop < len(table.blocks)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_eviction_waits_for_the_whole_prompt_and_counts_in_16s(block_size: int, sync: bool) -> None:
    values = {"eviction": "window", "keep_tokens": 128, "max_num_batched_tokens": 64, "block_size": block_size}
    world = World(num_slabs=12, values=values, sync=sync)
    request = world.add(ids(1, 500), max_tokens=100)
    while request.num_computed_tokens < 500:
        assert request.num_evicted_tokens == 0
        world.step()
        world.check()
    while world.scheduler.running:
        computed = request.num_computed_tokens
        first_kept = (computed - 128) // 16 * 16
        assert world.positions(request) == {*range(16), *range(first_kept, computed)}
        assert request.num_evicted_tokens == first_kept - 16
        world.step()
        world.check()
    assert len(request.output_ids) == 100
    assert world.counters.evicted_tokens == request.num_evicted_tokens
    assert world.counters.evicted_by_attention_tokens == 0
    assert sum(event.num_tokens for event in world.events.of(TokensEvicted)) == request.num_evicted_tokens


def test_switching_it_on_reaches_running_requests_at_once_and_spares_exempt_ones() -> None:
    world = World(num_slabs=12)
    request = world.add(ids(1, 500), max_tokens=100)
    exempt = world.add(ids(2, 500), max_tokens=100, allow_eviction=False)
    for _ in range(5):
        world.step()
    before = world.cache.usage().used_bytes
    world.apply(eviction="window", keep_tokens=256)
    world.step()
    assert request.num_evicted_tokens == 16 * ((request.num_computed_tokens - 256) // 16 - 1)
    assert exempt.num_evicted_tokens == 0
    assert world.cache.usage().used_bytes < before
    world.apply(eviction="none")
    stopped_at = request.num_evicted_tokens
    world.run(check=True)
    assert request.num_evicted_tokens == stopped_at


def test_evicted_blocks_of_a_prompt_stay_cached_and_shared_ones_with_their_holders() -> None:
    world = World(num_slabs=12, values={"eviction": "window", "keep_tokens": 128})
    base = ids(1, 320)
    keeper = world.add(base, max_tokens=60, allow_eviction=False)
    world.step()
    dropper = world.add([*base, 1], max_tokens=60)
    for _ in range(3):
        world.step()
    assert dropper.num_evicted_tokens > 0
    assert world.positions(keeper) == set(range(keeper.num_computed_tokens))
    world.run(check=True)
    late = world.add([*base, 2], max_tokens=1)
    world.step()
    assert late.num_cached_tokens == 320


def test_small_contexts_lose_nothing() -> None:
    world = World(values={"eviction": "window", "keep_tokens": 128})
    for length in (1, 2, 3, 100):
        request = world.add(ids(length, length), max_tokens=20)
        world.run(check=True)
        assert request.num_evicted_tokens == 0


def test_evicted_storage_goes_to_others() -> None:
    world = World(num_slabs=5, values={"eviction": "window", "keep_tokens": 128})
    for seed in range(2):
        world.add(ids(seed, 480), max_tokens=200, use_prefix_cache=False)
    world.run(check=True)
    assert world.counters.preemptions == 0  # 2 x 680 tokens in a pool of 1024
    assert all(len(request.output_ids) == 200 for request in world.finished)
