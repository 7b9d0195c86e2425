# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"
# ruff: noqa: ANN001, ANN202 - device code: types are Triton's, given by the arguments
"""Prefill attention: a chunk of new tokens against its sequence's mixed-class context and, causally, itself.

A program takes a run of query tokens of one sequence with all query heads of one KV head (rows = token x head), so
that every key and value is loaded once for the group, and walks the sequence in windows of 32 absolute positions
(FlashAttention-2's loop, Dao 2023). The chunk's own keys and values are already in the arena, in native blocks: one
loop serves context and chunk. Quantised tiles are expanded to the native dtype, once per window and program. Programs
find their sequence by bisection over `query_starts`, so nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.layout import KVShape
from kernels.table import TableView
from kernels.triton.launch import adjacent_channels, adjacent_entries, architecture_of, attention_warps, half_lanes
from kernels.triton.tiles import HALF_WINDOW, LOG2_E, WINDOW, load_entry, next_window, seek_entry
from kernels.triton.window import attend_window


@triton.jit
def _find_sequence(query_starts, num_sequences, program, TOKENS: tl.constexpr):
    """The sequence of a program: sequence s owns programs from starts[s] // TOKENS + s on (some stay idle)."""
    low = num_sequences * 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        mine = tl.load(query_starts + middle) // TOKENS + middle <= program
        low = tl.where(mine, middle, low)
        high = tl.where(mine, high, middle)
    return low


@triton.jit(do_not_specialize=["num_sequences", "layer", "stride_table", "window"])
def _prefill_kernel(
    query, arena, entries, num_entries, query_first, query_starts, out,
    num_sequences, layer, stride_table, window,
    stride_token, stride_head, stride_out_token, stride_out_head, scale_log2,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    native_dtype: tl.constexpr = query.dtype.element_ty
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _find_sequence(query_starts, num_sequences, program, TOKENS)
    query_start = tl.load(query_starts + sequence)
    chunk = tl.load(query_starts + sequence + 1) - query_start
    first_token = (program - (query_start // TOKENS + sequence)) * TOKENS
    if first_token < chunk:
        first_query = tl.load(query_first + sequence) + first_token
        last_query = first_query + tl.minimum(TOKENS, chunk - first_token) - 1
        row = tl.arange(0, ROWS)
        channel = tl.arange(0, HALF)
        in_row = (row < TOKENS * GROUP) & (first_token + row // GROUP < chunk)
        query_position = first_query + row // GROUP
        head = kv_head * GROUP + row % GROUP
        query_token = (query_start + first_token + row // GROUP).to(tl.int64)
        at = query + query_token[:, None] * stride_token + head[:, None] * stride_head + channel[None, :]
        inside = in_row[:, None] & (channel < DIM // 2)[None, :]
        query_low = tl.load(at, mask=inside, other=0.0)
        query_high = tl.load(at + DIM // 2, mask=inside, other=0.0)
        lowest = tl.where(window > 0, query_position - window + 1, 0)
        start = tl.where(window > 0, tl.maximum(first_query - window + 1, 0), 0) // WINDOW * WINDOW
        stop = last_query + 1

        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sum_low = tl.zeros([ROWS, HALF], tl.float32)
        sum_high = tl.zeros([ROWS, HALF], tl.float32)
        table = entries + sequence.to(tl.int64) * stride_table
        count = tl.load(num_entries + sequence)
        index = seek_entry(table, count, start)
        offset, code, first, end = load_entry(table, index, count)
        position = tl.maximum(start, first // WINDOW * WINDOW)
        while position < stop:
            index_1 = index + (end <= position + HALF_WINDOW).to(tl.int32)
            offset_1, code_1, first_1, end_1 = load_entry(table, index_1, count)
            peak, total, sum_low, sum_high, _, _ = attend_window(
                query_low, query_high, query_position, lowest, peak, total, sum_low, sum_high, scale_log2,
                arena, position, layer, kv_head, offset, code, first, end, offset_1, code_1, first_1, end_1,
                LAYERS, KV_HEADS, DIM, HALF, native_dtype,
            )  # fmt: skip
            position, index, offset, code, first, end = next_window(
                table, count, position, index_1, offset_1, code_1, first_1, end_1
            )

        total = tl.where(total > 0.0, total, 1.0)[:, None]
        at = out + query_token[:, None] * stride_out_token + head[:, None] * stride_out_head + channel[None, :]
        tl.store(at, (sum_low / total).to(native_dtype), mask=inside)
        tl.store(at + DIM // 2, (sum_high / total).to(native_dtype), mask=inside)


def prefill_constants(shape: KVShape, group: int) -> dict[str, int]:
    """Compile-time constants; rows (query token x head of a group) of a program are fewer where registers are short."""
    rows = 16 if shape.element_bytes == 4 else 64 if shape.head_dim <= 128 else 32
    rows = int(max(rows, triton.next_power_of_2(group)))
    return {
        "LAYERS": shape.num_layers,
        "KV_HEADS": shape.num_kv_heads,
        "GROUP": group,
        "ROWS": rows,
        "TOKENS": rows // group,
        "DIM": shape.head_dim,
        "HALF": half_lanes(shape.head_dim),
    }


def prefill_warps(shape: KVShape, architecture: int) -> int:
    """Warps of a program. On sm_100 Triton 3.6.0 spills with 4 of them and 64 rows; on sm_80, 8 would leave one block
    per multiprocessor.
    """
    warps = attention_warps(shape)
    return 8 if architecture >= 100 and shape.element_bytes == 2 and shape.head_dim > 64 else warps


def prefill_attention_launcher(
    query: torch.Tensor,
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    table: TableView,
    query_starts: torch.Tensor,
    *,
    scale: float,
    window: int,
    out: torch.Tensor,
) -> None:
    """Launch the kernel; allocates nothing and does not wait."""
    tokens, heads, _ = query.shape
    constants = prefill_constants(shape, heads // shape.num_kv_heads)
    sequences = table.entries.shape[0]
    _prefill_kernel[(tokens // constants["TOKENS"] + sequences, shape.num_kv_heads)](
        query, arena, table.entries, table.num_entries, table.query_first, query_starts, out,
        sequences, layer, table.entries.stride(0), window,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), scale * LOG2_E.value,
        **constants, num_warps=prefill_warps(shape, architecture_of(query.device)), num_stages=1,
    )  # fmt: skip


def prefill_attention(
    query: torch.Tensor,
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    table: TableView,
    query_starts: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    out: torch.Tensor,
) -> None:
    """Causal attention of each sequence's new tokens; see :func:`kernels.ops.prefill_attention`."""
    if not query.shape[0]:
        return
    query, table, target = adjacent_channels(query), adjacent_entries(table), adjacent_channels(out)
    prefill_attention_launcher(
        query, arena, shape, layer, table, query_starts.contiguous(), scale=scale, window=window, out=target
    )
    if target is not out:
        out.copy_(target)
