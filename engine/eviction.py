"""Which blocks of a running sequence are dropped: pure functions of its table. No torch.

Only whole blocks go, positions never change: a key keeps the rotation of the position that it was computed at.
Window eviction is StreamingLLM's (Xiao et al. 2023): attention sinks at the start and the most recent tokens stay.
"""

from __future__ import annotations

from bisect import bisect_right

from engine.block_table import BlockTable


def window_eviction(table: BlockTable, num_computed: int, sinks: int, keep_tokens: int) -> tuple[int, int]:
    """Entries [start, stop) whose blocks lie wholly after the sinks and wholly before the last ``keep_tokens``.

    The last ``keep_tokens`` computed tokens stay, and so does the block that the next token goes to.
    """
    return table.index_from(sinks), _index_ended(table, num_computed - keep_tokens)


def outside_window(table: BlockTable, num_computed: int, window: int) -> tuple[int, int]:
    """Entries [start, stop) that the model's own window will never attend again.

    The next token is at position ``num_computed`` and attends positions > num_computed - window (it counts itself).
    """
    return 0, _index_ended(table, num_computed - window + 1)


def _index_ended(table: BlockTable, limit: int) -> int:
    """Number of leading entries that end at or before ``limit``, never all of them."""
    return min(bisect_right(table.stops, limit), max(0, len(table.blocks) - 1))
