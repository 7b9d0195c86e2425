"""Slabs and slots: capacity, reuse across classes, refusal of wrong frees."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from engine.arena import Arena, IntegrityError
from engine.formats import BlockClass
from kernels.layout import NATIVE, KVShape

SHAPE = KVShape(num_layers=2, num_kv_heads=1, head_dim=8, element_bytes=2)
SLAB = SHAPE.block_bytes(NATIVE, 256)
CLASSES = [BlockClass(kind, size) for kind in ("native", "int8", "k8v4", "int4") for size in (32, 64, 256)]


def test_a_slab_belongs_to_one_class_and_comes_back_when_empty() -> None:
    arena = Arena(SHAPE, 1, SLAB)
    small, large = BlockClass("native", 64), BlockClass("native", 256)
    offset = arena.allocate(small)
    assert offset == 0
    assert arena.allocate(large) is None
    assert arena.slab_class(0) == small
    arena.free(offset)
    assert arena.slab_class(0) is None
    assert arena.allocate(large) == 0


def test_reserve_is_kept_but_cut_slabs_are_used_up() -> None:
    arena = Arena(SHAPE, 2, SLAB)
    block_class = BlockClass("native", 64)
    taken = [arena.allocate(block_class, keep_slabs=1) for _ in range(5)]
    assert taken[4] is None
    assert None not in taken[:4]
    assert arena.allocate(block_class, keep_slabs=0) is not None


@pytest.mark.parametrize("offset", [1, 10_000, -1])
def test_freeing_what_is_not_allocated_is_a_bug(offset: int) -> None:
    arena = Arena(SHAPE, 2, SLAB)
    first = arena.allocate(BlockClass("native", 64))
    assert first == 0
    with pytest.raises(IntegrityError):
        arena.free(offset)
    arena.free(0)
    with pytest.raises(IntegrityError):
        arena.free(0)


def test_bad_geometry_is_refused() -> None:
    with pytest.raises(ValueError, match="256"):
        Arena(SHAPE, 2, 100)
    with pytest.raises(ValueError, match="slabs"):
        Arena(SHAPE, 0, SLAB)


@pytest.mark.parametrize("seed", range(5))
def test_random_life_never_overlaps_and_never_leaks(seed: int) -> None:
    rng = random.Random(seed)
    arena = Arena(SHAPE, 6, SLAB)
    live: dict[int, BlockClass] = {}
    for _ in range(600):
        if live and rng.random() < 0.48:
            arena.free(offset := rng.choice(list(live)))
            del live[offset]
        else:
            block_class = rng.choice(CLASSES)
            offset = arena.allocate(block_class, keep_slabs=rng.randrange(2))
            if offset is not None:
                live[offset] = block_class
        used = arena.check_integrity()
        assert sum(used.values()) == len(live)
        spans = sorted((o, o + arena.block_bytes(c) // 256) for o, c in live.items())
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert not spans or spans[-1][1] <= 6 * SLAB // 256
    for offset in live:
        arena.free(offset)
    assert arena.num_free_slabs == 6
    assert arena.check_integrity() == {}


@pytest.mark.parametrize("seed", range(5))
def test_runs_give_what_as_many_single_calls_give(seed: int) -> None:
    rng = random.Random(seed)
    runs, singles = Arena(SHAPE, 6, SLAB), Arena(SHAPE, 6, SLAB)
    held: list[int] = []
    for _ in range(300):
        if held and rng.random() < 0.5:
            rng.shuffle(held)
            back, held = held[: rng.randint(1, 9)], held[9:] + held[:9]
            held = [offset for offset in held if offset not in back]
            runs.free_run(back)
            for offset in back:
                singles.free(offset)
        else:
            kind, number, keep = rng.choice(CLASSES), rng.randint(1, 12), rng.randint(0, 1)
            found = runs.allocate_run(kind, number, keep_slabs=keep)
            single = [singles.allocate(kind, keep_slabs=keep) for _ in range(number)]
            assert found == [offset for offset in single if offset is not None]
            held += found
        assert runs.check_integrity() == singles.check_integrity()
        assert runs.num_free_slabs == singles.num_free_slabs
    with pytest.raises(IntegrityError):
        runs.free_run([runs.allocate(CLASSES[0]) or 0] * 2)
