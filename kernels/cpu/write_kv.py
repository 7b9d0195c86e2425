"""New tokens into native tiles. Elements are copied as bits: one specialisation per element size would do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.cpu.compile import entry, source_stamp
from kernels.cpu.tiles import HEAD_BYTES, K_CODES, TILE_BYTES, TILE_STRIDE, V_CODES, elements_of, layout_array
from kernels.layout import NATIVE, NATIVE_TILE_TOKENS, OFFSET_UNIT, KVShape


def _build(stamp: int) -> Callable[..., None]:
    @entry()
    def write_tokens(elements: Any, form: Any, layer: Any, key: Any, value: Any, slots: Any) -> None:
        _ = stamp
        tokens, heads, head_dim = key.shape
        size = elements.itemsize
        for token in range(tokens):
            index = slots[token, 1]
            tile = slots[token, 0] * OFFSET_UNIT + index // NATIVE_TILE_TOKENS * form[TILE_STRIDE]
            for head in range(heads):
                start = (tile + layer * form[TILE_BYTES] + head * form[HEAD_BYTES]) // size
                row = index % NATIVE_TILE_TOKENS * head_dim
                k, v = start + form[K_CODES] // size + row, start + form[V_CODES] // size + row
                elements[k : k + head_dim] = key[token, head]
                elements[v : v + head_dim] = value[token, head]

    return write_tokens


# elements: native view of the arena; form: layout row of the native format; key, value [tokens, kv_heads, head_dim]
# as the same bits; slots int32 [tokens, 2].
_write_tokens = _build(source_stamp())


def write_kv(
    arena: torch.Tensor, shape: KVShape, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """See :func:`kernels.ops.write_kv`."""
    _write_tokens(
        elements_of(arena, key.dtype),
        layout_array(shape)[NATIVE.code],
        layer,
        elements_of(key.contiguous(), key.dtype),
        elements_of(value.contiguous(), key.dtype),
        slots.contiguous().numpy(),
    )
