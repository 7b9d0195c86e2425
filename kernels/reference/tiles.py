"""Tiles as tensors: views of the arena's bytes, and reading and writing whole tiles, in pure torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.layout import OFFSET_UNIT, KVFormat, KVShape
from kernels.reference.quantise import dequantise, pack_nibbles, quantise, unpack_nibbles


def native_dtype_of(shape: KVShape, native_dtype: torch.dtype | None) -> torch.dtype:
    """The arena's native dtype; may be left out only where the element size tells it (float32).

    Raises ValueError when it is unknown or does not fit ``shape.element_bytes``.
    """
    if native_dtype is None:
        if shape.element_bytes != torch.float32.itemsize:
            raise ValueError("native_dtype is needed: 2-byte elements may be bfloat16 or float16")
        return torch.float32
    if native_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"native dtype must be float32, bfloat16 or float16, got {native_dtype}")
    if native_dtype.itemsize != shape.element_bytes:
        raise ValueError(f"{native_dtype} does not have the {shape.element_bytes} bytes of the arena's elements")
    return native_dtype


def tile_view(arena: torch.Tensor, shape: KVShape, kv_format: KVFormat, offset: int, tile: int) -> torch.Tensor:
    """Bytes of one tile as a view, uint8 [layers, kv_heads, head_bytes]. ``offset`` in units of 256 bytes."""
    stride = shape.tile_stride(kv_format)
    start = offset * OFFSET_UNIT + tile * stride
    return arena[start : start + stride].view(shape.num_layers, shape.num_kv_heads, shape.head_bytes(kv_format))


@dataclass(frozen=True)
class Part:
    """The keys or the values of (a selection of) tiles as typed views; leading dimensions are kept.

    ``data``: native [..., tokens, head_dim] if ``bits`` is 0, else code bytes [..., tokens, head_dim * bits / 8].
    ``scale``/``zero``: keys [..., 1, head_dim], values [..., tokens, 1]; empty if ``bits`` is 0.
    """

    bits: int
    data: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    def read(self, valid: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The first ``valid`` tokens dequantised, [..., valid, head_dim] of ``dtype``."""
        data = self.data[..., :valid, :]
        if self.bits == 0:
            return data.to(dtype)
        codes = unpack_nibbles(data) if self.bits == 4 else data
        # Narrowing is a no-op on the single row of per-channel constants.
        return dequantise(codes, self.scale[..., :valid, :], self.zero[..., :valid, :], dtype)

    def quantise(self, values: torch.Tensor) -> None:
        """Store float32 ``values`` [..., 32, head_dim]; the groups follow from the shape of ``scale``."""
        group_dim = -2 if self.scale.shape[-2] == 1 else -1
        codes, scale, zero = quantise(values, self.bits, group_dim, self.scale.dtype)
        self.data.copy_(pack_nibbles(codes) if self.bits == 4 else codes)
        self.scale.copy_(scale)
        self.zero.copy_(zero)

    def copy_from(self, other: Part) -> None:
        """Take codes and constants of a part with the same number of bits, bit for bit."""
        self.data.copy_(other.data)
        self.scale.copy_(other.scale)
        self.zero.copy_(other.zero)


def tile_parts(tile: torch.Tensor, shape: KVShape, kv_format: KVFormat, native_dtype: torch.dtype) -> tuple[Part, Part]:
    """Cut tile bytes [..., head_bytes] into keys and values, without copying."""
    layout, tokens, dim = shape.head_layout(kv_format), kv_format.tile_tokens, shape.head_dim

    def cut(start: int, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
        flat = tile[..., start : start + rows * columns * dtype.itemsize].view(dtype)
        return flat.view(*tile.shape[:-1], rows, columns)

    if kv_format.is_native:
        empty = tile[..., :0].view(native_dtype)
        return (
            Part(0, cut(layout.k, native_dtype, tokens, dim), empty, empty),
            Part(0, cut(layout.v, native_dtype, tokens, dim), empty, empty),
        )
    key = Part(
        kv_format.bits_k,
        cut(layout.k, torch.uint8, tokens, dim * kv_format.bits_k // 8),
        cut(layout.k_scale, native_dtype, 1, dim),
        cut(layout.k_zero, native_dtype, 1, dim),
    )
    value = Part(
        kv_format.bits_v,
        cut(layout.v, torch.uint8, tokens, dim * kv_format.bits_v // 8),
        cut(layout.v_scale, native_dtype, tokens, 1),
        cut(layout.v_zero, native_dtype, tokens, 1),
    )
    return key, value
