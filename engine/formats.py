"""Block classes for bookkeeping: what a block is cut for. Binds kernels.layout; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from kernels.layout import (
    BLOCK_SIZES,
    FORMAT_BY_NAME,
    FORMATS,
    NATIVE,
    NATIVE_TILE_TOKENS,
    OFFSET_UNIT,
    QUANT_TILE_TOKENS,
    KVFormat,
    KVShape,
)

__all__ = [
    "BLOCK_SIZES",
    "CHUNK_TOKENS",
    "FORMATS",
    "FORMAT_BY_NAME",
    "NATIVE",
    "NATIVE_CLASSES",
    "NATIVE_TILE_TOKENS",
    "OFFSET_UNIT",
    "QUANT_TILE_TOKENS",
    "BlockClass",
    "KVFormat",
    "KVShape",
    "class_for",
    "lossiness_of",
    "parse_block_size",
    "part_size",
]

CHUNK_TOKENS = NATIVE_TILE_TOKENS  # prefix hashes, block starts and evictions all count in these
_PARTS = 4  # native blocks that make one quantised block, where it is that large


_LOSSIEST = max(kind.lossiness for kind in FORMATS)


class BlockClass(NamedTuple):
    """(format, block size). ``kv_format`` is the format's *name*, so that classes compare, hash and copy as values."""

    kv_format: str
    block_size: int

    @property
    def format(self) -> KVFormat:
        return FORMAT_BY_NAME[self.kv_format]

    @property
    def lossiness(self) -> int:
        return FORMAT_BY_NAME[self.kv_format].lossiness


NATIVE_CLASSES: Final[Mapping[int, BlockClass]] = {size: BlockClass(NATIVE.name, size) for size in BLOCK_SIZES}


def parse_block_size(block_size: object) -> int:
    """``block_size`` if it is offered; raises ValueError with the list of those that are."""
    for size in BLOCK_SIZES:
        if not isinstance(block_size, bool) and block_size == size:
            return size
    raise ValueError(f"block_size {block_size!r} is not offered; choose one of {', '.join(map(str, BLOCK_SIZES))}")


def class_for(kv_format: str, block_size: int) -> BlockClass:
    """The class that blocks take under these settings: quantised blocks have at least one tile of 32 tokens.

    Raises ValueError naming the allowed values for an unknown format or size.
    """
    if kv_format not in FORMAT_BY_NAME:
        raise ValueError(f"kv_format {kv_format!r} is not offered; choose one of {', '.join(FORMAT_BY_NAME)}")
    return BlockClass(kv_format, max(parse_block_size(block_size), FORMAT_BY_NAME[kv_format].tile_tokens))


def lossiness_of(kv_format: str | None) -> int:
    """Order of a format by name, 0 for native. None (no floor) is the lossiest offered."""
    if kv_format is None:
        return _LOSSIEST
    if kv_format not in FORMAT_BY_NAME:
        raise ValueError(f"kv_format {kv_format!r} is not offered; choose one of {', '.join(FORMAT_BY_NAME)}")
    return FORMAT_BY_NAME[kv_format].lossiness


def part_size(block_size: int) -> int:
    """Size of the native blocks that new tokens go to where they will be quantised later.

    A quarter of a block, so that what is old of a block that is not full need not wait for the rest.
    """
    return max(CHUNK_TOKENS, block_size // _PARTS)
