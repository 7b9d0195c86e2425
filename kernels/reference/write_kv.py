"""Reference of :func:`kernels.ops.write_kv`."""

from __future__ import annotations

import torch

from kernels.layout import NATIVE, NATIVE_TILE_TOKENS, KVShape
from kernels.reference.tiles import tile_parts, tile_view


def write_kv(
    arena: torch.Tensor, shape: KVShape, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store new tokens in native tiles, one by one; see :func:`kernels.ops.write_kv`."""
    for token, (offset, index) in enumerate(slots.tolist()):
        view = tile_view(arena, shape, NATIVE, offset, index // NATIVE_TILE_TOKENS)[layer]
        keys, values = tile_parts(view, shape, NATIVE, key.dtype)
        keys.data[:, index % NATIVE_TILE_TOKENS] = key[token]
        values.data[:, index % NATIVE_TILE_TOKENS] = value[token]
