# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"
# ruff: noqa: ANN001, ANN202 - device code: types are Triton's, given by the arguments
"""Decode attention: one query per sequence over a block table that mixes storage formats.

Two kernels (split-KV, as Flash-Decoding, Dao et al. 2023). The first cuts the sequence at fixed absolute positions,
multiples of `SPLIT_TOKENS`, and computes per piece the softmax's maximum, sum and weighted values; the second merges
the pieces by log-sum-exp, in position order. All query heads of a KV head share one program, so each key and value is
loaded once, and its storage format is asked for once per window of 32 positions.

Pieces, windows and rows depend on absolute positions and on formats only, so the result is bit-identical for the same
tiles in blocks of other sizes.

The share of attention per chunk of 16 positions is a by-product: the first kernel then also stores, per window, what
it added to the sum for each of its two chunks and under which maximum, and a third one relates these to the final
maximum and sum of each head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.layout import CHUNK_TOKENS, KVShape
from kernels.table import TableView
from kernels.triton.tiles import (
    HALF_WINDOW,
    LOG2_E,
    WINDOW,
    adjacent_channels,
    adjacent_entries,
    attention_warps,
    half_lanes,
    load_entry,
    longest_position,
    next_window,
    seek_entry,
)
from kernels.triton.window import attend_window

# Positions per piece; absolute, so neither batch nor block size moves a boundary. A multiple of 32.
SPLIT_TOKENS = 256
_MERGE_SPLITS = tl.constexpr(16)
_MASS_CHUNKS = 128  # per program


@triton.jit(do_not_specialize=["layer", "stride_table", "window", "max_splits"])
def _decode_split_kernel(
    query, arena, entries, num_entries, query_first, part_peak, part_total, part_sum, window_peak, chunk_sum,
    layer, stride_table, window, max_splits, stride_sequence, stride_head, scale_log2,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, SPLIT: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    native_dtype: tl.constexpr = query.dtype.element_ty
    sequence = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    count = tl.load(num_entries + sequence)
    # A padding sequence has no entries, and no position that means anything.
    query_position = tl.where(count > 0, tl.load(query_first + sequence), -1)
    lowest = tl.where(window > 0, tl.maximum(query_position - window + 1, 0), 0)
    start = tl.maximum(split * SPLIT, lowest // WINDOW * WINDOW)
    stop = tl.minimum((split + 1) * SPLIT, query_position + 1)

    row = tl.arange(0, ROWS)
    channel = tl.arange(0, HALF)
    head = kv_head * GROUP + row
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    if start < stop:
        at = query + sequence * stride_sequence + head[:, None] * stride_head + channel[None, :]
        inside = (row < GROUP)[:, None] & (channel < DIM // 2)[None, :]
        query_low = tl.load(at, mask=inside, other=0.0)
        query_high = tl.load(at + DIM // 2, mask=inside, other=0.0)
        # The same for every row: a piece ends where its positions do, or at the query.
        query_positions = tl.full([ROWS], 0, tl.int32) + stop - 1
        lowests = tl.full([ROWS], 0, tl.int32) + lowest
        total = tl.zeros([ROWS], tl.float32)
        sum_low = tl.zeros([ROWS, HALF], tl.float32)
        sum_high = tl.zeros([ROWS, HALF], tl.float32)

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
                line = (sequence * (KV_HEADS * GROUP) + head) * (max_splits * (SPLIT // WINDOW)) + position // WINDOW
                tl.store(window_peak + line, peak, mask=row < GROUP)
                tl.store(chunk_sum + line * 2, early, mask=row < GROUP)
                tl.store(chunk_sum + line * 2 + 1, late, mask=row < GROUP)
            position, index, offset, code, first, end = next_window(
                table, count, position, index_1, offset_1, code_1, first_1, end_1
            )

        at = (sequence * (KV_HEADS * GROUP) + head) * max_splits + split
        tl.store(part_total + at, total, mask=row < GROUP)
        at = at[:, None] * DIM + channel[None, :]
        tl.store(part_sum + at, sum_low, mask=inside)
        tl.store(part_sum + at + DIM // 2, sum_high, mask=inside)
    tl.store(part_peak + (sequence * (KV_HEADS * GROUP) + head) * max_splits + split, peak, mask=row < GROUP)


@triton.jit(do_not_specialize=["window", "max_splits"])
def _decode_merge_kernel(
    part_peak, part_total, part_sum, num_entries, query_first, out, head_peak, head_total,
    window, max_splits, stride_sequence, stride_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr, SPLIT: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    sequence = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    query_position = tl.where(tl.load(num_entries + sequence) > 0, tl.load(query_first + sequence), -1)
    lowest = tl.where(window > 0, tl.maximum(query_position - window + 1, 0), 0)
    last = tl.minimum(query_position, max_splits * SPLIT - 1)
    channel = tl.arange(0, LANES)
    part = tl.arange(0, _MERGE_SPLITS)
    base = (sequence * HEADS + head) * max_splits

    peak = -float("inf")
    total = 0.0
    merged = tl.zeros([LANES], tl.float32)
    chunk = lowest // SPLIT // _MERGE_SPLITS * _MERGE_SPLITS
    while chunk * SPLIT <= last:
        split = chunk + part
        peaks = tl.load(part_peak + base + split, mask=split * SPLIT <= last, other=float("-inf"))
        # A piece without a token stores its peak alone; sums that were never written are never read.
        present = peaks != float("-inf")
        totals = tl.load(part_total + base + split, mask=present, other=0.0)
        inside = present[:, None] & (channel < DIM)[None, :]
        sums = tl.load(part_sum + (base + split)[:, None] * DIM + channel[None, :], mask=inside, other=0.0)
        new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(peaks - shift)
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights * totals, axis=0)
        merged = merged * decay + tl.sum(weights[:, None] * sums, axis=0)
        peak = new_peak
        chunk += _MERGE_SPLITS
    if MASS:
        tl.store(head_peak + sequence * HEADS + head, peak)
        tl.store(head_total + sequence * HEADS + head, total)
    # Nothing attended (a padding sequence): zeros.
    merged = merged / tl.where(total > 0.0, total, 1.0)
    at = out + sequence * stride_sequence + head * stride_head + channel
    tl.store(at, merged.to(out.dtype.element_ty), mask=channel < DIM)


@triton.jit(do_not_specialize=["chunks", "known_chunks"])
def _decode_mass_kernel(
    head_peak, head_total, window_peak, chunk_sum, mass, chunks, known_chunks,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One program per sequence, KV head and run of chunks. `known_chunks`: even, how many the scratch has."""
    sequence = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % KV_HEADS
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    shares = tl.zeros([CHUNKS], tl.float32)
    for member in range(GROUP):
        line = sequence * (KV_HEADS * GROUP) + kv_head * GROUP + member
        peak = tl.load(head_peak + line)
        total = tl.load(head_total + line)
        sums = tl.load(chunk_sum + line * known_chunks + chunk, mask=chunk < known_chunks, other=0.0)
        # Where nothing was attended the sum is 0 and the peak was never written, or is -inf.
        some = sums != 0.0
        peaks = tl.load(window_peak + line * (known_chunks // 2) + chunk // 2, mask=some, other=float("-inf"))
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        shares += sums * tl.exp2(peaks - shift) / tl.where(total > 0.0, total, 1.0)
    at = mass + (sequence * KV_HEADS + kv_head) * chunks + chunk
    tl.store(at, shares / GROUP, mask=chunk < chunks)


def split_constants(shape: KVShape, group: int, *, mass: bool = False) -> dict[str, Any]:
    """Compile-time constants of the split kernel (also for ahead-of-time compilation)."""
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


def merge_constants(shape: KVShape, group: int, *, mass: bool = False) -> dict[str, Any]:
    """Compile-time constants of the merge kernel."""
    heads, dim = shape.num_kv_heads * group, shape.head_dim
    lanes = triton.next_power_of_2(dim)
    return {"HEADS": heads, "DIM": dim, "LANES": lanes, "SPLIT": SPLIT_TOKENS, "MASS": mass}


def mass_constants(shape: KVShape, group: int) -> dict[str, int]:
    """Compile-time constants of the kernel that relates chunks to the whole."""
    return {"KV_HEADS": shape.num_kv_heads, "GROUP": group, "CHUNKS": _MASS_CHUNKS}


@dataclass(frozen=True)
class MassScratch:
    """Scratch of the share of attention, float32: ``chunk_sum`` [seqs, heads, chunks] holds zeros, the others anything.

    chunks: splits * SPLIT_TOKENS / 16; window_peak [seqs, heads, chunks / 2], head_peak and head_total [seqs, heads].
    """

    window_peak: torch.Tensor
    chunk_sum: torch.Tensor
    head_peak: torch.Tensor
    head_total: torch.Tensor


def decode_attention_launcher(
    query: torch.Tensor,
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    table: TableView,
    *,
    scale: float,
    window: int,
    out: torch.Tensor,
    part_peak: torch.Tensor,
    part_total: torch.Tensor,
    part_sum: torch.Tensor,
    mass: torch.Tensor | None = None,
    mass_scratch: MassScratch | None = None,
) -> None:
    """Launch the kernels; allocates nothing and does not wait. Strides: as `adjacent_channels`, `adjacent_entries`.

    Scratch, float32, any content: part_peak and part_total [seqs, heads, splits], part_sum [seqs, heads, splits,
    head_dim], where splits * SPLIT_TOKENS covers the longest sequence (`table.query_first` + 1). ``mass``, contiguous,
    needs scratch of its own.
    """
    sequences, heads, _ = query.shape
    group = heads // shape.num_kv_heads
    splits = part_peak.shape[2]
    _decode_split_kernel[(sequences * shape.num_kv_heads, splits)](
        query, arena, table.entries, table.num_entries, table.query_first, part_peak, part_total, part_sum,
        mass_scratch and mass_scratch.window_peak, mass_scratch and mass_scratch.chunk_sum,
        layer, table.entries.stride(0), window, splits, query.stride(0), query.stride(1), scale * LOG2_E.value,
        **split_constants(shape, group, mass=mass_scratch is not None), num_warps=attention_warps(shape), num_stages=1,
    )  # fmt: skip
    _decode_merge_kernel[(sequences * heads,)](
        part_peak, part_total, part_sum, table.num_entries, table.query_first, out,
        mass_scratch and mass_scratch.head_peak, mass_scratch and mass_scratch.head_total,
        window, splits, out.stride(0), out.stride(1),
        **merge_constants(shape, group, mass=mass_scratch is not None), num_warps=4, num_stages=1,
    )  # fmt: skip
    if mass is not None and mass_scratch is not None:
        chunks, known = mass.shape[2], mass_scratch.chunk_sum.shape[2]
        _decode_mass_kernel[(sequences * shape.num_kv_heads, triton.cdiv(chunks, _MASS_CHUNKS))](
            mass_scratch.head_peak, mass_scratch.head_total, mass_scratch.window_peak, mass_scratch.chunk_sum, mass,
            chunks, known, **mass_constants(shape, group), num_warps=4, num_stages=1,
        )  # fmt: skip


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
) -> None:
    """Attention of one new token per sequence; see :func:`kernels.ops.decode_attention`.

    The number of pieces to launch comes from the longest sequence: where ``table.max_position`` is unknown this reads
    ``table.query_first`` back, which waits for the device.
    """
    sequences, heads, dim = query.shape
    if not sequences:
        return
    query, table, target = adjacent_channels(query), adjacent_entries(table), adjacent_channels(out)
    splits = triton.cdiv(longest_position(table) + 1, SPLIT_TOKENS)
    scratch = torch.empty(sequences * heads * splits * (dim + 2), dtype=torch.float32, device=query.device)
    small = sequences * heads * splits
    shares = None if mass is None else mass.contiguous()
    decode_attention_launcher(
        query, arena, shape, layer, table, scale=scale, window=window, out=target,
        part_peak=scratch[:small].view(sequences, heads, splits),
        part_total=scratch[small : 2 * small].view(sequences, heads, splits),
        part_sum=scratch[2 * small :].view(sequences, heads, splits, dim),
        mass=shares, mass_scratch=None if mass is None else _mass_scratch(mass, sequences, heads, splits),
    )  # fmt: skip
    if mass is not None and shares is not None and shares is not mass:
        mass.copy_(shares)
    if target is not out:
        out.copy_(target)


def _mass_scratch(mass: torch.Tensor, sequences: int, heads: int, splits: int) -> MassScratch:
    chunks = splits * SPLIT_TOKENS // CHUNK_TOKENS
    return MassScratch(
        window_peak=mass.new_empty((sequences, heads, chunks // 2)),
        chunk_sum=mass.new_zeros((sequences, heads, chunks)),
        head_peak=mass.new_empty((sequences, heads)),
        head_total=mass.new_empty((sequences, heads)),
    )
