"""How much memory the KV pool takes where nobody says: one rule for the engine and for planning. Stdlib only."""

from __future__ import annotations

from typing import Final

GPU_SHARE: Final = 0.85  # of what is free once the weights are loaded; the rest is for activations
CPU_SHARE: Final = 0.25
CPU_MOST_BYTES: Final = 1 << 30  # on a CPU within reason: other programs live there


def default_pool_bytes(free_bytes: int, *, is_gpu: bool) -> int:
    """Bytes for the pool out of what is free with the weights in place."""
    if is_gpu:
        return int(free_bytes * GPU_SHARE)
    return min(CPU_MOST_BYTES, int(free_bytes * CPU_SHARE))
