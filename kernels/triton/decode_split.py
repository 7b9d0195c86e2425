# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"
# ruff: noqa: ANN001, ANN202 - device code: types are Triton's, given by the arguments
"""First kernel of decode attention: per piece of a sequence the softmax's maximum, sum and weighted values."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kernels.layout import KVShape
from kernels.triton.decode_plan import SPLIT_TOKENS, reach
from kernels.triton.launch import bounded_options, half_lanes
from kernels.triton.tiles import HALF_WINDOW, WINDOW, load_entry, next_window, seek_entry
from kernels.triton.window import attend_window


@triton.jit(do_not_specialize=["num_sequences", "layer", "stride_table", "window"])
def _decode_split_kernel(
    query, arena, entries, num_entries, query_first, piece_starts, items, part_peak, part_total, part_sum,
    window_peak, chunk_sum, seen,
    num_sequences, layer, stride_table, window, stride_sequence, stride_head, scale_log2,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, SPLIT: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """A fixed number of programs shares (piece, KV head) in turn; neighbours read neighbouring heads of a tile."""
    native_dtype: tl.constexpr = query.dtype.element_ty
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, HALF)
    inside = (row < GROUP)[:, None] & (channel < DIM // 2)[None, :]
    work = tl.program_id(0)
    # Asked again each time, as registers are short.
    while work < tl.load(piece_starts + num_sequences) * KV_HEADS:
        item = (work // KV_HEADS).to(tl.int64)
        kv_head = work % KV_HEADS
        sequence = tl.load(items + item).to(tl.int64)
        lowest, query_position = reach(num_entries, query_first, sequence, window, True)
        split = lowest // SPLIT + (work // KV_HEADS - tl.load(piece_starts + sequence))
        start = tl.maximum(split * SPLIT, lowest // WINDOW * WINDOW)
        stop = tl.minimum((split + 1) * SPLIT, query_position + 1)
        head = kv_head * GROUP + row
        at = query + sequence * stride_sequence + head[:, None] * stride_head + channel[None, :]
        query_low = tl.load(at, mask=inside, other=0.0)
        query_high = tl.load(at + DIM // 2, mask=inside, other=0.0)
        # The same for every row: a piece ends where its positions do, or at the query.
        query_positions = tl.full([ROWS], 0, tl.int32) + stop - 1
        lowests = tl.full([ROWS], 0, tl.int32) + lowest
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sum_low = tl.zeros([ROWS, HALF], tl.float32)
        sum_high = tl.zeros([ROWS, HALF], tl.float32)
        line = item * (KV_HEADS * GROUP) + head
        seen_windows = split * 0

        count = tl.load(num_entries + sequence)
        table = entries + sequence * stride_table
        index = seek_entry(table, count, start)
        offset, code, first, end = load_entry(table, index, count)
        position = tl.maximum(start, first // WINDOW * WINDOW)
        while position < stop:
            # The second half of the window may belong to the next entry; a quantised tile always fills a window.
            index_1 = index + (end <= position + HALF_WINDOW).to(tl.int32)
            offset_1, code_1, first_1, end_1 = load_entry(table, index_1, count)
            peak, total, sum_low, sum_high, early, late = attend_window(
                query_low, query_high, query_positions, lowests, peak, total, sum_low, sum_high, scale_log2,
                arena, position, layer, kv_head, offset, code, first, end, offset_1, code_1, first_1, end_1,
                LAYERS, KV_HEADS, DIM, HALF, native_dtype,
            )  # fmt: skip
            if MASS:
                place = position % SPLIT // WINDOW
                seen_windows |= 1 << place
                at_window = line * (SPLIT // WINDOW) + place
                tl.store(window_peak + at_window, peak, mask=row < GROUP)
                tl.store(chunk_sum + at_window * 2, early, mask=row < GROUP)
                tl.store(chunk_sum + at_window * 2 + 1, late, mask=row < GROUP)
            position, index, offset, code, first, end = next_window(
                table, count, position, index_1, offset_1, code_1, first_1, end_1
            )

        tl.store(part_peak + line, peak, mask=row < GROUP)
        tl.store(part_total + line, total, mask=row < GROUP)
        at = line[:, None] * DIM + channel[None, :]
        tl.store(part_sum + at, sum_low, mask=inside)
        tl.store(part_sum + at + DIM // 2, sum_high, mask=inside)
        if MASS:
            tl.store(seen + item * KV_HEADS + kv_head, seen_windows)
        work += tl.num_programs(0)


def split_constants(shape: KVShape, group: int, *, mass: bool = False) -> dict[str, Any]:
    """Compile-time constants (also for ahead-of-time compilation)."""
    return {
        "LAYERS": shape.num_layers,
        "KV_HEADS": shape.num_kv_heads,
        "GROUP": group,
        "ROWS": max(16, triton.next_power_of_2(group)),
        "DIM": shape.head_dim,
        "HALF": half_lanes(shape.head_dim),
        "SPLIT": SPLIT_TOKENS,
        "MASS": mass,
    }


def split_options(shape: KVShape) -> dict[str, int]:
    """Launch options; bounds on registers are those of 4 blocks per multiprocessor to head_dim 64, of 3 beyond."""
    return bounded_options(shape, 128 if shape.head_dim <= 64 else 168)
