"""Stored tokens of one sequence, dequantised into dense arrays: for prefill's matrix products, and for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kernels.cpu.compile import entry, source_stamp
from kernels.cpu.lowlevel import load, store
from kernels.cpu.tiles import (
    HEAD_BYTES,
    TILE_BYTES,
    TILE_STRIDE,
    TILE_TOKENS,
    elements_of,
    layout_array,
    read_keys,
    read_values,
)
from kernels.layout import (
    ENTRY_FIRST,
    ENTRY_FORMAT,
    ENTRY_OFFSET,
    ENTRY_VALID,
    OFFSET_UNIT,
    QUANT_TILE_TOKENS,
    KVShape,
)
from kernels.reference.tiles import native_dtype_of


def _build(stamp: int) -> Callable[..., None]:
    @entry()
    def gather_heads(
        arena: Any, where: Any, heads: Any, entries: Any, low: Any, head_dim: Any, keys: Any, values: Any
    ) -> None:
        _ = stamp
        layout, layer, first_head = where
        scratch = np.empty(QUANT_TILE_TOKENS * head_dim, dtype=np.float32)
        place = 0
        for head in range(first_head, first_head + heads):
            for index in range(entries.shape[0]):
                form = layout[entries[index, ENTRY_FORMAT]]
                tokens = form[TILE_TOKENS]
                block = np.int64(entries[index, ENTRY_OFFSET]) * OFFSET_UNIT
                block += layer * form[TILE_BYTES] + head * form[HEAD_BYTES]
                first, valid = np.int64(entries[index, ENTRY_FIRST]), np.int64(entries[index, ENTRY_VALID])
                for done in range(0, valid, tokens):
                    rows = min(tokens, valid - done)
                    skip = max(low - first - done, 0)
                    if skip >= rows:
                        continue
                    tile = block + done // tokens * form[TILE_STRIDE]
                    kept = (rows - skip) * head_dim
                    read_keys(arena, form, tile, rows, head_dim, scratch, 0)
                    for i in range(kept):
                        store(keys, place + i, load(scratch, skip * head_dim + i))
                    if values.shape[0] > 0:
                        read_values(arena, form, tile, rows, head_dim, scratch, 0)
                        for i in range(kept):
                            store(values, place + i, load(scratch, skip * head_dim + i))
                    place += kept

    return gather_heads


# Tokens at positions >= low of one sequence into keys and values, flat float32 [heads, tokens, head_dim]; no
# values at all: they are not wanted.
#   arena (bytes, native elements) - where (layout_array, layer, first head) - entries int32 [n, 4]
_gather_heads = _build(source_stamp())


def gather_heads(
    arena: torch.Tensor,
    shape: KVShape,
    native_dtype: torch.dtype,
    layer: int,
    heads: range,
    entries: torch.Tensor,
    low: int,
    tokens: int,
    *,
    with_values: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, float32 [heads, tokens, head_dim], of the ``tokens`` stored positions >= ``low``.

    Without values, the second one is empty.
    """
    key = torch.empty((len(heads), tokens, shape.head_dim), dtype=torch.float32)
    value = torch.empty_like(key) if with_values else key.new_empty(0)
    _gather_heads(
        (arena.numpy(), elements_of(arena, native_dtype)),
        (layout_array(shape), layer, heads.start),
        len(heads),
        entries.contiguous().numpy(),
        low,
        shape.head_dim,
        key.view(-1).numpy(),
        value.view(-1).numpy(),
    )
    return key, value


def stored_positions(entries: torch.Tensor, low: int) -> torch.Tensor:
    """Positions >= low of the tokens that entries [n, 4] hold, int64, ascending."""
    rows = entries.numpy().astype(np.int64)
    valid = rows[:, ENTRY_VALID]
    starts = np.cumsum(valid) - valid
    positions = np.repeat(rows[:, ENTRY_FIRST] - starts, valid) + np.arange(int(valid.sum()))
    return torch.from_numpy(positions[positions >= low])


def gather_kv(
    arena: torch.Tensor,
    shape: KVShape,
    layer: int,
    entries: torch.Tensor,
    num_entries: int,
    *,
    native_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`kernels.ops.gather_kv`."""
    element = native_dtype_of(shape, native_dtype)
    rows = entries[:num_entries]
    tokens = int(rows[:, ENTRY_VALID].sum())
    key, value = gather_heads(arena, shape, element, layer, range(shape.num_kv_heads), rows, 0, tokens)
    return key.transpose(0, 1).contiguous(), value.transpose(0, 1).contiguous()
