"""Reference of :func:`kernels.ops.gather_kv`, and the positions of what it gathers."""

from __future__ import annotations

import torch

from kernels.layout import ENTRY_FIRST, ENTRY_FORMAT, ENTRY_OFFSET, ENTRY_VALID, FORMATS, KVShape
from kernels.reference.tiles import native_dtype_of, tile_parts, tile_view


def gather_kv(
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    entries: torch.Tensor,
    num_entries: int,
    *,
    native_dtype: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one sequence in position order, each [tokens, kv_heads, head_dim] of ``dtype``.

    ``entries``: int32 [>= num_entries, 4]. See :func:`kernels.ops.gather_kv`.
    """
    element = native_dtype_of(shape, native_dtype)
    keys = [arena.new_empty((0, shape.num_kv_heads, shape.head_dim), dtype=dtype)]
    values = [keys[0]]
    for row in entries[:num_entries].tolist():
        kv_format = FORMATS[row[ENTRY_FORMAT]]
        tokens = kv_format.tile_tokens
        for tile, start in enumerate(range(0, row[ENTRY_VALID], tokens)):
            view = tile_view(arena, shape, kv_format, row[ENTRY_OFFSET], tile)[layer]
            valid = min(tokens, row[ENTRY_VALID] - start)
            key, value = tile_parts(view, shape, kv_format, element)
            keys.append(key.read(valid, dtype).transpose(0, 1))
            values.append(value.read(valid, dtype).transpose(0, 1))
    return torch.cat(keys), torch.cat(values)


def entry_positions(entries: torch.Tensor, num_entries: int) -> torch.Tensor:
    """Absolute positions of a sequence's stored tokens, int64 [tokens], on the entries' device."""
    rows = entries[:num_entries].tolist()
    runs = [torch.arange(row[ENTRY_FIRST], row[ENTRY_FIRST] + row[ENTRY_VALID]) for row in rows]
    return torch.cat([torch.empty(0, dtype=torch.int64), *runs]).to(entries.device)
