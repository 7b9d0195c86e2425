"""Decode attention: one query per sequence over a block table that mixes storage formats.

Split-KV, as Flash-Decoding (Dao et al. 2023). A first kernel lists the batch's pieces (`decode_plan`), once for all
layers of a group; a second takes one piece and KV head at a time (`decode_split`), a third merges pieces by log-sum-exp
in position order (`decode_merge`). All query heads of a KV head share one program, so each key and value is loaded
once, and its storage format is asked for once per window of 32 positions: a class that a batch does not use costs
nothing.

Pieces, windows and rows depend on absolute positions and on formats only, so the result is bit-identical for the same
tiles in blocks of other sizes.

The share of attention per chunk of 16 positions is a by-product: the second kernel then also stores, per window, what
it added to the sum for each of its two chunks and under which maximum, and a fourth one relates these to the final
maximum and sum of each head.
"""

from __future__ import annotations

import torch
import triton

from kernels.layout import KVShape
from kernels.table import TableView
from kernels.triton.decode_merge import (
    MASS_CHUNKS,
    _decode_mass_kernel,
    _decode_merge_kernel,
    mass_constants,
    merge_constants,
)
from kernels.triton.decode_plan import DecodeScratch, PreparedDecode, plan_decode
from kernels.triton.decode_split import _decode_split_kernel, split_constants, split_options
from kernels.triton.launch import adjacent_channels, adjacent_entries
from kernels.triton.tiles import LOG2_E

__all__ = ["decode_attention", "decode_attention_launcher", "plan_decode"]


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
    scratch: DecodeScratch,
    programs: int,
    mass: torch.Tensor | None = None,
) -> None:
    """Launch one layer's kernels over the list that `launch_plan` wrote into ``scratch`` for this table and window.

    Allocates nothing and does not wait. Strides: as `adjacent_channels`, `adjacent_entries`. Grids depend on the
    tensors' shapes and on ``programs`` (see `decode_programs`) alone, never on what the table holds, so the launch can
    be recorded in a CUDA graph. ``scratch`` must hold as many pieces as the batch has (`most_pieces`); pieces beyond
    that are left out. ``mass``, contiguous, needs scratch of its own.
    """
    sequences, heads, _ = query.shape
    group, with_mass = heads // shape.num_kv_heads, mass is not None
    share = scratch.mass if with_mass else None
    _decode_split_kernel[(programs,)](
        query, arena, table.entries, table.num_entries, table.query_first, scratch.starts, scratch.items,
        scratch.part_peak, scratch.part_total, scratch.part_sum,
        share and share.window_peak, share and share.chunk_sum, share and share.seen,
        sequences, layer, table.entries.stride(0), window, query.stride(0), query.stride(1), scale * LOG2_E.value,
        **split_constants(shape, group, mass=with_mass), **split_options(shape),
    )  # fmt: skip
    _decode_merge_kernel[(sequences * heads,)](
        scratch.part_peak, scratch.part_total, scratch.part_sum, scratch.starts, out,
        share and share.head_peak, share and share.head_total, out.stride(0), out.stride(1),
        **merge_constants(shape, group, mass=with_mass), num_warps=4, num_stages=1,
    )  # fmt: skip
    if mass is None:
        return
    if share is None:
        raise ValueError("the share of attention needs scratch of its own")
    chunks = mass.shape[2]
    _decode_mass_kernel[(sequences * shape.num_kv_heads, triton.cdiv(chunks, MASS_CHUNKS))](
        table.num_entries, table.query_first, scratch.starts, share.head_peak, share.head_total,
        share.window_peak, share.chunk_sum, share.seen, mass, chunks, window,
        **mass_constants(shape, group), num_warps=4, num_stages=1,
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
    prepared: object = None,
) -> None:
    """Attention of one new token per sequence; see :func:`kernels.ops.decode_attention`."""
    sequences, heads, _ = query.shape
    if not sequences:
        return
    if not isinstance(prepared, PreparedDecode):
        prepared = plan_decode(table, shape, heads, query.dtype, window=window, mass=mass is not None)
    query, table, target = adjacent_channels(query), adjacent_entries(table), adjacent_channels(out)
    shares = None if mass is None else mass.contiguous()
    decode_attention_launcher(
        query, arena, shape, layer, table, scale=scale, window=window, out=target,
        scratch=prepared.scratch, programs=prepared.programs, mass=shares,
    )  # fmt: skip
    if mass is not None and shares is not None and shares is not mass:
        mass.copy_(shares)
    if target is not out:
        out.copy_(target)
