# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"
# ruff: noqa: ANN001, ANN202 - device code: types are Triton's, given by the arguments
"""The two kernels of :mod:`kernels.triton.attention_mass`: each row's maximum and sum, then the chunks' shares."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kernels.layout import KVShape
from kernels.triton.launch import bounded_options
from kernels.triton.prefill_attention import prefill_constants
from kernels.triton.tiles import HALF_WINDOW, WINDOW, load_entry, next_window, seek_entry
from kernels.triton.window import half_sums, load_window_keys, window_scores

SPLIT_TOKENS = 256  # positions per program of the second pass


@triton.jit
def _observed(query_starts, query_first, sequence, last):
    """Of a sequence: its first observed query (row of the batch), that query's position, and how many there are."""
    stop = tl.load(query_starts + sequence + 1)
    start = tl.load(query_starts + sequence)
    begin = tl.maximum(start, stop - last)
    return begin, tl.load(query_first + sequence) + begin - start, stop - begin


@triton.jit
def _load_queries(
    query, begin, count, part, kv_head, stride_token, stride_head,
    GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rows (query token x head of the group) of one part of the observed queries, two of [ROWS, HALF]."""
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, HALF)
    token = part * TOKENS + row // GROUP
    in_row = (row < TOKENS * GROUP) & (token < count)
    at = query + (begin + token).to(tl.int64)[:, None] * stride_token
    at += (kv_head * GROUP + row % GROUP)[:, None] * stride_head + channel[None, :]
    inside = in_row[:, None] & (channel < DIM // 2)[None, :]
    return tl.load(at, mask=inside, other=0.0), tl.load(at + DIM // 2, mask=inside, other=0.0), token, in_row


@triton.jit(do_not_specialize=["layer", "stride_table", "window", "last"])
def _mass_totals_kernel(
    query, arena, entries, num_entries, query_first, query_starts, row_peak, row_total,
    layer, stride_table, window, last, stride_token, stride_head, scale_log2,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """First pass. One program per sequence and KV head (axis 0) and part of the observed queries (axis 1)."""
    native_dtype: tl.constexpr = query.dtype.element_ty
    sequence = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % KV_HEADS
    part = tl.program_id(1)
    begin, first_query, count = _observed(query_starts, query_first, sequence, last)
    if part * TOKENS < count:
        query_low, query_high, token, in_row = _load_queries(
            query, begin, count, part, kv_head, stride_token, stride_head, GROUP, ROWS, TOKENS, DIM, HALF
        )
        query_position = first_query + token
        lowest = tl.where(window > 0, query_position - window + 1, 0)
        start = tl.where(window > 0, tl.maximum(first_query + part * TOKENS - window + 1, 0), 0) // WINDOW * WINDOW
        stop = first_query + tl.minimum((part + 1) * TOKENS, count)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        table = entries + sequence * stride_table
        length = tl.load(num_entries + sequence)
        index = seek_entry(table, length, start)
        offset, code, first, end = load_entry(table, index, length)
        position = tl.maximum(start, first // WINDOW * WINDOW)
        while position < stop:
            index_1 = index + (end <= position + HALF_WINDOW).to(tl.int32)
            offset_1, code_1, first_1, end_1 = load_entry(table, index_1, length)
            key_low, key_high, stored = load_window_keys(
                arena, position, layer, kv_head, offset, code, first, end, offset_1, code_1, first_1, end_1,
                LAYERS, KV_HEADS, DIM, HALF, native_dtype,
            )  # fmt: skip
            scores = window_scores(
                query_low, query_high, query_position, lowest, key_low, key_high, stored, position, scale_log2
            )
            new_peak = tl.maximum(peak, tl.max(scores, axis=1))
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            total = total * tl.exp2(peak - shift) + tl.sum(tl.exp2(scores - shift[:, None]), axis=1)
            peak = new_peak
            position, index, offset, code, first, end = next_window(
                table, length, position, index_1, offset_1, code_1, first_1, end_1
            )
        line = (sequence * KV_HEADS + kv_head) * last + token
        at = line * GROUP + tl.arange(0, ROWS) % GROUP
        tl.store(row_peak + at, peak, mask=in_row)
        tl.store(row_total + at, total, mask=in_row)


@triton.jit(do_not_specialize=["layer", "stride_table", "window", "last", "chunks"])
def _mass_shares_kernel(
    query, arena, entries, num_entries, query_first, query_starts, row_peak, row_total, mass,
    layer, stride_table, window, last, chunks, stride_token, stride_head, scale_log2,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Second pass. One program per sequence and KV head (axis 0) and piece of positions (axis 1)."""
    native_dtype: tl.constexpr = query.dtype.element_ty
    sequence = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    begin, first_query, count = _observed(query_starts, query_first, sequence, last)
    length = tl.load(num_entries + sequence)
    lowest_of_all = tl.where(window > 0, tl.maximum(first_query - window + 1, 0), 0)
    start = tl.maximum(split * SPLIT, lowest_of_all // WINDOW * WINDOW)
    # A padding sequence has no entries, and no position that means anything.
    stop = tl.where((count > 0) & (length > 0), tl.minimum((split + 1) * SPLIT, first_query + count), 0)
    if start < stop:
        table = entries + sequence * stride_table
        index = seek_entry(table, length, start)
        offset, code, first, end = load_entry(table, index, length)
        position = tl.maximum(start, first // WINDOW * WINDOW)
        while position < stop:
            index_1 = index + (end <= position + HALF_WINDOW).to(tl.int32)
            offset_1, code_1, first_1, end_1 = load_entry(table, index_1, length)
            key_low, key_high, stored = load_window_keys(
                arena, position, layer, kv_head, offset, code, first, end, offset_1, code_1, first_1, end_1,
                LAYERS, KV_HEADS, DIM, HALF, native_dtype,
            )  # fmt: skip
            # Per row, and added up after the loop.
            early = tl.zeros([ROWS], tl.float32)
            late = tl.zeros([ROWS], tl.float32)
            for part in range(tl.cdiv(count, TOKENS)):
                query_low, query_high, token, in_row = _load_queries(
                    query, begin, count, part, kv_head, stride_token, stride_head, GROUP, ROWS, TOKENS, DIM, HALF
                )
                query_position = first_query + token
                lowest = tl.where(window > 0, query_position - window + 1, 0)
                line = (sequence * KV_HEADS + kv_head) * last + token
                at = line * GROUP + tl.arange(0, ROWS) % GROUP
                peak = tl.load(row_peak + at, mask=in_row, other=0.0)
                total = tl.load(row_total + at, mask=in_row, other=0.0)
                scores = window_scores(
                    query_low, query_high, query_position, lowest, key_low, key_high, stored, position, scale_log2
                )
                # A query that sees nothing has neither peak nor total; surplus rows count for nothing.
                shift = tl.where(peak == float("-inf"), 0.0, peak)
                factor = tl.where(in_row, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
                row_early, row_late = half_sums(tl.exp2(scores - shift[:, None]))
                early += tl.where(in_row, row_early * factor, 0.0)
                late += tl.where(in_row, row_late * factor, 0.0)
            chunk = position // HALF_WINDOW
            at_mass = mass + (sequence * KV_HEADS + kv_head) * chunks + chunk
            tl.store(at_mass, tl.sum(early, axis=0) / (count * GROUP), mask=chunk < chunks)
            tl.store(at_mass + 1, tl.sum(late, axis=0) / (count * GROUP), mask=chunk + 1 < chunks)
            position, index, offset, code, first, end = next_window(
                table, length, position, index_1, offset_1, code_1, first_1, end_1
            )


def totals_constants(shape: KVShape, group: int) -> dict[str, Any]:
    """Compile-time constants of the first pass (also for ahead-of-time compilation).

    32 rows at most: prefill's 64 made ptxas spill a few bytes on sm_80 and sm_100.
    """
    constants = prefill_constants(shape, group)
    rows = int(max(min(constants["ROWS"], 32), triton.next_power_of_2(group)))
    return {**constants, "ROWS": rows, "TOKENS": rows // group}


def shares_constants(shape: KVShape, group: int) -> dict[str, Any]:
    """Compile-time constants of the second pass."""
    return {**totals_constants(shape, group), "SPLIT": SPLIT_TOKENS}


def shares_options(shape: KVShape) -> dict[str, int]:
    """Launch options of the second pass; the bound on registers is that of 3 blocks, see `bounded_options`."""
    return bounded_options(shape, 168)
