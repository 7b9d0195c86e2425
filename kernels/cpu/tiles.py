"""Tile arithmetic shared by the CPU kernels: where parts lie, and reading rows of a tile into float32 scratch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.compile import exact
from kernels.cpu.lowlevel import fma, load, load_nibbles, store
from kernels.layout import FORMATS, KVShape

# Columns of the layout array, one row per format code. All but the token count and bits are in bytes.
TILE_TOKENS, BITS_K, BITS_V, TILE_STRIDE, TILE_BYTES, HEAD_BYTES = range(6)
K_CODES, K_SCALE, K_ZERO, V_CODES, V_SCALE, V_ZERO = range(6, 12)

_STANDS_FOR = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}


@functools.cache
def layout_array(shape: KVShape) -> npt.NDArray[np.int64]:
    """Byte layout of every format for ``shape``: int64 [formats, 12], columns as above (a pure function, memoised)."""
    rows = []
    for kv_format in FORMATS:
        head = shape.head_layout(kv_format)
        sizes = (shape.tile_stride(kv_format), shape.tile_bytes(kv_format), head.size)
        parts = (head.k, head.k_scale, head.k_zero, head.v, head.v_scale, head.v_zero)
        rows.append((kv_format.tile_tokens, kv_format.bits_k, kv_format.bits_v, *sizes, *parts))
    return np.array(rows, dtype=np.int64)


def elements_of(tensor: torch.Tensor, native_dtype: torch.dtype) -> npt.NDArray[Any]:
    """The memory of a contiguous tensor, of bytes or of the native dtype, as the array that stands for this dtype.

    See :mod:`kernels.cpu.lowlevel`. Bytes become another dtype in numpy, which is quicker than in torch.
    """
    if tensor.dtype == torch.uint8:
        return tensor.numpy().view(_STANDS_FOR[native_dtype])
    if native_dtype == torch.float32:
        return tensor.numpy()
    return tensor.view(torch.uint16 if native_dtype == torch.bfloat16 else torch.int16).numpy()


@exact
def unpack(codes: Any, byte: Any, bits: Any, rows: Any, head_dim: Any, scratch: Any, at: Any) -> None:
    """Codes of the first rows of one part of a tile into flat float32 ``scratch`` [rows, head_dim] from index ``at``.

    ``byte``: where the part starts. Codes are converted, not scaled: callers fold scale and zero point into queries
    and weights.
    """
    if bits == 8:
        for i in range(rows * head_dim):
            store(scratch, at + i, load(codes, byte + i))
        return
    half = head_dim // 2
    for row in range(rows):
        source, target = byte + row * half, at + row * head_dim
        for i in range(half):
            low, high = load_nibbles(codes, source + i)
            store(scratch, target + i, low)
            store(scratch, target + half + i, high)


@exact
def read_keys(arena: Any, form: Any, tile: Any, rows: Any, head_dim: Any, scratch: Any, at: Any) -> None:
    """Keys of the first rows of one head's tile at byte ``tile``, dequantised into ``scratch`` from index ``at``."""
    codes, elements = arena
    if form[BITS_K] == 0:
        _widen(elements, (tile + form[K_CODES]) // elements.itemsize, rows * head_dim, scratch, at)
        return
    unpack(codes, tile + form[K_CODES], form[BITS_K], rows, head_dim, scratch, at)
    scale, zero = (tile + form[K_SCALE]) // elements.itemsize, (tile + form[K_ZERO]) // elements.itemsize
    for row in range(rows):
        target = at + row * head_dim
        for d in range(head_dim):
            value = fma(load(elements, scale + d), load(scratch, target + d), load(elements, zero + d))
            store(scratch, target + d, value)


@exact
def read_values(arena: Any, form: Any, tile: Any, rows: Any, head_dim: Any, scratch: Any, at: Any) -> None:
    """Values of the first rows of one head's tile at byte ``tile``, dequantised into ``scratch`` from index ``at``."""
    codes, elements = arena
    if form[BITS_V] == 0:
        _widen(elements, (tile + form[V_CODES]) // elements.itemsize, rows * head_dim, scratch, at)
        return
    unpack(codes, tile + form[V_CODES], form[BITS_V], rows, head_dim, scratch, at)
    scales, zeros = (tile + form[V_SCALE]) // elements.itemsize, (tile + form[V_ZERO]) // elements.itemsize
    for row in range(rows):
        scale, zero, target = load(elements, scales + row), load(elements, zeros + row), at + row * head_dim
        for d in range(head_dim):
            store(scratch, target + d, fma(scale, load(scratch, target + d), zero))


@exact
def _widen(elements: Any, start: Any, count: Any, scratch: Any, at: Any) -> None:
    for i in range(count):
        store(scratch, at + i, load(elements, start + i))
