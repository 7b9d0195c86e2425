# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"
# ruff: noqa: ANN001, ANN202 - device code: types are Triton's, given by the arguments
"""Keys and values of one sequence in position order, dequantised to float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.layout import BLOCK_SIZES, ENTRY_VALID, NATIVE_TILE_TOKENS, KVShape
from kernels.reference.tiles import native_dtype_of
from kernels.triton.launch import storage_constants
from kernels.triton.tiles import (
    HALF_WINDOW,
    NATIVE,
    VALID_COLUMN,
    WIDTH,
    WINDOW,
    address_of,
    bits_of,
    constants_offset,
    dequantise,
    element_bytes,
    head_address,
    load_entry,
    part_of,
)


@triton.jit
def _load_part(base, row, inside, BITS: tl.constexpr, KEY: tl.constexpr,
               DIM: tl.constexpr, HALF: tl.constexpr, NATIVE_DTYPE: tl.constexpr):  # fmt: skip
    """Rows `row` [16] of the keys or values whose codes begin at `base`, float32: two of [16, HALF]."""
    element: tl.constexpr = element_bytes(NATIVE_DTYPE)
    channel = tl.arange(0, HALF)
    if BITS == 4:
        packed = tl.load(base + row[:, None] * (DIM // 2) + channel[None, :], mask=inside, other=0)
        code_low = packed & 15
        code_high = packed >> 4
    else:
        code_low = tl.load(base + row[:, None] * DIM + channel[None, :], mask=inside, other=0)
        code_high = tl.load(base + row[:, None] * DIM + DIM // 2 + channel[None, :], mask=inside, other=0)
    scale = (base + constants_offset("scale", KEY, BITS, DIM, element)).to(tl.pointer_type(NATIVE_DTYPE))
    zero = (base + constants_offset("zero", KEY, BITS, DIM, element)).to(tl.pointer_type(NATIVE_DTYPE))
    if KEY:
        lanes = channel < DIM // 2
        scale_low = tl.load(scale + channel, mask=lanes, other=0.0)[None, :]
        scale_high = tl.load(scale + DIM // 2 + channel, mask=lanes, other=0.0)[None, :]
        zero_low = tl.load(zero + channel, mask=lanes, other=0.0)[None, :]
        zero_high = tl.load(zero + DIM // 2 + channel, mask=lanes, other=0.0)[None, :]
        low = dequantise(code_low, scale_low, zero_low)
        high = dequantise(code_high, scale_high, zero_high)
    else:
        scale_row = tl.load(scale + row)[:, None]
        zero_row = tl.load(zero + row)[:, None]
        low = dequantise(code_low, scale_row, zero_row)
        high = dequantise(code_high, scale_row, zero_row)
    return low, high


@triton.jit
def _load_any(
    base, row, inside, bits, KEY: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NATIVE_DTYPE: tl.constexpr
):
    if bits == 8:
        low, high = _load_part(base, row, inside, 8, KEY, DIM, HALF, NATIVE_DTYPE)
    else:
        low, high = _load_part(base, row, inside, 4, KEY, DIM, HALF, NATIVE_DTYPE)
    return low, high


@triton.jit(do_not_specialize=["layer"])
def _gather_kv_kernel(
    arena, entries, starts, key, value, layer,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NATIVE_DTYPE: tl.constexpr,
):  # fmt: skip
    """One program per entry, 16 of its tokens, and KV head; `starts` [entries] says where its rows begin."""
    element: tl.constexpr = element_bytes(NATIVE_DTYPE)
    entry = tl.program_id(0)
    chunk = tl.program_id(1)
    kv_head = tl.program_id(2)
    offset, code, _, _ = load_entry(entries, entry, entry + 1)
    valid = tl.load(entries + entry * WIDTH + VALID_COLUMN)
    if chunk * HALF_WINDOW < valid:
        token = tl.arange(0, HALF_WINDOW)
        channel = tl.arange(0, HALF)
        inside = (chunk * HALF_WINDOW + token < valid)[:, None] & (channel < DIM // 2)[None, :]
        row = token + chunk * HALF_WINDOW % WINDOW
        tile = chunk * HALF_WINDOW // WINDOW
        if code == NATIVE:
            at = arena + head_address(offset, chunk, layer, kv_head, NATIVE, LAYERS, KV_HEADS, DIM, element)
            keys = at.to(tl.pointer_type(NATIVE_DTYPE)) + token[:, None] * DIM + channel[None, :]
            values = keys + HALF_WINDOW * DIM
            key_low = tl.load(keys, mask=inside, other=0.0).to(tl.float32)
            key_high = tl.load(keys + DIM // 2, mask=inside, other=0.0).to(tl.float32)
            value_low = tl.load(values, mask=inside, other=0.0).to(tl.float32)
            value_high = tl.load(values + DIM // 2, mask=inside, other=0.0).to(tl.float32)
        else:
            at = arena + address_of(code, offset, tile, layer, kv_head, LAYERS, KV_HEADS, DIM, element)
            key_low, key_high = _load_any(at, row, inside, bits_of(code, True), True, DIM, HALF, NATIVE_DTYPE)
            at += part_of(code, "v", DIM, element)
            value_low, value_high = _load_any(at, row, inside, bits_of(code, False), False, DIM, HALF, NATIVE_DTYPE)
        line = tl.load(starts + entry).to(tl.int64) + chunk * HALF_WINDOW + token
        to = (line * KV_HEADS + kv_head)[:, None] * DIM + channel[None, :]
        tl.store(key + to, key_low, mask=inside)
        tl.store(key + to + DIM // 2, key_high, mask=inside)
        tl.store(value + to, value_low, mask=inside)
        tl.store(value + to + DIM // 2, value_high, mask=inside)


def gather_kv_launcher(
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    entries: torch.Tensor,
    starts: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    native_dtype: torch.dtype,
) -> None:
    """Launch the kernel; allocates nothing and does not wait.

    ``entries`` int32 [entries, 4]; ``starts`` int64 [entries], rows before each entry's; ``key``, ``value`` float32
    [tokens, kv_heads, head_dim], contiguous.
    """
    chunks = max(BLOCK_SIZES) // NATIVE_TILE_TOKENS
    _gather_kv_kernel[(entries.shape[0], chunks, shape.num_kv_heads)](
        arena, entries, starts, key, value, layer,
        **storage_constants(shape, native_dtype), num_warps=4, num_stages=1,
    )  # fmt: skip


def gather_kv(
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    entries: torch.Tensor,
    num_entries: int,
    *,
    native_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one sequence, float32; see :func:`kernels.ops.gather_kv`. Waits for the device."""
    dtype = native_dtype_of(shape, native_dtype)
    entries = entries[:num_entries].contiguous()
    valid = entries[:, ENTRY_VALID].to(torch.int64)
    ends = valid.cumsum(0)
    tokens = int(ends[-1]) if num_entries else 0
    key = torch.empty((tokens, shape.num_kv_heads, shape.head_dim), dtype=torch.float32, device=arena.device)
    value = torch.empty_like(key)
    if tokens:
        gather_kv_launcher(arena, shape, layer, entries, ends - valid, key, value, dtype)
    return key, value
