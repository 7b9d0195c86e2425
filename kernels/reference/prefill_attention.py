"""Reference of :func:`kernels.ops.prefill_attention`."""

from __future__ import annotations

import itertools

import torch

from kernels.layout import KVShape
from kernels.reference.attention import apply_weights, attention_weights
from kernels.reference.gather import entry_positions, gather_kv
from kernels.table import TableView


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
    dtype: torch.dtype = torch.float32,
) -> None:
    """Causal attention of each sequence's new tokens, accumulated in ``dtype`` (float32 or float64).

    Memory is quadratic: for tests. See :func:`kernels.ops.prefill_attention`.
    """
    starts = query_starts.tolist()
    for sequence, (start, stop) in enumerate(itertools.pairwise(starts)):
        entries, count = table.entries[sequence], int(table.num_entries[sequence])
        key, value = gather_kv(arena, shape, layer, entries, count, native_dtype=query.dtype, dtype=dtype)
        positions = int(table.query_first[sequence]) + torch.arange(stop - start, device=query.device)
        stored = entry_positions(entries, count)
        weights = attention_weights(query[start:stop], key, positions, stored, scale, window)
        out[start:stop] = apply_weights(weights, value)
