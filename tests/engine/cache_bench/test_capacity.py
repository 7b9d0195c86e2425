"""The pool is filled for real: whole sequences, conversions done, and a recoder that does nothing gains nothing."""

from __future__ import annotations

import pytest

from engine.cache_bench.rows import capacity_int4
from engine.cache_bench.rows.capacity_int4 import fill
from engine.memory_model import GroupSpec, slab_bytes, token_bytes
from kernels.layout import INT4, NATIVE, KVShape

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=64, element_bytes=2)
GROUPS = [GroupSpec("full", (0, 1), SHAPE)]
POOL_BYTES = 33 * slab_bytes(SHAPE, 256)


def test_native_holds_what_the_pool_has_without_its_reserve() -> None:
    filled = fill(GROUPS, POOL_BYTES, "native", 16, tokens=512)
    assert filled.sequences == 32 * 256 // 512
    assert filled.token_bytes == {"native": token_bytes(SHAPE, NATIVE)}


def test_int4_holds_more_and_large_blocks_eat_some_of_it() -> None:
    by_size = {size: fill(GROUPS, POOL_BYTES, "int4", size, tokens=512) for size in (16, 64, 256)}
    assert all(filled.token_bytes["int4"] == token_bytes(SHAPE, INT4) for filled in by_size.values())
    counts = [by_size[size].sequences for size in (16, 64, 256)]
    assert counts[0] >= counts[1] > counts[2] > 16
    assert counts[0] <= 16 * token_bytes(SHAPE, NATIVE) / token_bytes(SHAPE, INT4)


def test_without_conversions_nothing_is_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_int4, "_convert", lambda _cache: False)
    assert fill(GROUPS, POOL_BYTES, "int4", 16, tokens=512).sequences == 16
