"""Every byte of a pool is counted once, and waste of each kind is seen as what it is."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.cache_bench.dry_run import DryEngine
from engine.cache_bench.lengths import Lengths
from engine.cache_bench.rows.wasted_pool import look_at
from engine.cache_bench.storage import StorageUse, storage_use
from engine.memory_model import GroupSpec, slab_bytes, token_bytes
from kernels.layout import INT4, NATIVE, KVShape

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=64, element_bytes=2)
GROUPS = [GroupSpec("full", (0, 1), SHAPE), GroupSpec("window", (2, 3), SHAPE, window=128)]
TOKEN = int(token_bytes(SHAPE))


def engine_of(groups: list[GroupSpec], **values: Any) -> DryEngine:
    pool_bytes = 8 * len(groups) * slab_bytes(SHAPE, 256)
    return DryEngine(groups, pool_bytes, values, random.Random(0), max_model_len=2048, recode_tokens=64)


def total(use: StorageUse) -> int:
    return use.tokens + use.tails + use.free_slots + use.slack + use.free


def test_one_token_in_a_large_block_is_nearly_all_waste() -> None:
    engine = engine_of(GROUPS[:1], block_size=128)
    engine.add(1, 10)
    engine.step()
    use = storage_use(engine.cache)
    assert (use.tokens, use.tails, use.free_slots) == (TOKEN, 127 * TOKEN, 128 * TOKEN)
    assert (use.slack, use.free) == (0, 7 * 256 * TOKEN)
    assert use.wasted_pct == pytest.approx(100 * 255 / 2048)


def test_slabs_of_quantised_blocks_have_ends_that_fit_no_block() -> None:
    engine = engine_of(GROUPS[:1], kv_format="int4", block_size=128)
    engine.add(640, 400)
    for _ in range(60):
        engine.step()
    slabs = [engine.cache._pools[0].arena.slab_class(slab) for slab in range(8)]
    assert (slabs.count(("int4", 128)), slabs.count(("int4", 32))) == (1, 1)
    ends = [slab_bytes(SHAPE, 256) % SHAPE.block_bytes(INT4, size) for size in (128, 32)]
    assert storage_use(engine.cache).slack == sum(ends) > ends[1] > 0


@pytest.mark.parametrize("kv_format", ["native", "int8", "int4"])
def test_nothing_is_counted_twice_or_lost(kv_format: str) -> None:
    engine = engine_of(GROUPS, kv_format=kv_format, block_size=32)
    rng = random.Random(1)
    for step in range(150):
        if step % 3 == 0:
            engine.add(rng.randint(1, 300), rng.randint(1, 60))
        engine.step()
        use = storage_use(engine.cache)
        assert total(use) == use.pool == engine.cache.layout.total_bytes
        assert min(use.tokens, use.tails, use.free_slots, use.slack, use.free) >= 0
    assert use.tokens > 0.2 * use.pool


def test_large_blocks_waste_more_of_a_full_pool() -> None:
    rng = random.Random(3)
    lengths = Lengths("test", tuple((rng.randint(20, 300), rng.randint(5, 40)) for _ in range(50)))
    wasted = []
    for block_size in (16, 256):
        values: dict[str, str | int] = {"block_size": block_size}
        pool_bytes = 40 * slab_bytes(SHAPE, 256)
        looks = look_at(GROUPS[:1], lengths, values, looks=5, seed=0, pool_bytes=pool_bytes)
        assert all(look.free < 0.2 * look.pool for look in looks), "the pool was not full"
        wasted.append(sum(look.wasted_pct for look in looks) / 5)
    assert wasted[0] < 10
    assert wasted[1] > 3 * wasted[0]
    assert NATIVE.tile_tokens == 16
