"""Share of attention of each sequence's last queries per chunk of 16 positions; reads keys only.

Two passes over the keys, once per prompt: the first finds each row's (query token x head) maximum and sum, the second,
cut at fixed positions for parallelism, takes every score again and adds up its share per chunk. Nothing of the size
rows x positions is ever stored, and no sum is atomic, so that the order of all additions is fixed by positions.
"""

from __future__ import annotations

import torch
import triton

from kernels.layout import CHUNK_TOKENS, KVShape
from kernels.table import TableView
from kernels.triton.launch import adjacent_channels, adjacent_entries, attention_warps
from kernels.triton.mass_passes import (
    SPLIT_TOKENS,
    _mass_shares_kernel,
    _mass_totals_kernel,
    shares_constants,
    shares_options,
    totals_constants,
)
from kernels.triton.tiles import LOG2_E


def attention_mass_launcher(
    query: torch.Tensor,
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    table: TableView,
    query_starts: torch.Tensor,
    *,
    scale: float,
    window: int,
    last: int,
    mass: torch.Tensor,
    row_peak: torch.Tensor,
    row_total: torch.Tensor,
) -> None:
    """Launch both passes; allocates nothing and does not wait.

    ``mass``: contiguous, holds zeros. Scratch, float32, any content: row_peak, row_total [seqs, kv_heads, last, group].
    """
    sequences, _, chunks = mass.shape
    group = query.shape[1] // shape.num_kv_heads
    constants = totals_constants(shape, group)
    numbers = (layer, table.entries.stride(0), window, last)
    strides = (query.stride(0), query.stride(1), scale * LOG2_E.value)
    stored = (query, arena, table.entries, table.num_entries, table.query_first, query_starts, row_peak, row_total)
    programs = sequences * shape.num_kv_heads
    _mass_totals_kernel[(programs, triton.cdiv(last, constants["TOKENS"]))](
        *stored, *numbers, *strides, **constants, num_warps=attention_warps(shape), num_stages=1
    )
    _mass_shares_kernel[(programs, triton.cdiv(chunks * CHUNK_TOKENS, SPLIT_TOKENS))](
        *stored, mass, *numbers, chunks, *strides,
        **shares_constants(shape, group), **shares_options(shape),
    )  # fmt: skip


def attention_mass(
    query: torch.Tensor,
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    table: TableView,
    query_starts: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    last: int,
    mass: torch.Tensor,
) -> None:
    """Share of attention of each sequence's last queries; see :func:`kernels.ops.attention_mass`."""
    if not mass.numel():
        return
    shares = mass if mass.is_contiguous() else torch.empty_like(mass, memory_format=torch.contiguous_format)
    shares.zero_()
    if query.shape[0]:
        last = min(last, query.shape[0])
        group = query.shape[1] // shape.num_kv_heads
        row_peak, row_total = mass.new_empty((2, mass.shape[0], shape.num_kv_heads, last, group))
        attention_mass_launcher(
            adjacent_channels(query), arena, shape, layer, adjacent_entries(table), query_starts.contiguous(),
            scale=scale, window=window, last=last, mass=shares, row_peak=row_peak, row_total=row_total,
        )  # fmt: skip
    if shares is not mass:
        mass.copy_(shares)
