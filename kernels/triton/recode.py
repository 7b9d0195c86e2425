# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"
# ruff: noqa: ANN001, ANN202 - device code: types are Triton's, given by the arguments
"""Recode tiles between storage formats: copy, quantise, or quantise further.

One program per job, layer, KV head, and keys or values. The formula is that of `kernels.reference.quantise`, with the
same operations in the same order: division is the IEEE one (Triton's ``/`` is not), the multiply-add is fused, and
all other products are by powers of two, so neither compiler nor hardware can change a bit.
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
from kernels.triton.tiles import (
    INT4,
    INT8,
    K8V4,
    NATIVE,
    WINDOW,
    bits_k,
    bits_v,
    dequantise,
    element_bytes,
    head_address,
    head_part,
    load_codes_v,
    native_rows,
    storage_constants,
)

_DST_FORMAT, _DST_OFFSET, _DST_TILE = (tl.constexpr(c) for c in (JOB_DST_FORMAT, JOB_DST_OFFSET, JOB_DST_TILE))
_SRC_FORMAT, _SRC_OFFSET, _SRC_TILE = (tl.constexpr(c) for c in (JOB_SRC_FORMAT, JOB_SRC_OFFSET, JOB_SRC_TILE))
_SRC2_OFFSET, _SRC2_TILE, _WIDTH = (tl.constexpr(c) for c in (JOB_SRC2_OFFSET, JOB_SRC2_TILE, JOB_WIDTH))
_COPY_WORDS = tl.constexpr(1024)


@triton.jit
def _pick(code, native: tl.constexpr, int8: tl.constexpr, k8v4: tl.constexpr, int4: tl.constexpr):
    """The constant of a format known at run time only."""
    return tl.where(code == NATIVE, native, tl.where(code == INT8, int8, tl.where(code == K8V4, k8v4, int4)))


@triton.jit
def _any_address(
    code, offset, tile, layer, kv_head, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    ELEMENT: tl.constexpr,
):  # fmt: skip
    """`head_address` for a format known at run time only."""
    native = head_address(offset, tile, layer, kv_head, NATIVE, LAYERS, KV_HEADS, DIM, ELEMENT)
    int8 = head_address(offset, tile, layer, kv_head, INT8, LAYERS, KV_HEADS, DIM, ELEMENT)
    k8v4 = head_address(offset, tile, layer, kv_head, K8V4, LAYERS, KV_HEADS, DIM, ELEMENT)
    int4 = head_address(offset, tile, layer, kv_head, INT4, LAYERS, KV_HEADS, DIM, ELEMENT)
    return tl.where(code == NATIVE, native, tl.where(code == INT8, int8, tl.where(code == K8V4, k8v4, int4)))


@triton.jit
def _round_up(value, NATIVE_DTYPE: tl.constexpr):
    """Smallest native number that is >= `value` (float32, non-negative)."""
    nearest = value.to(NATIVE_DTYPE)
    if element_bytes(NATIVE_DTYPE) == 2:
        # The next larger of non-negative floats is the next integer of the same bits.
        below = (nearest.to(tl.float32) < value).to(tl.int16)
        nearest = (nearest.to(tl.int16, bitcast=True) + below).to(NATIVE_DTYPE, bitcast=True)
    return nearest


@triton.jit
def _codes(values, zero, scale, LEVELS: tl.constexpr):
    """Codes 0 .. LEVELS as uint8; `zero` and `scale` are float32 and broadcast against `values`."""
    ratio = tl.div_rn(values * 0.5 - zero * 0.5, tl.where(scale > 0.0, scale, float("inf")))
    rounded = tl.floor(ratio * 2.0 + 0.5)
    return tl.minimum(tl.maximum(rounded, 0.0), LEVELS).to(tl.uint8)


@triton.jit
def _scale(low, high, LEVELS: tl.constexpr, NATIVE_DTYPE: tl.constexpr):
    half_levels = tl.full(low.shape, LEVELS * 0.5, tl.float32)
    return _round_up(tl.div_rn(high * 0.5 - low * 0.5, half_levels), NATIVE_DTYPE)


@triton.jit
def _load_values(
    arena, source_code, source, source_2, KEY: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    NATIVE_DTYPE: tl.constexpr,
):  # fmt: skip
    """Two native tiles, or one tile's 8-bit codes, as float32: two of [32, HALF] (channels below, and from, dim / 2).

    Only 8-bit parts can still lose bits: keys of int8 and k8v4 (which lie alike), values of int8.
    """
    element: tl.constexpr = element_bytes(NATIVE_DTYPE)
    native_part: tl.constexpr = 0 if KEY else head_part(NATIVE, "v", DIM, element)
    part: tl.constexpr = 0 if KEY else head_part(INT8, "v", DIM, element)
    part_scale: tl.constexpr = head_part(INT8, "k_scale" if KEY else "v_scale", DIM, element)
    part_zero: tl.constexpr = head_part(INT8, "k_zero" if KEY else "v_zero", DIM, element)
    channel = tl.arange(0, HALF)
    token = tl.arange(0, WINDOW)
    inside = channel < DIM // 2
    if source_code == NATIVE:
        rows = native_rows(arena, source, source_2, native_part, NATIVE_DTYPE, DIM)[:, None] + channel[None, :]
        low = tl.load(rows, mask=inside[None, :], other=0.0).to(tl.float32)
        high = tl.load(rows + DIM // 2, mask=inside[None, :], other=0.0).to(tl.float32)
    else:
        code_low, code_high = load_codes_v(arena + source + part, 8, DIM, HALF)
        scale = (arena + source + part_scale).to(tl.pointer_type(NATIVE_DTYPE))
        zero = (arena + source + part_zero).to(tl.pointer_type(NATIVE_DTYPE))
        if KEY:
            scale_low = tl.load(scale + channel, mask=inside, other=0.0)[None, :]
            scale_high = tl.load(scale + DIM // 2 + channel, mask=inside, other=0.0)[None, :]
            zero_low = tl.load(zero + channel, mask=inside, other=0.0)[None, :]
            zero_high = tl.load(zero + DIM // 2 + channel, mask=inside, other=0.0)[None, :]
            low = dequantise(code_low, scale_low, zero_low)
            high = dequantise(code_high, scale_high, zero_high)
        else:
            scale_token = tl.load(scale + token)[:, None]
            zero_token = tl.load(zero + token)[:, None]
            low = dequantise(code_low, scale_token, zero_token)
            high = dequantise(code_high, scale_token, zero_token)
    return low, high


@triton.jit
def _store_codes(base, low, high, BITS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr):
    channel = tl.arange(0, HALF)[None, :]
    token = tl.arange(0, WINDOW)[:, None]
    inside = channel < DIM // 2
    if BITS == 4:
        tl.store(base + token * (DIM // 2) + channel, low | (high << 4), mask=inside)
    else:
        tl.store(base + token * DIM + channel, low, mask=inside)
        tl.store(base + token * DIM + DIM // 2 + channel, high, mask=inside)


@triton.jit
def _store_quantised(
    arena, target, low, high, KEY: tl.constexpr, CODE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    NATIVE_DTYPE: tl.constexpr,
):  # fmt: skip
    """Quantise float32 values (two of [32, HALF]) into the key or value part of a tile of format `CODE`."""
    element: tl.constexpr = element_bytes(NATIVE_DTYPE)
    bits: tl.constexpr = bits_k(CODE) if KEY else bits_v(CODE)
    levels: tl.constexpr = (1 << bits) - 1
    part: tl.constexpr = head_part(CODE, "k" if KEY else "v", DIM, element)
    part_scale: tl.constexpr = head_part(CODE, "k_scale" if KEY else "v_scale", DIM, element)
    part_zero: tl.constexpr = head_part(CODE, "k_zero" if KEY else "v_zero", DIM, element)
    channel = tl.arange(0, HALF)
    token = tl.arange(0, WINDOW)
    inside = channel < DIM // 2
    at_scale = (arena + target + part_scale).to(tl.pointer_type(NATIVE_DTYPE))
    at_zero = (arena + target + part_zero).to(tl.pointer_type(NATIVE_DTYPE))
    if KEY:
        zero_low = tl.min(low, axis=0)
        zero_high = tl.min(high, axis=0)
        scale_low = _scale(zero_low, tl.max(low, axis=0), levels, NATIVE_DTYPE)
        scale_high = _scale(zero_high, tl.max(high, axis=0), levels, NATIVE_DTYPE)
        code_low = _codes(low, zero_low[None, :], scale_low.to(tl.float32)[None, :], levels)
        code_high = _codes(high, zero_high[None, :], scale_high.to(tl.float32)[None, :], levels)
        tl.store(at_scale + channel, scale_low, mask=inside)
        tl.store(at_scale + DIM // 2 + channel, scale_high, mask=inside)
        tl.store(at_zero + channel, zero_low.to(NATIVE_DTYPE), mask=inside)
        tl.store(at_zero + DIM // 2 + channel, zero_high.to(NATIVE_DTYPE), mask=inside)
    else:
        # Padding lanes (head_dim / 2 not a power of two) must not take part in a token's range.
        lanes = inside[None, :]
        least = tl.min(tl.where(lanes, tl.minimum(low, high), float("inf")), axis=1)
        most = tl.max(tl.where(lanes, tl.maximum(low, high), float("-inf")), axis=1)
        scale = _scale(least, most, levels, NATIVE_DTYPE)
        code_low = _codes(low, least[:, None], scale.to(tl.float32)[:, None], levels)
        code_high = _codes(high, least[:, None], scale.to(tl.float32)[:, None], levels)
        tl.store(at_scale + token, scale)
        tl.store(at_zero + token, least.to(NATIVE_DTYPE))
    _store_codes(arena + target + part, code_low, code_high, bits, DIM, HALF)


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
    element: tl.constexpr = element_bytes(NATIVE_DTYPE)
    if KEY:
        source_bits = _pick(source_code, 0, bits_k(INT8), bits_k(K8V4), bits_k(INT4))
        target_bits = _pick(target_code, 0, bits_k(INT8), bits_k(K8V4), bits_k(INT4))
    else:
        source_bits = _pick(source_code, 0, bits_v(INT8), bits_v(K8V4), bits_v(INT4))
        target_bits = _pick(target_code, 0, bits_v(INT8), bits_v(K8V4), bits_v(INT4))
    if source_bits == target_bits:
        source_v = _pick(
            source_code, head_part(NATIVE, "v", DIM, element), head_part(INT8, "v", DIM, element),
            head_part(K8V4, "v", DIM, element), head_part(INT4, "v", DIM, element),
        )  # fmt: skip
        target_v = _pick(
            target_code, head_part(NATIVE, "v", DIM, element), head_part(INT8, "v", DIM, element),
            head_part(K8V4, "v", DIM, element), head_part(INT4, "v", DIM, element),
        )  # fmt: skip
        size = _pick(
            source_code, head_part(NATIVE, "size", DIM, element), head_part(INT8, "size", DIM, element),
            head_part(K8V4, "size", DIM, element), head_part(INT4, "size", DIM, element),
        )  # fmt: skip
        if KEY:
            _copy(arena, source, target, source_v)
        else:
            _copy(arena, source + source_v, target + target_v, size - source_v)
    elif (source_bits == 0) | (source_bits > target_bits):
        low, high = _load_values(arena, source_code, source, source_2, KEY, DIM, HALF, NATIVE_DTYPE)
        if target_code == INT8:
            _store_quantised(arena, target, low, high, KEY, INT8, DIM, HALF, NATIVE_DTYPE)
        elif target_code == K8V4:
            _store_quantised(arena, target, low, high, KEY, K8V4, DIM, HALF, NATIVE_DTYPE)
        elif target_code == INT4:
            _store_quantised(arena, target, low, high, KEY, INT4, DIM, HALF, NATIVE_DTYPE)


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
    source = _any_address(source_code, offset, tile, layer, kv_head, LAYERS, KV_HEADS, DIM, element)
    offset = tl.load(job + _SRC2_OFFSET)
    tile = tl.load(job + _SRC2_TILE)
    source_2 = head_address(offset, tile, layer, kv_head, NATIVE, LAYERS, KV_HEADS, DIM, element)
    offset = tl.load(job + _DST_OFFSET)
    tile = tl.load(job + _DST_TILE)
    target = _any_address(target_code, offset, tile, layer, kv_head, LAYERS, KV_HEADS, DIM, element)
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
