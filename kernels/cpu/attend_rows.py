"""The kernel of decode attention: one pass over the tiles of each (sequence, kv head), straight from the arena.

Query heads of a group share each tile's loads. Codes are never dequantised: with ``key = zero + scale * code`` the
product is ``q.zero + (q * scale).code``, its first term once per tile, and with ``value = zero + scale * code`` the
weighted sum is ``sum(p * zero) + sum((p * scale) * code)``. Softmax is online (Milakov & Gimelshein 2018) over tiles
in position order, so that the result does not depend on how tiles are grouped into blocks.

The share of attention per chunk of 16 positions comes from the same weights: each chunk keeps its sum and the peak that
it was taken under, and both are related to the head's final peak and total at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.compile import entry, fast, inlined, source_stamp
from kernels.cpu.lowlevel import load, native_nearest, store
from kernels.cpu.tile_attention import chunk_shares, note_chunks, softmax_step, tile_scores, tile_values
from kernels.cpu.tiles import HEAD_BYTES, TILE_BYTES, TILE_STRIDE, TILE_TOKENS
from kernels.layout import (
    CHUNK_TOKENS,
    ENTRY_FIRST,
    ENTRY_FORMAT,
    ENTRY_OFFSET,
    ENTRY_VALID,
    OFFSET_UNIT,
    QUANT_TILE_TOKENS,
)


@inlined
def _first_tile(entries: Any, index: Any, layout: Any, layer: Any) -> Any:
    """Byte of a layer's part of a block's first tile."""
    form = layout[entries[index, ENTRY_FORMAT]]
    return np.int64(entries[index, ENTRY_OFFSET]) * OFFSET_UNIT + layer * form[TILE_BYTES]


@inlined
def _attend(
    query: Any,
    scale: Any,
    codes: Any,
    elements: Any,
    layout: Any,
    layer: Any,
    heads: Any,
    entries: Any,
    low: Any,
    high: Any,
    out: Any,
    mass: Any,
    room: Any,
) -> None:
    """Attention of the query heads of some KV heads over positions low .. high - 1 of one sequence.

    heads: (first KV head, one past the last); query: native [kv heads * group, head_dim]; entries: int32 [n, 4]; out:
    like query, overwritten; mass: float32 [kv heads, chunks], overwritten; no chunks: not wanted. room: scratch of
    `attend_share`, made once for many calls. The heads take turns on each tile, as their parts of it lie side by side.
    """
    flat, sums, scratch, scaled, scores, best, total, chunk_peaks, chunk_sums = room
    first_head, number = heads[0], heads[1] - heads[0]
    head_dim, chunks = query.shape[1], mass.shape[1]
    group = query.shape[0] // number
    size = group * head_dim
    given, result = query.reshape(-1), out.reshape(-1)
    for i in range(number * size):
        flat[i] = load(given, i) * scale
        sums[i] = 0
    scores[:] = 0
    best[:] = -np.inf
    total[:] = 0
    if chunks > 0:
        chunk_peaks[:] = -np.inf
        chunk_sums[:] = 0
    work = (scaled, scratch)
    following = np.int64(0)  # the next block's first tile
    if entries.shape[0] > 0:
        following = _first_tile(entries, 0, layout, layer)
    for index in range(entries.shape[0]):
        form = layout[entries[index, ENTRY_FORMAT]]
        tokens, part = form[TILE_TOKENS], form[HEAD_BYTES]
        block = following
        after = min(index + 1, entries.shape[0] - 1)
        following = _first_tile(entries, after, layout, layer)
        following_part = layout[entries[after, ENTRY_FORMAT]][HEAD_BYTES]
        block_first, block_valid = np.int64(entries[index, ENTRY_FIRST]), np.int64(entries[index, ENTRY_VALID])
        if block_first + block_valid <= low:
            continue
        for done in range(0, block_valid, tokens):
            first = block_first + done
            valid = min(tokens, block_valid - done)
            begin, end = max(low - first, 0), min(high - first, valid)
            if begin >= end:
                continue
            tile = block + done // tokens * form[TILE_STRIDE]
            for h in range(number):
                place = tile + (first_head + h) * part
                # Parts are too short a run for the hardware to see what comes next.
                if h + 1 < number:
                    span = (place + part, place + 2 * part)
                elif done + tokens < block_valid:
                    ahead = tile + form[TILE_STRIDE] + first_head * part
                    span = (ahead, ahead + part)
                else:
                    ahead = following + first_head * following_part
                    span = (ahead, ahead + following_part)
                own, own_sums = flat[h * size : (h + 1) * size], sums[h * size : (h + 1) * size]
                own_best, own_total = best[h * group : (h + 1) * group], total[h * group : (h + 1) * group]
                tile_scores(own, codes, elements, form, place, valid, head_dim, work, span, scores)
                softmax_step(scores, begin, end, tokens, head_dim, own_best, own_total, own_sums)
                if chunks > 0:
                    note_chunks(
                        scores, begin, end, first // CHUNK_TOKENS, own_best, chunk_peaks[h * group : (h + 1) * group],
                        chunk_sums[h * group : (h + 1) * group],
                    )  # fmt: skip
                tile_values(codes, elements, form, place, valid, head_dim, scratch, scores, own_sums)
    for g in range(number * group):
        inverse = np.float32(1) / total[g] if total[g] != 0 else np.float32(0)
        for d in range(head_dim):
            store(result, g * head_dim + d, native_nearest(result, sums[g * head_dim + d] * inverse))
    if chunks > 0:
        for h in range(number):
            own = slice(h * group, (h + 1) * group)
            chunk_shares(best[own], total[own], chunk_peaks[own], chunk_sums[own], mass[h])


@fast
def attend_share(
    worker: Any,
    workers: Any,
    query: Any,
    scale: Any,
    arena: Any,
    where: Any,
    table: Any,
    rows: Any,
    window: Any,
    out: Any,
    mass: Any,
) -> None:
    """The (query row, kv head) pairs that fall to one of ``workers``, by their number of tokens.

    The pairs are laid end to end along a line whose unit is a position; a pair belongs to the worker in whose equal
    part of the line it starts. The result of a pair does not depend on who computes it.
    """
    codes, elements = arena
    layout, layer, kv_heads = where
    entries, num_entries = table
    sequences, positions = rows
    heads, head_dim, chunks = query.shape[1], query.shape[2], mass.shape[2]
    group = heads // kv_heads
    room = (
        np.empty(heads * head_dim, np.float32),  # queries times scale
        np.empty(heads * head_dim, np.float32),  # sums
        np.empty(QUANT_TILE_TOKENS * head_dim, np.float32),  # a tile
        np.empty(group * head_dim, np.float32),  # queries times keys' scales
        np.empty(group * QUANT_TILE_TOKENS, np.float32),  # scores
        np.empty(heads, np.float32),  # best
        np.empty(heads, np.float32),  # total
        np.empty((heads, chunks), np.float32),
        np.empty((heads, chunks), np.float32),
    )
    length = np.int64(0)
    for row in range(query.shape[0]):
        high = np.int64(positions[row]) + 1
        length += (min(high, window) if window > 0 else high) * kv_heads
    start = np.int64(0)
    for row in range(query.shape[0]):
        sequence, high = sequences[row], np.int64(positions[row]) + 1
        low = max(high - window, 0) if window > 0 else np.int64(0)
        # Its pairs are neighbours: the KV heads from one to another.
        since = np.int64(0)
        until = np.int64(0)
        for head in range(kv_heads):
            owner = start * workers // length
            start += high - low
            if owner < worker:
                since = np.int64(head + 1)
            if owner <= worker:
                until = np.int64(head + 1)
        if since < until:
            first, last = since * group, until * group
            _attend(
                query[row, first:last],
                scale,
                codes,
                elements,
                layout,
                layer,
                (since, until),
                entries[sequence, : num_entries[sequence]],
                low,
                high,
                out[row, first:last],
                mass[row, since:until],
                room,
            )


def _build(stamp: int) -> tuple[Callable[..., None], Callable[..., None]]:
    @entry()
    def attend_rows(
        query: Any, scale: Any, arena: Any, where: Any, table: Any, rows: Any, window: Any, out: Any, mass: Any
    ) -> None:
        _ = stamp
        attend_share(0, 1, query, scale, arena, where, table, rows, window, out, mass)

    @entry(parallel=True)
    def attend_rows_parallel(
        workers: Any,
        query: Any,
        scale: Any,
        arena: Any,
        where: Any,
        table: Any,
        rows: Any,
        window: Any,
        out: Any,
        mass: Any,
    ) -> None:
        _ = stamp
        for worker in prange(workers):
            attend_share(worker, workers, query, scale, arena, where, table, rows, window, out, mass)

    return attend_rows, attend_rows_parallel


# Both: attention of query rows (native elements [rows, heads, head_dim]), times a float32 scale, into ``out`` alike.
#   arena (bytes uint8, the same bytes as native elements) - where (layout_array, layer, kv heads)
#   table (entries int32 [sequences, max_entries, 4], num_entries int32) - rows (sequence, position: int32 [rows])
#   mass float32 [rows, kv heads, chunks], with no chunks where it is not wanted (a flag at run time: one test per tile,
#   where a second specialisation would double the time of compilation)
attend_rows, attend_rows_parallel = _build(source_stamp())
