"""What a decoder does to each token's row apart from attention: norms, projections, rotation, the feed-forward network.

Rounding to the native dtype happens where the torch decoder (:mod:`engine.models.decoder`) rounds, so that both agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from kernels.cpu.compile import fast, lowlevel
from kernels.cpu.lowlevel import exp_nonpositive, load, native_nearest, store
from kernels.cpu.operands import as_operands, operands_like
from kernels.cpu.products import PANEL, multiply

# Columns of the places of a layer's weights in the flat array; -1: absent.
INPUT_NORM, QKV, QKV_BIAS, QK_NORM, OUTPUT, OUTPUT_BIAS, POST_NORM = range(7)
GATE, UP, GATE_UP_BIAS, DOWN, DOWN_BIAS, PLACES = range(7, 13)
# Of the model's sizes.
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = range(5)
ROWS_AT_ONCE = 48  # so that a panel is used often, and what lies between two products stays in the cache


@lowlevel
def rounded(typing_context: Any, array: Any, value: Any) -> Any:  # noqa: ARG001
    """A float32 rounded to ``array``'s native dtype (float32 or bfloat16), as float32; ties to even."""
    if array.dtype not in (types.float32, types.uint16):
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        value = arguments[1]
        if array.dtype == types.float32:
            return value
        word = ir.IntType(32)
        bits = builder.bitcast(value, word)
        odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
        near = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", value, value)
        kept = builder.select(is_nan, ir.Constant(word, 0x7FC00000), near)
        return builder.bitcast(builder.and_(kept, ir.Constant(word, -65536)), ir.FloatType())

    return types.float32(array, types.float32), codegen


@fast
def normalise(x: Any, at: Any, size: Any, weights: Any, place: Any, epsilon: Any, out: Any, to: Any) -> None:
    """RMSNorm of ``size`` elements from ``x[at]``, rounded to native, into ``out[to]`` on (native or float32)."""
    total = np.float32(0)
    for i in range(size):
        value = load(x, at + i)
        total += value * value
    factor = np.float32(1) / np.sqrt(total / np.float32(size) + epsilon)
    for i in range(size):
        value = rounded(weights, load(x, at + i) * factor * load(weights, place + i))
        store(out, to + i, native_nearest(out, value))


@fast
def _finish_head(sums: Any, at: Any, dim: Any, weights: Any, bias: Any, norm: Any, epsilon: Any, row: Any) -> None:
    """One head's products with bias, rounded, and normed if the model does that, into ``row`` (native)."""
    for d in range(dim):
        value = load(sums, at + d)
        if bias >= 0:
            value += load(weights, bias + d)
        store(row, d, native_nearest(row, value))
    if norm < 0:
        return
    total = np.float32(0)
    for d in range(dim):
        value = load(row, d)
        total += value * value
    factor = np.float32(1) / np.sqrt(total / np.float32(dim) + epsilon)
    for d in range(dim):
        value = rounded(row, load(row, d) * factor) * load(weights, norm + d)
        store(row, d, native_nearest(row, value))


@fast
def _rotate(row: Any, dim: Any, cos: Any, cos_at: Any, sin: Any, sin_at: Any, out: Any, to: Any) -> None:
    """Rotary embedding of one head; the table has cosines for all of it (halves repeated), sines for one half."""
    half = dim // 2
    for d in range(half):
        low, high = load(row, d), load(row, half + d)
        c, s = load(cos, cos_at + d), load(sin, sin_at + d)
        store(out, to + d, native_nearest(out, rounded(out, low * c) - high * s))
        store(out, to + half + d, native_nearest(out, rounded(out, high * c) + low * s))


@fast
def before_attention(
    x: Any,
    first: Any,
    rows: Any,
    weights: Any,
    places: Any,
    sizes: Any,
    epsilon: Any,
    positions: Any,
    cos: Any,
    sin: Any,
    query: Any,
    key_value: Any,
    work: Any,
) -> None:
    """Norm, projections and rotation of rows ``first .. first + rows`` (at most ROWS_AT_ONCE).

    Flat native arrays: x [tokens, hidden], query [tokens, heads, head_dim], key_value [tokens, 2 * kv_heads, head_dim]
    (keys first). work: see :func:`workspace`.
    """
    normed, sums, _, row = work
    hidden, heads, kv_heads, dim = sizes[HIDDEN], sizes[HEADS], sizes[KV_HEADS], sizes[HEAD_DIM]
    for r in range(rows):
        normalise(x, (first + r) * hidden, hidden, weights, places[INPUT_NORM], epsilon, normed, r * hidden)
    width = (heads + 2 * kv_heads) * dim
    panels = (width + PANEL - 1) // PANEL
    multiply(normed, 0, hidden, rows, weights, places[QKV], hidden, panels, sums, panels * PANEL)
    for r in range(rows):
        token = np.int64(first + r)
        cos_at, sin_at = np.int64(positions[token]) * dim, np.int64(positions[token]) * (dim // 2)
        for head in range(heads + 2 * kv_heads):
            at = r * panels * PANEL + head * dim
            bias = places[QKV_BIAS] + head * dim if places[QKV_BIAS] >= 0 else np.int64(-1)
            is_rotated = head < heads + kv_heads
            norm = places[QK_NORM] + head * dim if places[QK_NORM] >= 0 and is_rotated else np.int64(-1)
            _finish_head(sums, at, dim, weights, bias, norm, epsilon, row)
            if head < heads:
                _rotate(row, dim, cos, cos_at, sin, sin_at, query, (token * heads + head) * dim)
            else:
                to = (token * 2 * kv_heads + head - heads) * dim
                if is_rotated:
                    _rotate(row, dim, cos, cos_at, sin, sin_at, key_value, to)
                else:
                    for d in range(dim):
                        store(key_value, to + d, row[d])


@fast
def _add_product(
    rows: Any, inputs: Any, given: Any, at: Any, stride: Any, weights: Any, place: Any, bias: Any, x: Any, first: Any,
    hidden: Any, sums: Any,
) -> None:  # fmt: skip
    """Adds given @ weight + bias to rows ``first ..`` of x."""
    panels = (hidden + PANEL - 1) // PANEL
    multiply(given, at, stride, rows, weights, place, inputs, panels, sums, panels * PANEL)
    for r in range(rows):
        to, source = (first + r) * hidden, r * panels * PANEL
        for i in range(hidden):
            value = load(sums, source + i)
            if bias >= 0:
                value += load(weights, bias + i)
            store(x, to + i, native_nearest(x, load(x, to + i) + rounded(x, value)))


@fast
def _activate(gate: Any, up: Any, like: Any) -> Any:
    """silu(gate) * up, both rounded before and between."""
    gate = rounded(like, gate)
    e = exp_nonpositive(-abs(gate))
    top = np.float32(1) if gate >= 0 else e
    return rounded(like, gate * top / (np.float32(1) + e)) * rounded(like, up)


@fast
def after_attention(
    x: Any, first: Any, rows: Any, weights: Any, places: Any, sizes: Any, epsilon: Any, attended: Any, work: Any
) -> None:
    """Output projection and feed-forward network of rows ``first .. first + rows``, added to ``x``.

    ``attended``: flat native [tokens, heads, head_dim]; the rest: see :func:`before_attention`.
    """
    normed, sums, active, _ = work
    hidden, middle = sizes[HIDDEN], sizes[INTERMEDIATE]
    query = sizes[HEADS] * sizes[HEAD_DIM]
    given, at = as_operands(attended, first * query, rows * query, active)
    _add_product(
        rows,
        query,
        given,
        at,
        query,
        weights,
        places[OUTPUT],
        places[OUTPUT_BIAS],
        x,
        first,
        hidden,
        sums,
    )
    for r in range(rows):
        normalise(x, (first + r) * hidden, hidden, weights, places[POST_NORM], epsilon, normed, r * hidden)
    bias = places[GATE_UP_BIAS]
    panels = (middle + PANEL - 1) // PANEL
    for panel in range(panels):
        skip = panel * hidden * PANEL
        multiply(normed, 0, hidden, rows, weights, places[GATE] + skip, hidden, 1, sums, 2 * PANEL)
        multiply(normed, 0, hidden, rows, weights, places[UP] + skip, hidden, 1, sums[PANEL:], 2 * PANEL)
        columns = min(PANEL, middle - panel * PANEL)
        for r in range(rows):
            to, at = r * middle + panel * PANEL, r * 2 * PANEL
            if bias >= 0:
                for i in range(columns):
                    sums[at + i] += load(weights, bias + panel * PANEL + i)
                    sums[at + PANEL + i] += load(weights, bias + middle + panel * PANEL + i)
            for i in range(columns):
                value = rounded(weights, _activate(load(sums, at + i), load(sums, at + PANEL + i), weights))
                store(active, to + i, native_nearest(active, value))
    _add_product(rows, middle, active, 0, middle, weights, places[DOWN], places[DOWN_BIAS], x, first, hidden, sums)


@fast
def workspace(like: Any, sizes: Any) -> Any:
    """Scratch of one thread: normed rows, sums, activations, one head. ``like``: the flat native weights."""
    rows, hidden, middle = ROWS_AT_ONCE, sizes[HIDDEN], sizes[INTERMEDIATE]
    width = (sizes[HEADS] + 2 * sizes[KV_HEADS]) * sizes[HEAD_DIM]
    widest = max(width, hidden, 2 * PANEL) + PANEL
    return (
        operands_like(like, rows * hidden),
        np.empty(rows * widest, np.float32),
        operands_like(like, rows * max(middle, sizes[HEADS] * sizes[HEAD_DIM])),
        np.empty(sizes[HEAD_DIM], like.dtype),
    )
