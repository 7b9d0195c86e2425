"""Large host memory that kernels walk through, in huge pages where the system gives them.

A head's part of a tile is a few kB, and the next tile's lies megabytes away: in pages of 4 kB nearly every tile costs a
walk through the page table, which on a virtual machine takes about as long as reading the tile.
"""

from __future__ import annotations

import contextlib
import mmap

import torch


def zeroed(size: int, device: torch.device | None = None) -> torch.Tensor:
    """A uint8 tensor of ``size`` zero bytes; on the CPU (None) its memory is taken as it is touched.

    Raises RuntimeError (torch.OutOfMemoryError on a GPU) when there is not that much.
    """
    if device is not None and device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    if size == 0:
        return torch.zeros(0, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"cannot allocate {size} bytes: {error}") from error
    with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages: small ones do
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping
