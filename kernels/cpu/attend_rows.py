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
def _head_of_block(entries: Any, index: Any, layout: Any, layer: Any, head: Any) -> Any:
    """Byte of a head's part of a block's first tile."""
    form = layout[entries[index, ENTRY_FORMAT]]
    return np.int64(entries[index, ENTRY_OFFSET]) * OFFSET_UNIT + layer * form[TILE_BYTES] + head * form[HEAD_BYTES]


@inlined
def _attend(
    query: Any,
    scale: Any,
    codes: Any,
    elements: Any,
    layout: Any,
    layer: Any,
    head: Any,
    entries: Any,
    low: Any,
    high: Any,
    out: Any,
    mass: Any,
) -> None:
    """Attention of one group of query heads over positions low .. high - 1 of one sequence.

    query: native [group, head_dim]; entries: int32 [n, 4]; out: like query, overwritten; mass: float32 [chunks],
    overwritten; no chunks: not wanted.
    """
    group, head_dim = query.shape
    given, result = query.reshape(-1), out.reshape(-1)
    flat = np.empty(group * head_dim, dtype=np.float32)
    for i in range(group * head_dim):
        flat[i] = load(given, i) * scale
    sums = np.zeros(group * head_dim, dtype=np.float32)
    scratch = np.empty(QUANT_TILE_TOKENS * head_dim, dtype=np.float32)
    work = (np.empty(group * head_dim, dtype=np.float32), scratch)
    scores = np.zeros(group * QUANT_TILE_TOKENS, dtype=np.float32)
    best = np.full(group, -np.inf, dtype=np.float32)
    total = np.zeros(group, dtype=np.float32)
    chunks = mass.shape[0]
    chunk_peaks = np.full((group, chunks), -np.inf, dtype=np.float32)
    chunk_sums = np.zeros((group, chunks), dtype=np.float32)
    following = np.int64(0)  # the next block's first tile
    if entries.shape[0] > 0:
        following = _head_of_block(entries, 0, layout, layer, head)
    for index in range(entries.shape[0]):
        form = layout[entries[index, ENTRY_FORMAT]]
        tokens = form[TILE_TOKENS]
        block = following
        following = _head_of_block(entries, min(index + 1, entries.shape[0] - 1), layout, layer, head)
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
            # A head's part of a tile is too short a run for the hardware to see what comes next.
            ahead = tile + form[TILE_STRIDE] if done + tokens < block_valid else following
            span = (ahead, ahead + form[HEAD_BYTES])
            tile_scores(flat, codes, elements, form, tile, valid, head_dim, work, span, scores)
            softmax_step(scores, begin, end, tokens, head_dim, best, total, sums)
            if chunks > 0:
                note_chunks(scores, begin, end, first // CHUNK_TOKENS, best, chunk_peaks, chunk_sums)
            tile_values(codes, elements, form, tile, valid, head_dim, scratch, scores, sums)
    for g in range(group):
        inverse = np.float32(1) / total[g] if total[g] != 0 else np.float32(0)
        for d in range(head_dim):
            store(result, g * head_dim + d, native_nearest(result, sums[g * head_dim + d] * inverse))
    if chunks > 0:
        chunk_shares(best, total, chunk_peaks, chunk_sums, mass)


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
    group = query.shape[1] // kv_heads
    length = np.int64(0)
    for row in range(query.shape[0]):
        high = np.int64(positions[row]) + 1
        length += (min(high, window) if window > 0 else high) * kv_heads
    start = np.int64(0)
    for row in range(query.shape[0]):
        sequence, high = sequences[row], np.int64(positions[row]) + 1
        low = max(high - window, 0) if window > 0 else np.int64(0)
        for head in range(kv_heads):
            mine = start * workers // length == worker
            start += high - low
            if mine:
                first, last = head * group, (head + 1) * group
                _attend(
                    query[row, first:last],
                    scale,
                    codes,
                    elements,
                    layout,
                    layer,
                    head,
                    entries[sequence, : num_entries[sequence]],
                    low,
                    high,
                    out[row, first:last],
                    mass[row, head],
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
