"""Attention of many new tokens over a context, as products of panels: for processors with AVX2 or AVX-512.

Stored keys and values of a KV head become float32 panels of tokens; some queries at a time go over them with an
online softmax (Dao et al. 2022). Panels begin at fixed places of the context, so that results do not depend on how
tiles are grouped into blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.compile import entry, fast, source_stamp
from kernels.cpu.lowlevel import exp_nonpositive, load, native_nearest, store
from kernels.cpu.products import PANEL, multiply
from kernels.cpu.tiles import HEAD_BYTES, TILE_BYTES, TILE_STRIDE, TILE_TOKENS, read_keys, read_values
from kernels.cpu.vector_softmax import largest_score, weigh_scores
from kernels.layout import (
    ENTRY_FIRST,
    ENTRY_FORMAT,
    ENTRY_OFFSET,
    ENTRY_VALID,
    OFFSET_UNIT,
    QUANT_TILE_TOKENS,
)

_ROWS = 32  # query heads times tokens at a time


@fast
def _gather(arena: Any, where: Any, head: Any, entries: Any, low: Any, keys: Any, values: Any, dims: Any) -> None:
    """Tokens at positions >= low: keys [panel][head_dim][PANEL], values [panel][part of dims][PANEL][PANEL]."""
    layout, layer = where
    head_dim, padded = dims
    scratch = np.empty(QUANT_TILE_TOKENS * head_dim, np.float32)
    place = np.int64(0)
    for index in range(entries.shape[0]):
        form = layout[entries[index, ENTRY_FORMAT]]
        tokens = form[TILE_TOKENS]
        block = np.int64(entries[index, ENTRY_OFFSET]) * OFFSET_UNIT
        block += layer * form[TILE_BYTES] + head * form[HEAD_BYTES]
        first, valid = np.int64(entries[index, ENTRY_FIRST]), np.int64(entries[index, ENTRY_VALID])
        for done in range(0, valid, tokens):
            rows = min(tokens, valid - done)
            skip = max(low - first - done, 0)
            if skip >= rows:
                continue
            tile = block + done // tokens * form[TILE_STRIDE]
            read_keys(arena, form, tile, rows, head_dim, scratch, 0)
            for row in range(skip, rows):
                at = place + row - skip
                to = at // PANEL * PANEL * head_dim + at % PANEL
                for d in range(head_dim):
                    store(keys, to + d * PANEL, load(scratch, row * head_dim + d))
            read_values(arena, form, tile, rows, head_dim, scratch, 0)
            for row in range(skip, rows):
                at = place + row - skip
                for part in range(0, head_dim, PANEL):
                    to = at // PANEL * PANEL * padded + part * PANEL + at % PANEL * PANEL
                    for d in range(min(PANEL, head_dim - part)):
                        store(values, to + d, load(scratch, row * head_dim + part + d))
            place += rows - skip


@fast
def _attend_head(
    query: Any, scale: Any, arena: Any, where: Any, head: Any, entries: Any, low: Any, spans: Any, tokens: Any, out: Any
) -> None:
    """Attention of one KV head's query heads; see `attend_chunk`."""
    heads, head_dim = query.shape[1], query.shape[2]
    group = heads // where[2]
    padded = (head_dim + PANEL - 1) // PANEL * PANEL
    panels = (tokens + PANEL - 1) // PANEL
    keys = np.zeros(panels * PANEL * head_dim, np.float32)
    values = np.zeros(panels * PANEL * padded, np.float32)
    _gather(arena, (where[0], where[1]), head, entries, low, keys, values, (head_dim, padded))
    given, result = query.reshape(-1), out.reshape(-1)
    at_once = max(_ROWS // group, 1)
    rows_most = at_once * group
    flat = np.empty(rows_most * head_dim, np.float32)
    scores = np.empty(rows_most * PANEL, np.float32)
    added = np.empty(rows_most * padded, np.float32)
    sums = np.empty(rows_most * padded, np.float32)
    best, total = np.empty(rows_most, np.float32), np.empty(rows_most, np.float32)
    for start in range(0, query.shape[0], at_once):
        count = min(at_once, query.shape[0] - start)
        rows = count * group
        for row in range(rows):
            source = ((start + row // group) * heads + head * group + row % group) * head_dim
            for d in range(head_dim):
                store(flat, row * head_dim + d, load(given, source + d) * scale)
        sums[:] = 0
        best[:] = -np.inf
        total[:] = 0
        for panel in range(spans[start, 0] // PANEL, (spans[start + count - 1, 1] + PANEL - 1) // PANEL):
            multiply(flat, 0, head_dim, rows, keys, panel * PANEL * head_dim, head_dim, 1, scores, PANEL)
            for row in range(rows):
                token, at = start + row // group, row * PANEL
                begin = min(max(spans[token, 0] - panel * PANEL, 0), PANEL)
                end = min(max(spans[token, 1] - panel * PANEL, 0), PANEL)
                peak = largest_score(scores, at, PANEL, begin, end)
                if peak > best[row]:
                    shrink = exp_nonpositive(best[row] - peak)
                    best[row] = peak
                    total[row] *= shrink
                    for d in range(padded):
                        sums[row * padded + d] *= shrink
                total[row] += weigh_scores(scores, at, PANEL, begin, end, best[row])
            multiply(scores, 0, PANEL, rows, values, panel * PANEL * padded, PANEL, padded // PANEL, added, padded)
            for i in range(rows * padded):
                sums[i] += added[i]
        for row in range(rows):
            inverse = np.float32(1) / total[row] if total[row] != 0 else np.float32(0)
            to = ((start + row // group) * heads + head * group + row % group) * head_dim
            for d in range(head_dim):
                store(result, to + d, native_nearest(result, sums[row * padded + d] * inverse))


def _build(stamp: int) -> tuple[Callable[..., None], Callable[..., None]]:
    @entry()
    def attend_chunk(
        query: Any, scale: Any, arena: Any, where: Any, entries: Any, low: Any, spans: Any, tokens: Any, out: Any
    ) -> None:
        _ = stamp
        for head in range(where[2]):
            _attend_head(query, scale, arena, where, head, entries, low, spans, tokens, out)

    @entry(parallel=True)
    def attend_chunk_parallel(
        query: Any, scale: Any, arena: Any, where: Any, entries: Any, low: Any, spans: Any, tokens: Any, out: Any
    ) -> None:
        _ = stamp
        for head in prange(where[2]):
            _attend_head(query, scale, arena, where, head, entries, low, spans, tokens, out)

    return attend_chunk, attend_chunk_parallel


# One sequence's new tokens: query, out native [new, heads, head_dim] - scale float32 - arena (bytes, native elements)
#   where (layout_array, layer, kv heads) - entries int32 [n, 4], of which ``tokens`` positions are >= low
#   spans int64 [new, 2]: of these, the first one that each new token sees, and one past the last
attend_chunk, attend_chunk_parallel = _build(source_stamp())
