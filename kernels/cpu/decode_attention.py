"""Decode attention straight from the arena, one pass over the tiles of each (sequence, kv head).

Query heads of a group share each tile's loads. Codes are never dequantised: with ``key = zero + scale * code`` the
product is ``q.zero + (q * scale).code``, its first term once per tile, and with ``value = zero + scale * code`` the
weighted sum is ``sum(p * zero) + sum((p * scale) * code)``. Softmax is online (Milakov & Gimelshein 2018) over tiles
in position order, so that the result does not depend on how tiles are grouped into blocks.

The share of attention per chunk of 16 positions comes from the same weights: each chunk keeps its sum and the peak that
it was taken under, and both are related to the head's final peak and total at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import config, prange, set_num_threads

from kernels.cpu.compile import entry, fast, inlined, source_stamp
from kernels.cpu.tile_attention import chunk_shares, note_chunks, softmax_step, tile_scores, tile_values
from kernels.cpu.tiles import (
    HEAD_BYTES,
    TILE_BYTES,
    TILE_STRIDE,
    TILE_TOKENS,
    elements_of,
    layout_array,
)
from kernels.layout import (
    CHUNK_TOKENS,
    ENTRY_FIRST,
    ENTRY_FORMAT,
    ENTRY_OFFSET,
    ENTRY_VALID,
    OFFSET_UNIT,
    QUANT_TILE_TOKENS,
    KVShape,
)
from kernels.table import TableView

# Products of query and key elements from which sharing among threads pays: about a third of a millisecond for one.
_PARALLEL_WORK = 1 << 20
# Numba has one set of threads per process, and one of its implementations aborts when two threads use it at once.
# Whoever finds it taken computes alone.
_THREADS_IN_USE = threading.Lock()


@inlined
def _head_of_block(entries: Any, index: Any, layout: Any, layer: Any, head: Any) -> Any:
    """Byte of a head's part of a block's first tile."""
    form = layout[entries[index, ENTRY_FORMAT]]
    return np.int64(entries[index, ENTRY_OFFSET]) * OFFSET_UNIT + layer * form[TILE_BYTES] + head * form[HEAD_BYTES]


@inlined
def _attend(
    query: Any,
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

    query: float32 [group, head_dim], scaled; entries: int32 [n, 4]; out: float32 [group, head_dim], overwritten;
    mass: float32 [chunks], overwritten; no chunks: not wanted.
    """
    group, head_dim = query.shape
    flat = query.reshape(-1)
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
            out[g, d] = sums[g * head_dim + d] * inverse
    if chunks > 0:
        chunk_shares(best, total, chunk_peaks, chunk_sums, mass)


@fast
def _attend_share(
    worker: Any,
    workers: Any,
    query: Any,
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
        query: Any, arena: Any, where: Any, table: Any, rows: Any, window: Any, out: Any, mass: Any
    ) -> None:
        _ = stamp
        _attend_share(0, 1, query, arena, where, table, rows, window, out, mass)

    @entry(parallel=True)
    def attend_rows_parallel(
        workers: Any, query: Any, arena: Any, where: Any, table: Any, rows: Any, window: Any, out: Any, mass: Any
    ) -> None:
        _ = stamp
        for worker in prange(workers):
            _attend_share(worker, workers, query, arena, where, table, rows, window, out, mass)

    return attend_rows, attend_rows_parallel


# Both: attention of query rows (float32 [rows, heads, head_dim], scaled) into ``out`` (the same shape).
#   arena (bytes uint8, the same bytes as native elements) - where (layout_array, layer, kv heads)
#   table (entries int32 [sequences, max_entries, 4], num_entries int32) - rows (sequence, position: int32 [rows])
#   mass float32 [rows, kv heads, chunks], with no chunks where it is not wanted (a flag at run time: one test per tile,
#   where a second specialisation would double the time of compilation)
_attend_rows, _attend_rows_parallel = _build(source_stamp())


def plan_decode(*_arguments: object, **_options: object) -> None:
    """There is nothing to prepare."""


def decode_attention(
    query: torch.Tensor,
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    table: TableView,
    *,
    scale: float,
    window: int = 0,
    out: torch.Tensor,
    mass: torch.Tensor | None = None,
    prepared: object = None,  # noqa: ARG001 - the signature is every backend's
) -> None:
    """See :func:`kernels.ops.decode_attention`."""
    sequences = torch.arange(query.shape[0], dtype=torch.int32)
    attend(query, arena, shape, layer, table, (sequences, table.query_first), scale, window, out, mass=mass)


def attend(
    query: torch.Tensor,
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    table: TableView,
    rows: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    window: int,
    out: torch.Tensor,
    *,
    mass: torch.Tensor | None = None,
    threads: int | None = None,
) -> None:
    """Attention of query rows [rows, heads, head_dim], each of a (sequence, position): int32 [rows] both.

    ``mass``: float32 [rows, kv_heads, chunks], overwritten, or None.
    ``threads``: how many share the work; None: torch's number, or one where sharing does not pay.
    """
    scaled = query.to(torch.float32) * scale
    result = out if out.dtype == torch.float32 and out.is_contiguous() else torch.empty_like(scaled)
    shares = scaled.new_empty((len(scaled), shape.num_kv_heads, 0)) if mass is None else mass.contiguous()
    sequences, positions = rows[0].contiguous(), rows[1].contiguous()
    arguments = (
        scaled.contiguous().numpy(),
        (arena.numpy(), elements_of(arena, query.dtype)),
        (layout_array(shape), layer, shape.num_kv_heads),
        (table.entries.contiguous().numpy(), table.num_entries.contiguous().numpy()),
        (sequences.numpy(), positions.numpy()),
        window,
        result.numpy(),
        shares.numpy(),
    )
    if threads is None:
        work = (int(positions.sum()) + len(positions)) * query.shape[1] * query.shape[2]
        # The first call takes the parallel form whatever its size, so that warming an engine up compiles both: compiled
        # later, it would stall every running request for as long.
        is_first = not getattr(_attend_rows_parallel, "signatures", True)
        threads = torch.get_num_threads() if is_first or work >= _PARALLEL_WORK else 1
    threads = min(threads, config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if threads > 1 and _THREADS_IN_USE.acquire(blocking=False):
        try:
            set_num_threads(threads)
            _attend_rows_parallel(threads, *arguments)
        finally:
            _THREADS_IN_USE.release()
    else:
        _attend_rows(*arguments)
    if result is not out:
        out.copy_(result)
    if mass is not None and shares is not mass:
        mass.copy_(shares)
