"""Which parts of a block anybody needs: sequences keep chunks of it, cached prefixes name chunks of it. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from engine.block_table import BlockTable
from engine.chunks import chunk_mask, whole_tiles
from engine.formats import CHUNK_TOKENS
from engine.pool_block import Block


def kept_chunks(block: Block, tables: Sequence[BlockTable]) -> int:
    """The chunks of a block that any of its holders, whose tables these are, keeps."""
    kept = 0
    for table in tables:
        kept |= table.kept(table.index_from(block.first))
    return kept


def named_chunks(block: Block) -> int:
    """The chunks of a block that the prefix cache names."""
    return sum(1 << position // CHUNK_TOKENS for position in block.nodes)


def wants_split(block: Block, tables: Sequence[BlockTable]) -> bool:
    """Whether a holder has dropped part of a sealed block, and some tile of it is kept by none of them.

    A block that another holder keeps whole stays whole: a copy of the rest would take memory, not give it.
    """
    whole = chunk_mask(block.first, block.end)
    if not block.is_sealed or not any(table.hidden & whole for table in tables):
        return False
    return whole_tiles(kept_chunks(block, tables), block.block_class.format.tile_tokens) != whole
