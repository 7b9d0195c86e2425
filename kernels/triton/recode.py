# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"
# ruff: noqa: ANN001, ANN202 - device code: types are Triton's, given by the arguments
"""Recode tiles between storage formats: copy, quantise, or quantise further.

One program per job, layer, KV head, and keys or values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.layout import (
    JOB_DST_FORMAT,
    JOB_DST_OFFSET,
    JOB_DST_TILE,
    JOB_SRC2_OFFSET,
    JOB_SRC2_TILE,
    JOB_SRC_FORMAT,
    JOB_SRC_OFFSET,
    JOB_SRC_TILE,
    JOB_WIDTH,
    KVShape,
)
from kernels.reference.tiles import native_dtype_of
from kernels.triton.launch import storage_constants
from kernels.triton.quantise import load_values, store_quantised
from kernels.triton.tiles import NATIVE, address_of, bits_of, element_bytes, head_address, head_part, part_of

_DST_FORMAT, _DST_OFFSET, _DST_TILE = (tl.constexpr(c) for c in (JOB_DST_FORMAT, JOB_DST_OFFSET, JOB_DST_TILE))
_SRC_FORMAT, _SRC_OFFSET, _SRC_TILE = (tl.constexpr(c) for c in (JOB_SRC_FORMAT, JOB_SRC_OFFSET, JOB_SRC_TILE))
_SRC2_OFFSET, _SRC2_TILE, _WIDTH = (tl.constexpr(c) for c in (JOB_SRC2_OFFSET, JOB_SRC2_TILE, JOB_WIDTH))
_COPY_WORDS = tl.constexpr(1024)


@triton.jit
def _copy(arena, source, target, size):
    """Copy `size` bytes, a multiple of 16."""
    words = (size // 4).to(tl.int32)
    lane = tl.arange(0, _COPY_WORDS)
    origin = (arena + source).to(tl.pointer_type(tl.int32))
    destination = (arena + target).to(tl.pointer_type(tl.int32))
    done = words * 0
    while done < words:
        mask = done + lane < words
        tl.store(destination + done + lane, tl.load(origin + done + lane, mask=mask), mask=mask)
        done += _COPY_WORDS


@triton.jit
def _recode_part(
    arena, source_code, target_code, source, source_2, target, KEY: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, NATIVE_DTYPE: tl.constexpr,
):  # fmt: skip
    """The keys or the values of one head; `source`, `source_2`, `target`: where the head's parts of the tiles begin."""
    element: tl.constexpr = element_bytes(NATIVE_DTYPE)
    source_bits = bits_of(source_code, KEY)
    target_bits = bits_of(target_code, KEY)
    source_v = part_of(source_code, "v", DIM, element)
    if KEY:
        size = source_v
    else:
        size = part_of(source_code, "size", DIM, element) - source_v
        source += source_v
        source_2 += head_part(NATIVE, "v", DIM, element)
        target += part_of(target_code, "v", DIM, element)
    if source_bits == target_bits:
        _copy(arena, source, target, size)
    else:
        low, high = load_values(arena, source_bits, source, source_2, KEY, DIM, HALF, NATIVE_DTYPE)
        if target_bits == 8:
            store_quantised(arena, target, low, high, KEY, 8, DIM, HALF, NATIVE_DTYPE)
        else:
            store_quantised(arena, target, low, high, KEY, 4, DIM, HALF, NATIVE_DTYPE)


@triton.jit
def _recode_kernel(
    arena, jobs, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    NATIVE_DTYPE: tl.constexpr,
):  # fmt: skip
    element: tl.constexpr = element_bytes(NATIVE_DTYPE)
    job = jobs + tl.program_id(0).to(tl.int64) * _WIDTH
    layer = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    source_code = tl.load(job + _SRC_FORMAT)
    target_code = tl.load(job + _DST_FORMAT)
    offset = tl.load(job + _SRC_OFFSET)
    tile = tl.load(job + _SRC_TILE)
    source = address_of(source_code, offset, tile, layer, kv_head, LAYERS, KV_HEADS, DIM, element)
    offset = tl.load(job + _SRC2_OFFSET)
    tile = tl.load(job + _SRC2_TILE)
    source_2 = head_address(offset, tile, layer, kv_head, NATIVE, LAYERS, KV_HEADS, DIM, element)
    offset = tl.load(job + _DST_OFFSET)
    tile = tl.load(job + _DST_TILE)
    target = address_of(target_code, offset, tile, layer, kv_head, LAYERS, KV_HEADS, DIM, element)
    # Codes are in order of lossiness, and lost precision does not come back.
    if target_code >= source_code:
        if tl.program_id(2) == 0:
            _recode_part(arena, source_code, target_code, source, source_2, target, True, DIM, HALF, NATIVE_DTYPE)
        else:
            _recode_part(arena, source_code, target_code, source, source_2, target, False, DIM, HALF, NATIVE_DTYPE)


def recode_launcher(arena: torch.Tensor, shape: KVShape, jobs: torch.Tensor, native_dtype: torch.dtype) -> None:
    """Launch the kernel; allocates nothing and does not wait. Jobs to a less lossy format write nothing."""
    _recode_kernel[(jobs.shape[0], shape.num_layers * shape.num_kv_heads, 2)](
        arena, jobs, **storage_constants(shape, native_dtype), num_warps=4, num_stages=1
    )  # fmt: skip


def recode(arena: torch.Tensor, shape: KVShape, jobs: torch.Tensor, *, native_dtype: torch.dtype | None = None) -> None:
    """Fill each job's destination tile, all layers; see :func:`kernels.ops.recode`."""
    if jobs.shape[0]:
        recode_launcher(arena, shape, jobs.contiguous(), native_dtype_of(shape, native_dtype))
