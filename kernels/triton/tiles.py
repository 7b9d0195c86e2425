# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - device code: types are Triton's, given by the arguments
"""Device helpers that the kernels share: addresses of tiles, block-table cursor, nibbles.

The only knowledge of the layout is `kernels.layout`, asked at compile time through constexpr functions, so kernels
cannot drift from the bookkeeping. All addresses are bytes from the arena's start, int64.

Attention walks a sequence in *windows* of 32 absolute positions (a quantised tile, or two native ones). Which blocks
hold a window's tokens decides addresses only, never the order of a reduction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.layout import (
    ENTRY_FIRST,
    ENTRY_FORMAT,
    ENTRY_OFFSET,
    ENTRY_VALID,
    ENTRY_WIDTH,
    FORMATS,
    NATIVE_TILE_TOKENS,
    OFFSET_UNIT,
    QUANT_TILE_TOKENS,
    KVFormat,
    KVShape,
)

NATIVE = tl.constexpr(0)  # always the first format
# All formats as text: kernels mention it, so that one compiled for other formats is not taken from the cache on disk.
FORMATS_STAMP = tl.constexpr(repr(FORMATS))
HALF_WINDOW = tl.constexpr(NATIVE_TILE_TOKENS)
WINDOW = tl.constexpr(QUANT_TILE_TOKENS)
UNIT = tl.constexpr(OFFSET_UNIT)
WIDTH = tl.constexpr(ENTRY_WIDTH)
OFFSET_COLUMN = tl.constexpr(ENTRY_OFFSET)
FORMAT_COLUMN = tl.constexpr(ENTRY_FORMAT)
FIRST_COLUMN = tl.constexpr(ENTRY_FIRST)
VALID_COLUMN = tl.constexpr(ENTRY_VALID)
# A position past every sequence; what an entry behind the last one reports as its first position.
FAR = tl.constexpr(1 << 30)
LOG2_E = tl.constexpr(1.4426950408889634)
# Triton's interpreter keeps bf16 as 16-bit integers and multiplies those; there, products are taken in float32.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.constexpr_function
def head_part(code, part, dim, element):
    """Byte offset of a part inside one head's share of a tile (`HeadLayout`), compile time."""
    return getattr(KVShape(1, 1, dim, element).head_layout(FORMATS[code]), part)


@triton.constexpr_function
def tile_bytes(code, kv_heads, dim, element):
    return KVShape(1, kv_heads, dim, element).tile_bytes(FORMATS[code])


@triton.constexpr_function
def format_count(stamp):
    """How many formats there are; takes the stamp, so that kernels depend on it."""
    return len(FORMATS) if stamp else 0


@triton.constexpr_function
def code_bits(code, key):
    """Bits of a key code, or of a value code; 0: native."""
    return FORMATS[code].bits_k if key else FORMATS[code].bits_v


@triton.constexpr_function
def constants_offset(part, key, bits, dim, element):
    """Bytes from where codes of so many bits begin to their "scale" or "zero": the same in every format."""
    layout = KVShape(1, 1, dim, element).head_layout(KVFormat("any", 1, bits, bits, lossiness=1, expected_loss=0.0))
    return getattr(layout, ("k_" if key else "v_") + part) - (layout.k if key else layout.v)


@triton.constexpr_function
def element_bytes(dtype):
    return dtype.primitive_bitwidth // 8


@triton.jit
def head_address(
    offset, tile, layer, kv_head, CODE: tl.constexpr, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Where one head's part of one layer's share of a tile begins."""
    share: tl.constexpr = tile_bytes(CODE, KV_HEADS, DIM, ELEMENT)
    size: tl.constexpr = head_part(CODE, "size", DIM, ELEMENT)
    return offset.to(tl.int64) * UNIT + tile.to(tl.int64) * (LAYERS * share) + layer * share + kv_head * size


@triton.jit
def part_of(code, PART: tl.constexpr, DIM: tl.constexpr, ELEMENT: tl.constexpr):
    """`head_part` of a format known at run time only."""
    value = head_part(NATIVE, PART, DIM, ELEMENT)
    for other in tl.static_range(1, format_count(FORMATS_STAMP)):
        value = tl.where(code == other, head_part(other, PART, DIM, ELEMENT), value)
    return value


@triton.jit
def bits_of(code, KEY: tl.constexpr):
    """`code_bits` of a format known at run time only."""
    bits = code_bits(NATIVE, KEY)
    for other in tl.static_range(1, format_count(FORMATS_STAMP)):
        bits = tl.where(code == other, code_bits(other, KEY), bits)
    return bits


@triton.jit
def address_of(
    code, offset, tile, layer, kv_head, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    ELEMENT: tl.constexpr,
):  # fmt: skip
    """`head_address` of a format known at run time only."""
    size = part_of(code, "size", DIM, ELEMENT).to(tl.int64)
    return offset.to(tl.int64) * UNIT + ((tile.to(tl.int64) * LAYERS + layer) * KV_HEADS + kv_head) * size


@triton.jit
def load_entry(row, index, count):
    """Offset, format, first and end position of an entry; one at FAR behind the last."""
    at = row + index * WIDTH
    present = index < count
    offset = tl.load(at + OFFSET_COLUMN, mask=present, other=0)
    code = tl.load(at + FORMAT_COLUMN, mask=present, other=0)
    first = tl.load(at + FIRST_COLUMN, mask=present, other=FAR)
    valid = tl.load(at + VALID_COLUMN, mask=present, other=0)
    return offset, code, first, first + valid


@triton.jit
def seek_entry(row, count, position):
    """Index of the first entry that ends after ``position`` (entries are in position order), or ``count``."""
    low = count * 0
    high = count
    while low < high:
        middle = (low + high) // 2
        at = row + middle * WIDTH
        after = tl.load(at + FIRST_COLUMN) + tl.load(at + VALID_COLUMN) > position
        high = tl.where(after, middle, high)
        low = tl.where(after, low, middle + 1)
    return low


@triton.jit
def next_window(row, count, position, index, offset, code, first, end):
    """The window after the one at ``position``, whose later half lies in the given entry: position, and its entry.

    An evicted range is skipped at once; behind the last entry the position is at least FAR.
    """
    position += WINDOW
    while end <= position:
        index += 1
        offset, code, first, end = load_entry(row, index, count)
    return tl.maximum(position, first // WINDOW * WINDOW), index, offset, code, first, end


@triton.jit
def native_rows(arena, address_0, address_1, part: tl.constexpr, NATIVE_DTYPE: tl.constexpr, DIM: tl.constexpr):
    """Pointers to the 32 token rows of K or V over two native tiles of 16: [32]."""
    token = tl.arange(0, WINDOW)
    base_0 = (arena + address_0 + part).to(tl.pointer_type(NATIVE_DTYPE))
    base_1 = (arena + address_1 + part).to(tl.pointer_type(NATIVE_DTYPE))
    return tl.where(token < HALF_WINDOW, base_0, base_1) + (token % HALF_WINDOW) * DIM


@triton.jit
def load_codes_k(base, BITS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr):
    """Key codes of a quantised tile, channel-major, as uint8: channels [0, dim/2) and [dim/2, dim), each [HALF, 32].

    ``HALF`` is dim/2 rounded up to a power of two; the surplus lanes are 0.
    """
    channel = tl.arange(0, HALF)
    token = tl.arange(0, WINDOW)
    inside = channel[:, None] < DIM // 2
    if BITS == 4:
        packed = tl.load(base + token[None, :] * (DIM // 2) + channel[:, None], mask=inside, other=0)
        low = packed & 15
        high = packed >> 4
    else:
        at = base + token[None, :] * DIM + channel[:, None]
        low = tl.load(at, mask=inside, other=0)
        high = tl.load(at + DIM // 2, mask=inside, other=0)
    return low, high


@triton.jit
def load_codes_v(base, BITS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr):
    """Codes of a quantised tile, token-major: two of [32, HALF], as `load_codes_k`."""
    channel = tl.arange(0, HALF)
    token = tl.arange(0, WINDOW)
    inside = channel[None, :] < DIM // 2
    if BITS == 4:
        packed = tl.load(base + token[:, None] * (DIM // 2) + channel[None, :], mask=inside, other=0)
        low = packed & 15
        high = packed >> 4
    else:
        at = base + token[:, None] * DIM + channel[None, :]
        low = tl.load(at, mask=inside, other=0)
        high = tl.load(at + DIM // 2, mask=inside, other=0)
    return low, high


@triton.jit
def dequantise(codes, scale, zero):
    """Zero + scale * code in float32 with one rounding; native constants broadcast against the codes' 2-D shape."""
    codes = codes.to(tl.float32)
    scale = tl.broadcast_to(scale.to(tl.float32), codes.shape)
    zero = tl.broadcast_to(zero.to(tl.float32), codes.shape)
    if INTERPRETED:
        # The interpreter's fma rounds twice. In float64 the product is exact.
        value = (scale.to(tl.float64) * codes.to(tl.float64) + zero.to(tl.float64)).to(tl.float32)
    else:
        value = tl.fma(scale, codes, zero)
    return value


@triton.jit
def dot(left, right, accumulator):
    """Matrix product of [M, K] and [K, N], added to a float32 accumulator [M, N].

    float32 operands go through the tensor cores as three tf32 products, about as exact as float32.
    """
    if INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, accumulator, input_precision="tf32x3")
