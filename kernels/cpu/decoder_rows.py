"""A decoder on the CPU without a call per operation: a layer's two halves around attention, logits, and a whole step.

Every token's row is computed by itself, so that rows can be shared out among threads which need not wait for each
other. In a step that only decodes this holds for attention too, and all layers are one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.attend_rows import attend_share
from kernels.cpu.compile import entry, fast, source_stamp
from kernels.cpu.dense import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    ROWS_AT_ONCE,
    after_attention,
    before_attention,
    normalise,
    rounded,
    workspace,
)
from kernels.cpu.lowlevel import store
from kernels.cpu.operands import operands_like
from kernels.cpu.products import PANEL, multiply
from kernels.cpu.tiles import HEAD_BYTES, K_CODES, TILE_BYTES, TILE_STRIDE, V_CODES
from kernels.layout import NATIVE, NATIVE_TILE_TOKENS, OFFSET_UNIT

_NATIVE_CODE = NATIVE.code


@fast
def _before_share(
    worker: Any, workers: Any, x: Any, weights: Any, places: Any, model: Any, positions: Any, rotary: Any, query: Any,
    key_value: Any,
) -> None:  # fmt: skip
    sizes, epsilon = model
    cos, sin = rotary
    work = workspace(weights, sizes)
    tokens = positions.shape[0]
    last = tokens * (worker + 1) // workers
    for first in range(tokens * worker // workers, last, ROWS_AT_ONCE):
        rows = min(ROWS_AT_ONCE, last - first)
        before_attention(x, first, rows, weights, places, sizes, epsilon, positions, cos, sin, query, key_value, work)


@fast
def _after_share(
    worker: Any, workers: Any, x: Any, weights: Any, places: Any, model: Any, tokens: Any, attended: Any
) -> None:
    sizes, epsilon = model
    work = workspace(weights, sizes)
    last = tokens * (worker + 1) // workers
    for first in range(tokens * worker // workers, last, ROWS_AT_ONCE):
        rows = min(ROWS_AT_ONCE, last - first)
        after_attention(x, first, rows, weights, places, sizes, epsilon, attended, work)


@fast
def _logits_share(
    worker: Any, workers: Any, x: Any, chosen: Any, weights: Any, places: Any, model: Any, logits: Any
) -> None:
    """Logits of the ``chosen`` rows of x; rounded to the native dtype, as a linear layer in that dtype gives them."""
    sizes, epsilon = model
    hidden, vocab = sizes[HIDDEN], logits.shape[1]
    normed = operands_like(weights, ROWS_AT_ONCE * hidden)
    sums = np.empty(ROWS_AT_ONCE * PANEL, np.float32)
    last = chosen.shape[0] * (worker + 1) // workers
    for first in range(chosen.shape[0] * worker // workers, last, ROWS_AT_ONCE):
        rows = min(ROWS_AT_ONCE, last - first)
        for r in range(rows):
            normalise(x, chosen[first + r] * hidden, hidden, weights, places[0], epsilon, normed, r * hidden)
        for panel in range((vocab + PANEL - 1) // PANEL):
            multiply(normed, 0, hidden, rows, weights, places[1] + panel * hidden * PANEL, hidden, 1, sums, PANEL)
            start = panel * PANEL
            for r in range(rows):
                for i in range(min(PANEL, vocab - start)):
                    logits[first + r, start + i] = rounded(weights, sums[r * PANEL + i])


@fast
def _store_rows(elements: Any, form: Any, layer: Any, key_value: Any, kv_heads: Any, dim: Any, slots: Any) -> None:
    """Keys and values of the rows, flat native [rows, 2 * kv_heads, head_dim], to their slots."""
    size = elements.itemsize
    for r in range(slots.shape[0]):
        index = np.int64(slots[r, 1])
        tile = np.int64(slots[r, 0]) * OFFSET_UNIT + index // NATIVE_TILE_TOKENS * form[TILE_STRIDE]
        for head in range(kv_heads):
            start = (tile + layer * form[TILE_BYTES] + head * form[HEAD_BYTES]) // size
            place = index % NATIVE_TILE_TOKENS * dim
            k, v = start + form[K_CODES] // size + place, start + form[V_CODES] // size + place
            key, value = (r * 2 * kv_heads + head) * dim, (r * 2 * kv_heads + kv_heads + head) * dim
            for d in range(dim):
                store(elements, k + d, key_value[key + d])
                store(elements, v + d, key_value[value + d])


@fast
def _step_share(
    worker: Any, workers: Any, ids: Any, positions: Any, x: Any, weights: Any, places: Any, model: Any, rotary: Any,
    arena: Any, layout: Any, table: Any, slots: Any, scale: Any, window: Any,
) -> None:  # fmt: skip
    flat, embedding = weights
    sizes, epsilon = model
    cos, sin = rotary
    _, elements = arena
    hidden, heads, kv_heads, dim = sizes[HIDDEN], sizes[HEADS], sizes[KV_HEADS], sizes[HEAD_DIM]
    first, last = ids.shape[0] * worker // workers, ids.shape[0] * (worker + 1) // workers
    rows = last - first
    if rows <= 0:
        return
    own, own_positions, own_slots = x[first * hidden : last * hidden], positions[first:last], slots[first:last]
    for r in range(rows):
        source = np.int64(ids[first + r]) * hidden
        for i in range(hidden):
            store(own, r * hidden + i, embedding[source + i])
    sequences = np.empty(rows, np.int32)
    for r in range(rows):
        sequences[r] = first + r
    work = workspace(flat, sizes)
    query = np.empty((rows, heads, dim), flat.dtype)
    attended = np.empty((rows, heads, dim), flat.dtype)
    key_value = np.empty(rows * 2 * kv_heads * dim, flat.dtype)
    no_mass = np.empty((rows, kv_heads, 0), np.float32)
    flat_query, flat_attended = query.reshape(-1), attended.reshape(-1)
    for layer in range(places.shape[0]):
        for start in range(0, rows, ROWS_AT_ONCE):
            before_attention(
                own, start, min(ROWS_AT_ONCE, rows - start), flat, places[layer], sizes, epsilon, own_positions, cos,
                sin, flat_query, key_value, work,
            )  # fmt: skip
        _store_rows(elements, layout[_NATIVE_CODE], layer, key_value, kv_heads, dim, own_slots)
        attend_share(
            0, 1, query, scale, arena, (layout, layer, kv_heads), table, (sequences, own_positions), window, attended,
            no_mass,
        )  # fmt: skip
        for start in range(0, rows, ROWS_AT_ONCE):
            after_attention(
                own, start, min(ROWS_AT_ONCE, rows - start), flat, places[layer], sizes, epsilon, flat_attended, work
            )


def _build(stamp: int) -> tuple[Callable[..., None], ...]:
    @entry()
    def before_rows(
        x: Any, weights: Any, places: Any, model: Any, positions: Any, rotary: Any, query: Any, key_value: Any
    ) -> None:
        _ = stamp
        _before_share(0, 1, x, weights, places, model, positions, rotary, query, key_value)

    @entry(parallel=True)
    def before_rows_parallel(
        workers: Any, x: Any, weights: Any, places: Any, model: Any, positions: Any, rotary: Any, query: Any,
        key_value: Any,
    ) -> None:  # fmt: skip
        _ = stamp
        for worker in prange(workers):
            _before_share(worker, workers, x, weights, places, model, positions, rotary, query, key_value)

    @entry()
    def after_rows(x: Any, weights: Any, places: Any, model: Any, tokens: Any, attended: Any) -> None:
        _ = stamp
        _after_share(0, 1, x, weights, places, model, tokens, attended)

    @entry(parallel=True)
    def after_rows_parallel(
        workers: Any, x: Any, weights: Any, places: Any, model: Any, tokens: Any, attended: Any
    ) -> None:
        _ = stamp
        for worker in prange(workers):
            _after_share(worker, workers, x, weights, places, model, tokens, attended)

    @entry()
    def logits_rows(x: Any, chosen: Any, weights: Any, places: Any, model: Any, logits: Any) -> None:
        _ = stamp
        _logits_share(0, 1, x, chosen, weights, places, model, logits)

    @entry()
    def step_rows(
        ids: Any, positions: Any, x: Any, weights: Any, places: Any, model: Any, rotary: Any, arena: Any, layout: Any,
        table: Any, slots: Any, scale: Any, window: Any,
    ) -> None:  # fmt: skip
        _ = stamp
        _step_share(0, 1, ids, positions, x, weights, places, model, rotary, arena, layout, table, slots, scale, window)

    @entry(parallel=True)
    def step_rows_parallel(
        workers: Any, ids: Any, positions: Any, x: Any, weights: Any, places: Any, model: Any, rotary: Any, arena: Any,
        layout: Any, table: Any, slots: Any, scale: Any, window: Any,
    ) -> None:  # fmt: skip
        _ = stamp
        for worker in prange(workers):
            _step_share(
                worker, workers, ids, positions, x, weights, places, model, rotary, arena, layout, table, slots, scale,
                window,
            )  # fmt: skip

    return (
        before_rows, before_rows_parallel, after_rows, after_rows_parallel, logits_rows, step_rows, step_rows_parallel,
    )  # fmt: skip


# weights: flat native; for a step (flat, embedding) - places: one layer's, a step's int64 [layers, PLACES], for logits
# of the final norm and of the head - model (sizes int64 [5], epsilon float32) - rotary (cosines, sines), flat native
# arena (bytes, native elements) - table (entries int32 [sequences, n, 4], num_entries int32) - slots int32 [tokens, 2]
(
    before_rows, before_rows_parallel, after_rows, after_rows_parallel, logits_rows, step_rows, step_rows_parallel,
) = _build(source_stamp())  # fmt: skip
