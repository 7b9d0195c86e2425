"""CPU recode, gather and write against the reference, byte for byte, for all tile shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import ops, reference
from kernels.layout import BLOCK_SIZES, FORMATS, INT8, K8V4, NATIVE, OFFSET_UNIT, KVShape

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (8, 48, 64, 80, 96, 128, 256)


def _awkward(kv: torch.Tensor) -> torch.Tensor:
    """Constants, near-constants, both zeros and large values among ordinary ones."""
    kv[:, :, :, 0, 1] = 3.5
    kv[:, :, 5] = -100.0
    kv[:, :, 6, :, ::2] = 0.0
    kv[:, :, 6, :, 1::2] = -0.0
    kv[:, :, 7] = 100.0
    kv[:, :, 7, :, 3] += 0.0625
    kv[:, :, 9, :, 0] = 60000.0
    kv[:, :, 11, :, 2] = 1e-8
    return kv


def _jobs(
    kernel_cases: Any, shape: KVShape, dtype: torch.dtype, scale: float, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """An arena with 64 tokens in each format (tiles 1.. of a block) and jobs for every allowed pair of formats."""
    generator = torch.Generator().manual_seed(seed)
    kv = _awkward(kernel_cases.random_kv(shape, 64, dtype, generator) * scale)
    arena = torch.full((shape.block_bytes(NATIVE, 64) * 18 + OFFSET_UNIT,), 255, dtype=torch.uint8)
    offset, places = 1, {}
    for kv_format in FORMATS:
        kernel_cases.fill_block(arena, shape, offset, kernel_cases.Piece(kv_format, 64, 0, 64), kv, dtype)
        places[kv_format.code] = offset
        offset += shape.block_bytes(kv_format, 64) // OFFSET_UNIT
    jobs = []
    for source in FORMATS:
        for target in FORMATS[source.code :]:
            merges = source.is_native and not target.is_native
            second = (places[0], 3) if merges else (-1, -1)
            jobs.append((target.code, offset, 1, source.code, places[source.code], 2 if merges else 1, *second))
            offset += shape.block_bytes(target, 64) // OFFSET_UNIT
    return arena, torch.tensor(jobs, dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_every_pair_of_formats_equals_the_reference(
    kernel_cases: Any, dtype: torch.dtype, head_dim: int, scale: float
) -> None:
    shape = KVShape(2, 3, head_dim, dtype.itemsize)
    want, jobs = _jobs(kernel_cases, shape, dtype, scale, seed=head_dim)
    got = want.clone()
    reference.recode(want, shape, jobs, native_dtype=dtype)
    ops.recode(got, shape, jobs, native_dtype=dtype, backend="cpu")
    assert torch.equal(got, want)


@pytest.mark.parametrize("kv_format", FORMATS, ids=lambda kv_format: kv_format.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merging_and_splitting_blocks_loses_nothing(kernel_cases: Any, kv_format: Any, dtype: torch.dtype) -> None:
    """Blocks of every size in turn, 256 tokens each time: what is stored stays equal byte for byte."""
    shape = KVShape(2, 2, 64, dtype.itemsize)
    generator = torch.Generator().manual_seed(1)
    sizes = [size for size in (32, 256, 64, 16, 128, 32) if size % kv_format.tile_tokens == 0]
    assert set(sizes) == {size for size in BLOCK_SIZES if size % kv_format.tile_tokens == 0}
    kv = kernel_cases.random_kv(shape, 256, dtype, generator)
    cache = kernel_cases.build(shape, dtype, [(kv, kernel_cases.uniform(256, kv_format, sizes[0]))], generator)
    room = max(shape.block_bytes(kv_format, size) // OFFSET_UNIT * (256 // size) for size in sizes)
    base = cache.arena.numel() // OFFSET_UNIT
    arena = torch.cat((cache.arena, torch.full((2 * room * OFFSET_UNIT,), 255, dtype=torch.uint8)))
    tokens = kv_format.tile_tokens
    entries, size = cache.entries[0, : 256 // sizes[0]], sizes[0]
    before = ops.gather_kv(arena, shape, 1, entries, len(entries), native_dtype=dtype)
    for turn, larger in enumerate(sizes[1:]):
        start = base + turn % 2 * room
        step = shape.block_bytes(kv_format, larger) // OFFSET_UNIT
        fresh = torch.tensor(
            [(start + i * step, kv_format.code, i * larger, larger) for i in range(256 // larger)], dtype=torch.int32
        )
        jobs = []
        for position in range(0, 256, tokens):
            source, target = entries[position // size], fresh[position // larger]
            tiles = position % larger // tokens, position % size // tokens
            jobs.append((kv_format.code, int(target[0]), tiles[0], kv_format.code, int(source[0]), tiles[1], -1, -1))
        ops.recode(arena, shape, torch.tensor(jobs, dtype=torch.int32), native_dtype=dtype)
        entries, size = fresh, larger
        after = ops.gather_kv(arena, shape, 1, entries, len(entries), native_dtype=dtype)
        for old, new in zip(before, after, strict=True):
            kernel_cases.assert_same_bits(new, old)


def test_bits_that_do_not_change_are_copied(kernel_cases: Any) -> None:
    """int8 to k8v4 leaves keys alone: what was lost once is not lost again."""
    shape = KVShape(2, 2, 64, 4)
    for backend in ("cpu", "reference"):
        arena, jobs = _jobs(kernel_cases, shape, torch.float32, 1.0, seed=1)
        job = next(job for job in jobs.tolist() if job[0] == K8V4.code and job[3] == INT8.code)
        ops.recode(arena, shape, torch.tensor([job], dtype=torch.int32), backend=backend)
        sizes = shape.head_layout(INT8), shape.head_layout(K8V4)
        assert sizes[0].v == sizes[1].v
        for head in range(shape.num_layers * shape.num_kv_heads):
            old = job[4] * OFFSET_UNIT + job[5] * shape.tile_stride(INT8) + head * sizes[0].size
            new = job[1] * OFFSET_UNIT + job[2] * shape.tile_stride(K8V4) + head * sizes[1].size
            assert torch.equal(arena[old : old + sizes[0].v], arena[new : new + sizes[1].v])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_equals_the_reference(kernel_cases: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for head_dim in (48, 256):
        shape = KVShape(2, 3, head_dim, dtype.itemsize)
        layouts = kernel_cases.every_layout()[-10:]
        cache = kernel_cases.random_cache(shape, dtype, layouts, generator)
        for sequence in range(len(layouts)):
            count = int(cache.num_entries[sequence])
            arguments = (cache.arena, shape, 1, cache.entries[sequence], count)
            got = ops.gather_kv(*arguments, native_dtype=dtype, backend="cpu")
            want = reference.gather_kv(*arguments, native_dtype=dtype)
            for mine, theirs in zip(got, want, strict=True):
                kernel_cases.assert_same_bits(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_changes_exactly_the_slots(dtype: torch.dtype) -> None:
    """Tokens in any order, keys and values as slices of one fused projection, blocks of two sizes."""
    shape = KVShape(3, 2, 80, dtype.itemsize)
    generator = torch.Generator().manual_seed(4)
    small, large = (shape.block_bytes(NATIVE, size) // OFFSET_UNIT for size in (16, 64))
    slots = [(1, i) for i in range(16)] + [(1 + small, i) for i in range(64)] + [(1 + small + large, 5)]
    order = torch.randperm(len(slots), generator=generator)[:37]
    chosen = torch.tensor(slots, dtype=torch.int32)[order]
    fused = torch.randn((37, 4, 2, 80), generator=generator).to(dtype)
    want = torch.full(((1 + 2 * small + large) * OFFSET_UNIT,), 255, dtype=torch.uint8)
    got = want.clone()
    for layer in range(3):
        reference.write_kv(want, shape, layer, fused[:, 1], fused[:, 3], chosen)
        ops.write_kv(got, shape, layer, fused[:, 1], fused[:, 3], chosen, backend="cpu")
    assert torch.equal(got, want)
    changed = int((want != 255).sum())
    assert changed <= 37 * 3 * 2 * 2 * 80 * dtype.itemsize
