"""Reference of :func:`kernels.ops.decode_attention`."""

from __future__ import annotations

import torch

from kernels.layout import KVShape
from kernels.reference.attention import dense_attention
from kernels.reference.gather import entry_positions, gather_kv
from kernels.table import TableView


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
    dtype: torch.dtype = torch.float32,
) -> None:
    """Attention of one new token per sequence, accumulated in ``dtype`` (float32 or float64).

    ``out`` may be of any float dtype (tests take float64). See :func:`kernels.ops.decode_attention`.
    """
    for sequence in range(table.num_sequences):
        entries, count = table.entries[sequence], int(table.num_entries[sequence])
        key, value = gather_kv(arena, shape, layer, entries, count, native_dtype=query.dtype, dtype=dtype)
        out[sequence] = dense_attention(
            query[sequence : sequence + 1],
            key,
            value,
            table.query_first[sequence : sequence + 1].to(torch.int64),
            entry_positions(entries, count),
            scale,
            window,
        )[0]
