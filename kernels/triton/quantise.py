# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - device code: types are Triton's, given by the arguments
"""The keys or the values of one head, between storage and float32: dequantised from any tile, quantised into one.

The formula is that of `kernels.reference.quantise`, with the same operations in the same order: division is the IEEE
one (Triton's ``/`` is not), the multiply-add is fused, and all other products are by powers of two, so neither
compiler nor hardware can change a bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.tiles import WINDOW, constants_offset, dequantise, element_bytes, load_codes_v, native_rows


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
def _load_codes(
    base, BITS: tl.constexpr, KEY: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NATIVE_DTYPE: tl.constexpr
):
    """Keys or values of a quantised tile whose codes begin at `base`, float32: two of [32, HALF]."""
    element: tl.constexpr = element_bytes(NATIVE_DTYPE)
    channel = tl.arange(0, HALF)
    token = tl.arange(0, WINDOW)
    inside = channel < DIM // 2
    code_low, code_high = load_codes_v(base, BITS, DIM, HALF)
    scale = (base + constants_offset("scale", KEY, BITS, DIM, element)).to(tl.pointer_type(NATIVE_DTYPE))
    zero = (base + constants_offset("zero", KEY, BITS, DIM, element)).to(tl.pointer_type(NATIVE_DTYPE))
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
def load_values(
    arena, source_bits, source, source_2, KEY: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    NATIVE_DTYPE: tl.constexpr,
):  # fmt: skip
    """The keys or values of two native tiles, or of a quantised one, as float32: two of [32, HALF].

    Channels below, and from, dim / 2. `source`, `source_2`: where they begin.
    """
    channel = tl.arange(0, HALF)
    inside = channel < DIM // 2
    if source_bits == 0:
        rows = native_rows(arena, source, source_2, 0, NATIVE_DTYPE, DIM)[:, None] + channel[None, :]
        low = tl.load(rows, mask=inside[None, :], other=0.0).to(tl.float32)
        high = tl.load(rows + DIM // 2, mask=inside[None, :], other=0.0).to(tl.float32)
    elif source_bits == 8:
        low, high = _load_codes(arena + source, 8, KEY, DIM, HALF, NATIVE_DTYPE)
    else:
        # A lossier format may have more bits for the one and fewer for the other.
        low, high = _load_codes(arena + source, 4, KEY, DIM, HALF, NATIVE_DTYPE)
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
def store_quantised(
    arena, target, low, high, KEY: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    NATIVE_DTYPE: tl.constexpr,
):  # fmt: skip
    """Quantise float32 values (two of [32, HALF]) into codes that begin at `target`, and their constants."""
    element: tl.constexpr = element_bytes(NATIVE_DTYPE)
    levels: tl.constexpr = (1 << BITS) - 1
    part_scale: tl.constexpr = constants_offset("scale", KEY, BITS, DIM, element)
    part_zero: tl.constexpr = constants_offset("zero", KEY, BITS, DIM, element)
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
    _store_codes(arena + target, code_low, code_high, BITS, DIM, HALF)
