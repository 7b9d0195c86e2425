"""Where every byte of the KV arena lies. No torch: bookkeeping, memory model and kernels all read this one file.

An *arena* is a flat array of bytes that belongs to one layer group (layers of equal KV shape). A *block* starts at a
multiple of 256 bytes and is a run of *tiles*; each tile holds all layers of the group:

    address = offset * 256 + tile * tile_stride + layer * tile_bytes + kv_head * head_bytes + part

so that merging or splitting blocks of one format copies whole tiles, and the block size changes no address inside a
tile. Native tiles hold 16 tokens, quantised ones 32. Within one head's part of a tile:

    native     K [16, head_dim]                 V [16, head_dim]                in the native dtype
    quantised  K codes [32, head_dim]  K scale [head_dim]  K zero [head_dim]
               V codes [32, head_dim]  V scale [32]        V zero [32]

Codes are unsigned; ``value = zero + scale * code``. Keys share scale and zero per channel over the tile, values per
token over the head (the KIVI layout, Liu et al. 2024). Scale and zero are in the native dtype, so ``zero`` (the
minimum) is exact; the scale is rounded up, so the maximum stays covered. 8-bit codes take a byte. 4-bit codes pack
channel ``d`` in the low and channel ``d + head_dim / 2`` in the high nibble of byte ``d``.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.formats import declared_formats
from kernels.formats.base import NATIVE_TILE_TOKENS, QUANT_TILE_TOKENS, KVFormat

__all__ = [
    "BLOCK_SIZES",
    "CHUNK_TOKENS",
    "ENTRY_FIRST",
    "ENTRY_FORMAT",
    "ENTRY_OFFSET",
    "ENTRY_VALID",
    "ENTRY_WIDTH",
    "FORMATS",
    "FORMAT_BY_NAME",
    "INT4",
    "INT8",
    "JOB_DST_FORMAT",
    "JOB_DST_OFFSET",
    "JOB_DST_TILE",
    "JOB_SRC2_OFFSET",
    "JOB_SRC2_TILE",
    "JOB_SRC_FORMAT",
    "JOB_SRC_OFFSET",
    "JOB_SRC_TILE",
    "JOB_WIDTH",
    "K8V4",
    "NATIVE",
    "NATIVE_TILE_TOKENS",
    "OFFSET_UNIT",
    "QUANT_TILE_TOKENS",
    "HeadLayout",
    "KVFormat",
    "KVShape",
]

OFFSET_UNIT = 256
BLOCK_SIZES = (16, 32, 64, 128, 256)
# Positions whose share of attention is reported together: chunk c is positions 16 c .. 16 c + 15. Every block starts at
# a multiple of it and is valid for a multiple of it (but for a sequence's last), so no chunk lies in two entries.
CHUNK_TOKENS = NATIVE_TILE_TOKENS

# Columns of a block-table entry as kernels see it: int32 [sequences, max_entries, 4].
ENTRY_OFFSET, ENTRY_FORMAT, ENTRY_FIRST, ENTRY_VALID = range(4)
ENTRY_WIDTH = 4

# Columns of a recode job: int32 [jobs, 8], one row per destination tile, all layers of the group.
# The second source is used only when two native tiles make one quantised tile; it is -1 otherwise.
JOB_DST_FORMAT, JOB_DST_OFFSET, JOB_DST_TILE, JOB_SRC_FORMAT = 0, 1, 2, 3
JOB_SRC_OFFSET, JOB_SRC_TILE, JOB_SRC2_OFFSET, JOB_SRC2_TILE = 4, 5, 6, 7
JOB_WIDTH = 8


# Formats have a file each. Their order is that of their loss, and a format's code is its place.
FORMATS = declared_formats()
FORMAT_BY_NAME = {kv_format.name: kv_format for kv_format in FORMATS}
NATIVE, INT8, K8V4, INT4 = (FORMAT_BY_NAME[name] for name in ("native", "int8", "k8v4", "int4"))


@dataclass(frozen=True)
class HeadLayout:
    """Byte offsets inside one kv head's part of one tile; absent parts (native scales) are 0."""

    k: int
    k_scale: int
    k_zero: int
    v: int
    v_scale: int
    v_zero: int
    size: int


@dataclass(frozen=True)
class KVShape:
    """KV shape of a layer group. ``element_bytes``: size of the native dtype (2 or 4)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.num_kv_heads < 1:
            raise ValueError(f"a layer group needs layers and KV heads, got {self}")
        if self.head_dim < 8 or self.head_dim % 8:
            raise ValueError(f"head_dim must be a positive multiple of 8, got {self.head_dim}")
        if self.element_bytes not in (2, 4):
            raise ValueError(f"native dtype must have 2 or 4 bytes, got {self.element_bytes}")

    def head_layout(self, kv_format: KVFormat) -> HeadLayout:
        tokens, dim, element = kv_format.tile_tokens, self.head_dim, self.element_bytes
        if kv_format.is_native:
            part = tokens * dim * element
            return HeadLayout(k=0, k_scale=0, k_zero=0, v=part, v_scale=0, v_zero=0, size=2 * part)
        k_scale = tokens * dim * kv_format.bits_k // 8
        k_zero = k_scale + dim * element
        v = k_zero + dim * element
        v_scale = v + tokens * dim * kv_format.bits_v // 8
        v_zero = v_scale + tokens * element
        return HeadLayout(
            k=0, k_scale=k_scale, k_zero=k_zero, v=v, v_scale=v_scale, v_zero=v_zero, size=v_zero + tokens * element
        )

    def head_bytes(self, kv_format: KVFormat) -> int:
        return self.head_layout(kv_format).size

    def tile_bytes(self, kv_format: KVFormat) -> int:
        """Bytes of one layer's share of one tile."""
        return self.num_kv_heads * self.head_bytes(kv_format)

    def tile_stride(self, kv_format: KVFormat) -> int:
        """Bytes from one tile of a block to the next: all layers of the group."""
        return self.num_layers * self.tile_bytes(kv_format)

    def block_bytes(self, kv_format: KVFormat, block_size: int) -> int:
        """Bytes of one block of ``block_size`` tokens, a multiple of 256.

        Raises ValueError when the size is not offered, or not a whole number of tiles.
        """
        if block_size not in BLOCK_SIZES or block_size % kv_format.tile_tokens:
            raise ValueError(f"no {kv_format.name} block of {block_size} tokens; offered: {BLOCK_SIZES}")
        size = block_size // kv_format.tile_tokens * self.tile_stride(kv_format)
        return -(-size // OFFSET_UNIT) * OFFSET_UNIT
