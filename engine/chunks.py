"""Sets of chunks of 16 tokens as integers: bit c stands for positions 16 c .. 16 c + 15. No torch."""

from __future__ import annotations

from engine.formats import CHUNK_TOKENS


def chunk_mask(start: int, stop: int) -> int:
    """The chunks of positions ``start .. stop``, both multiples of 16; 0 for an empty range."""
    return ((1 << max(0, stop - start) // CHUNK_TOKENS) - 1) << start // CHUNK_TOKENS


def num_tokens(chunks: int) -> int:
    """How many positions a set covers."""
    return chunks.bit_count() * CHUNK_TOKENS


def first_position(chunks: int) -> int:
    """The lowest position of a set that is not empty."""
    return ((chunks & -chunks).bit_length() - 1) * CHUNK_TOKENS


def end_position(chunks: int) -> int:
    """One past the highest position of a set; 0 for an empty one."""
    return chunks.bit_length() * CHUNK_TOKENS


def members(chunks: int) -> list[int]:
    """The chunks' numbers in order."""
    found = []
    while chunks:
        found.append((chunks & -chunks).bit_length() - 1)
        chunks &= chunks - 1
    return found


def whole_tiles(chunks: int, tile_tokens: int) -> int:
    """A set enlarged to whole aligned tiles (of 16 or 32 tokens)."""
    if tile_tokens == CHUNK_TOKENS:
        return chunks
    even = ((1 << 2 * ((chunks.bit_length() + 1) // 2)) - 1) // 3  # bits 0, 2, 4 ..
    first = (chunks | chunks >> 1) & even
    return first | first << 1


def runs_of(chunks: int, tile_tokens: int = CHUNK_TOKENS) -> list[tuple[int, int]]:
    """(start, stop) of the unbroken runs of positions of a set, enlarged to whole tiles."""
    chunks = whole_tiles(chunks, tile_tokens)
    found = []
    while chunks:
        low = (chunks & -chunks).bit_length() - 1
        length = (~(chunks >> low) & -~(chunks >> low)).bit_length() - 1
        found.append((low * CHUNK_TOKENS, (low + length) * CHUNK_TOKENS))
        chunks &= ~(((1 << length) - 1) << low)
    return found
