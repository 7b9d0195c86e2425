"""Room that streamed tiles take in the device's memory. No torch: bookkeeping and executor both ask here."""

from __future__ import annotations

from collections.abc import Sequence

from engine.formats import OFFSET_UNIT, KVFormat, KVShape

STAGING_PART = 16  # that part of the pool is for streaming from the host, if there is a host pool


def stream_slot_bytes(shape: KVShape, kv_format: KVFormat) -> int:
    """Bytes of buffer for one layer's share of a tile, which starts up to 255 bytes into its slot."""
    return -(-shape.tile_bytes(kv_format) // OFFSET_UNIT) * OFFSET_UNIT + OFFSET_UNIT


def stream_buffers(slab_bytes: Sequence[int], staging_bytes: int) -> tuple[int, ...]:
    """Size of each of the two buffers of every group, out of ``staging_bytes`` in all, in proportion to its slabs."""
    total = sum(slab_bytes)
    return tuple(staging_bytes * size // total // 2 // OFFSET_UNIT * OFFSET_UNIT for size in slab_bytes)
