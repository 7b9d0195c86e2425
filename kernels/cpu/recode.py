"""Tile conversion, the formula of ``kernels.reference.quantise`` bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kernels.cpu.compile import entry, inlined, source_stamp
from kernels.cpu.lowlevel import load, native_exact, native_round_up, store
from kernels.cpu.tiles import (
    BITS_K,
    BITS_V,
    HEAD_BYTES,
    K_CODES,
    K_SCALE,
    K_ZERO,
    TILE_STRIDE,
    V_CODES,
    V_SCALE,
    V_ZERO,
    elements_of,
    layout_array,
    read_keys,
    read_values,
)
from kernels.layout import (
    JOB_DST_FORMAT,
    JOB_DST_OFFSET,
    JOB_DST_TILE,
    JOB_SRC2_OFFSET,
    JOB_SRC2_TILE,
    JOB_SRC_FORMAT,
    JOB_SRC_OFFSET,
    JOB_SRC_TILE,
    NATIVE_TILE_TOKENS,
    OFFSET_UNIT,
    QUANT_TILE_TOKENS,
    KVShape,
)
from kernels.reference.tiles import native_dtype_of

_HALF = np.float32(0.5)
_ZERO = np.float32(0)


@inlined
def _step(low: Any, high: Any, levels: Any) -> Any:
    return (high * _HALF - low * _HALF) / (levels * _HALF)


@inlined
def _code(value: Any, low: Any, scale: Any, levels: Any) -> Any:
    if scale == _ZERO:
        return np.uint8(0)
    ratio = (value * _HALF - low * _HALF) / scale
    return np.uint8(min(max(np.floor(ratio * np.float32(2) + _HALF), _ZERO), levels))


@inlined
def _put_codes(codes: Any, byte: Any, bits: Any, head_dim: Any, rows: Any) -> None:
    """Store one byte per code, or two codes in each."""
    if bits == 8:
        for i in range(QUANT_TILE_TOKENS * head_dim):
            store(codes, byte + i, rows[i])
        return
    half = head_dim // 2
    for t in range(QUANT_TILE_TOKENS):
        for d in range(half):
            packed = rows[t * head_dim + d] | (rows[t * head_dim + half + d] << 4)
            store(codes, byte + t * half + d, np.uint8(packed))


@inlined
def _put_keys(arena: Any, form: Any, tile: Any, head_dim: Any, key: Any, work: Any) -> None:
    """Quantise ``key``, flat [32, head_dim], per channel over the tile."""
    codes, elements = arena
    rows, low, high = work
    levels = np.float32((1 << form[BITS_K]) - 1)
    scale, zero = (tile + form[K_SCALE]) // elements.itemsize, (tile + form[K_ZERO]) // elements.itemsize
    for d in range(head_dim):
        low[d] = high[d] = key[d]
    for t in range(1, QUANT_TILE_TOKENS):
        for d in range(head_dim):
            value = load(key, t * head_dim + d)
            low[d], high[d] = min(value, low[d]), max(value, high[d])
    for d in range(head_dim):
        low[d] += _ZERO
        store(elements, zero + d, native_exact(elements, low[d]))
        store(elements, scale + d, native_round_up(elements, _step(low[d], high[d], levels)))
    for t in range(QUANT_TILE_TOKENS):
        for d in range(head_dim):
            i = t * head_dim + d
            store(rows, i, _code(load(key, i), low[d], load(elements, scale + d), levels))
    _put_codes(codes, tile + form[K_CODES], form[BITS_K], head_dim, rows)


@inlined
def _put_values(arena: Any, form: Any, tile: Any, head_dim: Any, values: Any, work: Any) -> None:
    """Quantise ``values``, flat [32, head_dim], per token over the head."""
    codes, elements = arena
    rows = work[0]
    levels = np.float32((1 << form[BITS_V]) - 1)
    scales, zeros = (tile + form[V_SCALE]) // elements.itemsize, (tile + form[V_ZERO]) // elements.itemsize
    for t in range(QUANT_TILE_TOKENS):
        first = t * head_dim
        low = high = load(values, first)
        for d in range(1, head_dim):
            low, high = min(load(values, first + d), low), max(load(values, first + d), high)
        low += _ZERO
        store(elements, zeros + t, native_exact(elements, low))
        store(elements, scales + t, native_round_up(elements, _step(low, high, levels)))
        scale = load(elements, scales + t)
        for d in range(head_dim):
            store(rows, first + d, _code(load(values, first + d), low, scale, levels))
    _put_codes(codes, tile + form[V_CODES], form[BITS_V], head_dim, rows)


@inlined
def _copy_bytes(codes: Any, target: Any, source: Any, size: Any) -> None:
    for i in range(size):
        store(codes, target + i, codes[source + i])


@inlined
def _convert_head(
    arena: Any, target: Any, source: Any, to: Any, at: Any, at_second: Any, head_dim: Any, values: Any, work: Any
) -> None:
    """One head of one layer: keys, then values, each copied or quantised. ``values``: flat [32, head_dim] scratch."""
    native = source[BITS_K] == 0
    rows = NATIVE_TILE_TOKENS if native else QUANT_TILE_TOKENS
    middle = NATIVE_TILE_TOKENS * head_dim
    if target[BITS_K] == source[BITS_K]:
        _copy_bytes(arena[0], to + target[K_CODES], at + source[K_CODES], source[V_CODES] - source[K_CODES])
    else:
        read_keys(arena, source, at, rows, head_dim, values, 0)
        if native:
            read_keys(arena, source, at_second, rows, head_dim, values, middle)
        _put_keys(arena, target, to, head_dim, values, work)
    if target[BITS_V] == source[BITS_V]:
        _copy_bytes(arena[0], to + target[V_CODES], at + source[V_CODES], source[HEAD_BYTES] - source[V_CODES])
    else:
        read_values(arena, source, at, rows, head_dim, values, 0)
        if native:
            read_values(arena, source, at_second, rows, head_dim, values, middle)
        _put_values(arena, target, to, head_dim, values, work)


def _build(stamp: int) -> Callable[..., None]:
    @entry()
    def convert_tiles(arena: Any, layout: Any, jobs: Any, head_dim: Any) -> None:
        _ = stamp
        size = QUANT_TILE_TOKENS * head_dim
        values = np.empty(size, dtype=np.float32)
        work = (
            np.empty(size, dtype=np.uint8),
            np.empty(head_dim, dtype=np.float32),
            np.empty(head_dim, dtype=np.float32),
        )
        for number in range(jobs.shape[0]):
            target, source = layout[jobs[number, JOB_DST_FORMAT]], layout[jobs[number, JOB_SRC_FORMAT]]
            to = np.int64(jobs[number, JOB_DST_OFFSET]) * OFFSET_UNIT + jobs[number, JOB_DST_TILE] * target[TILE_STRIDE]
            at = np.int64(jobs[number, JOB_SRC_OFFSET]) * OFFSET_UNIT + jobs[number, JOB_SRC_TILE] * source[TILE_STRIDE]
            if jobs[number, JOB_DST_FORMAT] == jobs[number, JOB_SRC_FORMAT]:
                _copy_bytes(arena[0], to, at, source[TILE_STRIDE])
                continue
            second = at
            if source[BITS_K] == 0:
                second = np.int64(jobs[number, JOB_SRC2_OFFSET]) * OFFSET_UNIT
                second += jobs[number, JOB_SRC2_TILE] * source[TILE_STRIDE]
            for head in range(target[TILE_STRIDE] // target[HEAD_BYTES]):
                shift = head * source[HEAD_BYTES]
                place = to + head * target[HEAD_BYTES]
                _convert_head(arena, target, source, place, at + shift, second + shift, head_dim, values, work)

    return convert_tiles


# arena: (bytes, native elements); layout: layout_array; jobs int32 [jobs, 8]. The heads of all layers of a tile follow
# each other without gaps, so layers need no loop of their own.
_convert_tiles = _build(source_stamp())


def recode(arena: torch.Tensor, shape: KVShape, jobs: torch.Tensor, *, native_dtype: torch.dtype | None = None) -> None:
    """See :func:`kernels.ops.recode`."""
    element = native_dtype_of(shape, native_dtype)
    _convert_tiles(
        (arena.numpy(), elements_of(arena, element)), layout_array(shape), jobs.contiguous().numpy(), shape.head_dim
    )
