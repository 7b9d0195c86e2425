"""Which KV of a running sequence is dropped: pure functions of what it keeps. No torch.

Positions never change: a key keeps the rotation of the position that it was computed at. Everything counts in *units*:
chunks of 16 tokens, or tiles of 32 where the sequence's KV is stored quantised, so that what is kept does not depend on
block sizes. Sets of chunks are masks (engine.chunks).

Window eviction is StreamingLLM's (Xiao et al. 2023): attention sinks at the start and the most recent tokens stay.
Heavy hitters (H2O, Zhang et al. 2023; SnapKV, Li et al. 2024): of what lies between, the chunks that the latest queries
attended most stay too, at the expense of part of the recent ones.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from engine.attention_mass import ChunkScores
from engine.block_table import BlockTable
from engine.chunks import chunk_mask, members, num_tokens
from engine.formats import CHUNK_TOKENS

RECENT_SHARE = 0.5  # of keep_tokens that heavy_hitter reserves for the most recent tokens


def window_eviction(num_computed: int, sinks: int, keep_tokens: int, unit_tokens: int) -> int:
    """The chunks between the sinks and the last ``keep_tokens`` computed tokens, whole units only.

    The unit of the last computed token always stays.
    """
    limit = min(num_computed - keep_tokens, num_computed - 1)
    return chunk_mask(_up(sinks, unit_tokens), limit // unit_tokens * unit_tokens)


def heavy_hitter_eviction(
    kept: int, num_computed: int, scores: ChunkScores, *, sinks: int, keep_tokens: int, recent_tokens: int, unit: int
) -> int:
    """The chunks of ``kept`` to drop so that, besides the sinks, less than a unit more than ``keep_tokens`` stays.

    Sinks, the last ``recent_tokens`` (at most ``keep_tokens``) and the unit of the last computed token stay. Of the
    others those of the lowest score go, of equal ones the older. ``unit``: tokens.
    """
    first = _up(sinks, unit)
    stop = max(first, min(num_computed - min(recent_tokens, keep_tokens), num_computed - 1) // unit * unit)
    outside = kept & chunk_mask(first, -(-num_computed // CHUNK_TOKENS) * CHUNK_TOKENS)
    excess = num_tokens(outside) - (-num_computed % CHUNK_TOKENS) - keep_tokens
    candidates = outside & chunk_mask(first, stop)
    if excess < CHUNK_TOKENS or not candidates:
        return 0
    chunks = np.array(members(candidates))
    units, inverse = np.unique(chunks // (unit // CHUNK_TOKENS), return_inverse=True)
    best = np.zeros(len(units), np.float32)
    np.maximum.at(best, inverse, scores.of(int(chunks[-1]) + 1)[chunks])
    sizes = np.bincount(inverse) * CHUNK_TOKENS
    rank = np.empty(len(units), int)
    going = np.zeros(len(units), bool)
    rank = np.lexsort((units, best))
    for index in rank:
        if sizes[index] > excess:
            break
        going[index] = True
        excess -= int(sizes[index])
    dropped = 0
    for chunk in chunks[going[inverse]].tolist():
        dropped |= 1 << chunk
    return dropped


def outside_window(table: BlockTable, num_computed: int, window: int) -> tuple[int, int]:
    """Blocks [start, stop) that the model's own window will never attend again.

    The next token is at position ``num_computed`` and attends positions > num_computed - window (it counts itself).
    """
    return 0, min(bisect_right(table.stops, num_computed - window + 1), max(0, len(table.blocks) - 1))


def _up(position: int, unit_tokens: int) -> int:
    return -(-position // unit_tokens) * unit_tokens
