# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - device code: types are Triton's, given by the arguments
"""The step that the attention kernels share: attend to one window of 32 positions, in whatever formats it is stored.

A window is a quantised tile (perhaps only its first half, followed by a native tile), or up to two native tiles. Keys
and values come out of `_load` in the native dtype, split into channels below and from head_dim / 2 (so nibbles need no
shuffle). The format, that is how many bits its codes have, is a run-time branch around loads alone; scores, softmax and
sums are one code path, the same for every class. Values are loaded after the scores: at no time are both in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.tiles import (
    HALF_WINDOW,
    NATIVE,
    WINDOW,
    address_of,
    bits_of,
    constants_offset,
    dot,
    element_bytes,
    head_address,
    head_part,
    load_codes_k,
    load_codes_v,
    native_rows,
    part_of,
)


@triton.jit
def _expand_keys(at, stored, BITS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NATIVE_DTYPE: tl.constexpr):
    """Keys whose codes begin at `at`, two of [HALF, 32]; 0 where not `stored` [32]."""
    element: tl.constexpr = element_bytes(NATIVE_DTYPE)
    channel = tl.arange(0, HALF)
    inside = channel < DIM // 2
    scale = (at + constants_offset("scale", True, BITS, DIM, element)).to(tl.pointer_type(NATIVE_DTYPE)) + channel
    zero = (at + constants_offset("zero", True, BITS, DIM, element)).to(tl.pointer_type(NATIVE_DTYPE)) + channel
    scale_low = tl.load(scale, mask=inside, other=0.0).to(tl.float32)[:, None]
    scale_high = tl.load(scale + DIM // 2, mask=inside, other=0.0).to(tl.float32)[:, None]
    zero_low = tl.load(zero, mask=inside, other=0.0).to(tl.float32)[:, None]
    zero_high = tl.load(zero + DIM // 2, mask=inside, other=0.0).to(tl.float32)[:, None]
    code_low, code_high = load_codes_k(at, BITS, DIM, HALF)
    key_low = tl.where(stored[None, :], zero_low + scale_low * code_low.to(tl.float32), 0.0)
    key_high = tl.where(stored[None, :], zero_high + scale_high * code_high.to(tl.float32), 0.0)
    return key_low.to(NATIVE_DTYPE), key_high.to(NATIVE_DTYPE)


@triton.jit
def _expand_values(at, stored, BITS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NATIVE_DTYPE: tl.constexpr):
    """Values whose codes begin at `at`, two of [32, HALF]; 0 where not `stored` [32]."""
    element: tl.constexpr = element_bytes(NATIVE_DTYPE)
    token = tl.arange(0, WINDOW)
    scale = (at + constants_offset("scale", False, BITS, DIM, element)).to(tl.pointer_type(NATIVE_DTYPE)) + token
    zero = (at + constants_offset("zero", False, BITS, DIM, element)).to(tl.pointer_type(NATIVE_DTYPE)) + token
    # Constants of tokens that are not stored may hold anything; read as 0 they make the token's value 0.
    scale_row = tl.load(scale, mask=stored, other=0.0).to(tl.float32)[:, None]
    zero_row = tl.load(zero, mask=stored, other=0.0).to(tl.float32)[:, None]
    code_low, code_high = load_codes_v(at, BITS, DIM, HALF)
    value_low = zero_row + scale_row * code_low.to(tl.float32)
    value_high = zero_row + scale_row * code_high.to(tl.float32)
    return value_low.to(NATIVE_DTYPE), value_high.to(NATIVE_DTYPE)


@triton.jit
def _expand(
    at, stored, KEYS: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    NATIVE_DTYPE: tl.constexpr,
):  # fmt: skip
    if KEYS:
        low, high = _expand_keys(at, stored, BITS, DIM, HALF, NATIVE_DTYPE)
    else:
        low, high = _expand_values(at, stored, BITS, DIM, HALF, NATIVE_DTYPE)
    return low, high


@triton.jit
def _load(
    arena, quantised_at, native_at_0, native_at_1, code, stored_quantised, stored_native, any_quantised, any_native,
    KEYS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NATIVE_DTYPE: tl.constexpr,
):  # fmt: skip
    """Keys (two of [HALF, 32]) or values (two of [32, HALF]) of a window; what is not stored is 0."""
    element: tl.constexpr = element_bytes(NATIVE_DTYPE)
    part: tl.constexpr = 0 if KEYS else head_part(NATIVE, "v", DIM, element)
    if any_quantised:
        # Keys begin where the head's part of the tile does.
        at = arena + quantised_at + (0 if KEYS else part_of(code, "v", DIM, element))
        if bits_of(code, KEYS) == 8:
            low, high = _expand(at, stored_quantised, KEYS, 8, DIM, HALF, NATIVE_DTYPE)
        else:
            low, high = _expand(at, stored_quantised, KEYS, 4, DIM, HALF, NATIVE_DTYPE)
    elif KEYS:
        low = tl.zeros([HALF, WINDOW], NATIVE_DTYPE)
        high = tl.zeros([HALF, WINDOW], NATIVE_DTYPE)
    else:
        low = tl.zeros([WINDOW, HALF], NATIVE_DTYPE)
        high = tl.zeros([WINDOW, HALF], NATIVE_DTYPE)
    if any_native:
        channel = tl.arange(0, HALF)
        inside = channel < DIM // 2
        rows = native_rows(arena, native_at_0, native_at_1, part, NATIVE_DTYPE, DIM)
        if KEYS:
            take = stored_native[None, :]
            mask = take & inside[:, None]
            at = rows[None, :] + channel[:, None]
        else:
            take = stored_native[:, None]
            mask = take & inside[None, :]
            at = rows[:, None] + channel[None, :]
        low = tl.where(take, tl.load(at, mask=mask, other=0.0), low)
        high = tl.where(take, tl.load(at + DIM // 2, mask=mask, other=0.0), high)
    return low, high


@triton.jit
def _places(
    position, layer, kv_head, offset, code, first, end, offset_1, code_1, first_1, end_1,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, NATIVE_DTYPE: tl.constexpr,
):  # fmt: skip
    """Where a window's tokens lie, and which of them are stored.

    Entry (offset, code, first, end) covers, or begins after, `position`; entry `_1` holds the window's later half, and
    is the same one where that reaches so far. Returns byte addresses of the quantised tile and of both native ones,
    masks [32] of the tokens stored quantised and native, and whether there are any of either.
    """
    element: tl.constexpr = element_bytes(NATIVE_DTYPE)
    here = position + tl.arange(0, WINDOW)
    covered = first <= position
    quantised = covered & (code != NATIVE)
    native_0 = covered & (code == NATIVE)
    native_1 = (first_1 <= position + HALF_WINDOW) & (code_1 == NATIVE)
    stored_quantised = quantised & (here < end)
    stored_native = tl.where(here < position + HALF_WINDOW, native_0 & (here < end), native_1 & (here < end_1))
    tile = (position - first) // WINDOW
    quantised_at = address_of(code, offset, tile, layer, kv_head, LAYERS, KV_HEADS, DIM, element)
    tile_0 = (position - first) // HALF_WINDOW
    tile_1 = (position + HALF_WINDOW - first_1) // HALF_WINDOW
    native_at_0 = head_address(offset, tile_0, layer, kv_head, NATIVE, LAYERS, KV_HEADS, DIM, element)
    native_at_1 = head_address(offset_1, tile_1, layer, kv_head, NATIVE, LAYERS, KV_HEADS, DIM, element)
    return quantised_at, native_at_0, native_at_1, stored_quantised, stored_native, quantised, native_0 | native_1


@triton.jit
def window_scores(query_low, query_high, query_position, lowest, key_low, key_high, stored, position, scale_log2):
    """Scores [rows, 32] in base 2; -inf where row r does not attend: outside `lowest[r]` .. `query_position[r]`."""
    here = position + tl.arange(0, WINDOW)
    scores = dot(query_low, key_low, tl.zeros([query_low.shape[0], WINDOW], tl.float32))
    scores = dot(query_high, key_high, scores)
    attended = stored[None, :] & (here[None, :] <= query_position[:, None]) & (here[None, :] >= lowest[:, None])
    return tl.where(attended, scores * scale_log2, float("-inf"))


@triton.jit
def half_sums(weights):
    """Sums of weights [rows, 32] over each chunk of 16 positions: two of [rows]."""
    early = tl.arange(0, WINDOW)[None, :] < HALF_WINDOW
    return tl.sum(tl.where(early, weights, 0.0), axis=1), tl.sum(tl.where(early, 0.0, weights), axis=1)


@triton.jit
def load_window_keys(
    arena, position, layer, kv_head, offset, code, first, end, offset_1, code_1, first_1, end_1,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NATIVE_DTYPE: tl.constexpr,
):  # fmt: skip
    """Keys of the window from `position` on, two of [HALF, 32], and which of its tokens are stored; see `_places`."""
    quantised_at, native_at_0, native_at_1, stored_quantised, stored_native, any_quantised, any_native = _places(
        position, layer, kv_head, offset, code, first, end, offset_1, code_1, first_1, end_1,
        LAYERS, KV_HEADS, DIM, NATIVE_DTYPE,
    )  # fmt: skip
    key_low, key_high = _load(
        arena, quantised_at, native_at_0, native_at_1, code, stored_quantised, stored_native,
        any_quantised, any_native, True, DIM, HALF, NATIVE_DTYPE,
    )  # fmt: skip
    return key_low, key_high, stored_quantised | stored_native


@triton.jit
def attend_window(
    query_low, query_high, query_position, lowest, peak, total, sum_low, sum_high, scale_log2,
    arena, position, layer, kv_head, offset, code, first, end, offset_1, code_1, first_1, end_1,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NATIVE_DTYPE: tl.constexpr,
):  # fmt: skip
    """One step of the running softmax (base 2) over the window from `position` on.

    Row r attends to positions `lowest[r]` .. `query_position[r]`; for the entries see `_places`. Returns the new
    running values, and what the window adds to the total per chunk of 16 positions under the new peak.
    """
    quantised_at, native_at_0, native_at_1, stored_quantised, stored_native, any_quantised, any_native = _places(
        position, layer, kv_head, offset, code, first, end, offset_1, code_1, first_1, end_1,
        LAYERS, KV_HEADS, DIM, NATIVE_DTYPE,
    )  # fmt: skip
    key_low, key_high = _load(
        arena, quantised_at, native_at_0, native_at_1, code, stored_quantised, stored_native,
        any_quantised, any_native, True, DIM, HALF, NATIVE_DTYPE,
    )  # fmt: skip
    stored = stored_quantised | stored_native
    scores = window_scores(
        query_low, query_high, query_position, lowest, key_low, key_high, stored, position, scale_log2
    )
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    # A row that has attended to nothing yet keeps peak -inf; subtracting 0 keeps its probabilities 0, not NaN.
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    probabilities = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(probabilities, axis=1)
    value_low, value_high = _load(
        arena, quantised_at, native_at_0, native_at_1, code, stored_quantised, stored_native,
        any_quantised, any_native, False, DIM, HALF, NATIVE_DTYPE,
    )  # fmt: skip
    # Where nobody takes them, the compiler drops them.
    early, late = half_sums(probabilities)
    probabilities = probabilities.to(NATIVE_DTYPE)
    sum_low = dot(probabilities, value_low, sum_low * decay[:, None])
    sum_high = dot(probabilities, value_high, sum_high * decay[:, None])
    return new_peak, total, sum_low, sum_high, early, late
