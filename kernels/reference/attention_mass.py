"""Reference of :func:`kernels.ops.attention_mass`."""

from __future__ import annotations

import itertools

import torch

from kernels.layout import KVShape
from kernels.reference.attention import attention_weights, chunk_mass
from kernels.reference.gather import entry_positions, gather_kv
from kernels.table import TableView


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
    dtype: torch.dtype = torch.float32,
) -> None:
    """Share of attention of each sequence's last queries per chunk of 16 positions, accumulated in ``dtype``.

    ``mass`` may be of any float dtype (tests take float64). See :func:`kernels.ops.attention_mass`.
    """
    for sequence, (start, stop) in enumerate(itertools.pairwise(query_starts.tolist())):
        entries, count = table.entries[sequence], int(table.num_entries[sequence])
        key, _ = gather_kv(arena, shape, layer, entries, count, native_dtype=query.dtype, dtype=dtype)
        positions = entry_positions(entries, count)
        begin = max(start, stop - last)
        queries = int(table.query_first[sequence]) + torch.arange(begin - start, stop - start, device=query.device)
        weights = attention_weights(query[begin:stop], key, queries, positions, scale, window)
        mass[sequence] = chunk_mass(weights, positions, shape.num_kv_heads, mass.shape[2])
