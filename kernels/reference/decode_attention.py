"""Reference of :func:`kernels.ops.decode_attention`."""

from __future__ import annotations

import torch

from kernels.layout import KVShape
from kernels.reference.attention import apply_weights, attention_weights, chunk_mass
from kernels.reference.gather import entry_positions, gather_kv
from kernels.table import TableView


def plan_decode(*_arguments: object, **_options: object) -> None:
    """There is nothing to prepare."""


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
    prepared: object = None,  # noqa: ARG001 - the signature is every backend's
    dtype: torch.dtype = torch.float32,
) -> None:
    """Attention of one new token per sequence, accumulated in ``dtype`` (float32 or float64).

    ``out`` and ``mass`` may be of any float dtype (tests take float64). See :func:`kernels.ops.decode_attention`.
    """
    for sequence in range(table.num_sequences):
        entries, count = table.entries[sequence], int(table.num_entries[sequence])
        key, value = gather_kv(arena, shape, layer, entries, count, native_dtype=query.dtype, dtype=dtype)
        positions = entry_positions(entries, count)
        query_position = table.query_first[sequence : sequence + 1].to(torch.int64)
        weights = attention_weights(query[sequence : sequence + 1], key, query_position, positions, scale, window)
        out[sequence] = apply_weights(weights, value)[0]
        if mass is not None:
            mass[sequence] = chunk_mass(weights, positions, shape.num_kv_heads, mass.shape[2])
