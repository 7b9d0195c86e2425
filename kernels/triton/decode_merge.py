# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"
# ruff: noqa: ANN001, ANN202 - device code: types are Triton's, given by the arguments
"""Second kernel of decode attention, which merges pieces by log-sum-exp, and the third, for shares of attention."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kernels.layout import KVShape
from kernels.triton.decode_plan import SPLIT_TOKENS, reach
from kernels.triton.tiles import HALF_WINDOW, WINDOW

_MERGE_SPLITS = tl.constexpr(16)
MASS_CHUNKS = 128  # per program


@triton.jit
def _decode_merge_kernel(
    part_peak, part_total, part_sum, piece_starts, out, head_peak, head_total, stride_sequence, stride_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    sequence = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    piece = tl.load(piece_starts + sequence)
    stop = tl.load(piece_starts + sequence + 1)
    channel = tl.arange(0, LANES)
    peak = -float("inf")
    total = 0.0
    merged = tl.zeros([LANES], tl.float32)
    while piece < stop:
        pieces = piece + tl.arange(0, _MERGE_SPLITS)
        here = pieces < stop
        line = pieces.to(tl.int64) * HEADS + head
        peaks = tl.load(part_peak + line, mask=here, other=float("-inf"))
        totals = tl.load(part_total + line, mask=here, other=0.0)
        inside = here[:, None] & (channel < DIM)[None, :]
        sums = tl.load(part_sum + line[:, None] * DIM + channel[None, :], mask=inside, other=0.0)
        new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
        # Nothing attended so far (all evicted): subtracting 0 keeps the weights 0, not NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(peaks - shift)
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights * totals, axis=0)
        merged = merged * decay + tl.sum(weights[:, None] * sums, axis=0)
        peak = new_peak
        piece += _MERGE_SPLITS
    if MASS:
        tl.store(head_peak + sequence * HEADS + head, peak)
        tl.store(head_total + sequence * HEADS + head, total)
    # Nothing attended (a padding sequence): zeros.
    merged = merged / tl.where(total > 0.0, total, 1.0)
    at = out + sequence * stride_sequence + head * stride_head + channel
    tl.store(at, merged.to(out.dtype.element_ty), mask=channel < DIM)


@triton.jit(do_not_specialize=["chunks", "window"])
def _decode_mass_kernel(
    num_entries, query_first, piece_starts, head_peak, head_total, window_peak, chunk_sum, seen, mass, chunks, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program per sequence, KV head and run of chunks: relates what windows added to the heads' final sums."""
    sequence = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % KV_HEADS
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    lowest, _ = reach(num_entries, query_first, sequence, window, True)
    start = tl.load(piece_starts + sequence)
    piece = start + chunk * HALF_WINDOW // SPLIT - lowest // SPLIT
    listed = (piece >= start) & (piece < tl.load(piece_starts + sequence + 1))
    windows = tl.load(seen + piece.to(tl.int64) * KV_HEADS + kv_head, mask=listed, other=0)
    # What no window wrote holds anything.
    written = ((windows >> (chunk * HALF_WINDOW % SPLIT // WINDOW)) & 1) == 1
    shares = tl.zeros([CHUNKS], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        peak = tl.load(head_peak + sequence * (KV_HEADS * GROUP) + head)
        total = tl.load(head_total + sequence * (KV_HEADS * GROUP) + head)
        line = piece.to(tl.int64) * (KV_HEADS * GROUP) + head
        at = line * (SPLIT // HALF_WINDOW) + chunk % (SPLIT // HALF_WINDOW)
        sums = tl.load(chunk_sum + at, mask=written, other=0.0)
        peaks = tl.load(window_peak + at // 2, mask=written, other=float("-inf"))
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        shares += sums * tl.exp2(peaks - shift) / tl.where(total > 0.0, total, 1.0)
    at = mass + (sequence * KV_HEADS + kv_head) * chunks + chunk
    tl.store(at, shares / GROUP, mask=chunk < chunks)


def merge_constants(shape: KVShape, group: int, *, mass: bool = False) -> dict[str, Any]:
    """Compile-time constants of the merge (also for ahead-of-time compilation)."""
    heads, dim = shape.num_kv_heads * group, shape.head_dim
    return {"HEADS": heads, "DIM": dim, "LANES": triton.next_power_of_2(dim), "MASS": mass}


def mass_constants(shape: KVShape, group: int) -> dict[str, int]:
    """Compile-time constants of the kernel that relates chunks to the whole."""
    return {"KV_HEADS": shape.num_kv_heads, "GROUP": group, "CHUNKS": MASS_CHUNKS, "SPLIT": SPLIT_TOKENS}
