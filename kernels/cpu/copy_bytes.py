"""Runs of bytes from one tensor to another: one ``memmove`` each, without a trip to Python in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.cpu.compile import entry, source_stamp
from kernels.cpu.lowlevel import move_bytes


def _build(stamp: int) -> Callable[..., None]:
    @entry()
    def copy_rows(source: Any, target: Any, rows: Any) -> None:
        _ = stamp
        for row in range(rows.shape[0]):
            move_bytes(target, rows[row, 1], source, rows[row, 0], rows[row, 2])

    return copy_rows


# source, target: uint8; rows int64 [rows, 3] (source byte, target byte, number of bytes).
_copy_rows = _build(source_stamp())


def copy_bytes(source: torch.Tensor, target: torch.Tensor, rows: torch.Tensor) -> None:
    """See :func:`kernels.ops.copy_bytes`."""
    _copy_rows(source.numpy(), target.numpy(), rows.contiguous().numpy())
