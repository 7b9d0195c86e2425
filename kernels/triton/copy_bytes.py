# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"
# ruff: noqa: ANN001, ANN202 - device code: types are Triton's, given by the arguments
"""Runs of bytes between device tensors, or a device tensor and pinned host memory, on the current stream.

Pinned host memory has a device address, so the kernel reads or writes it over the bus by itself: one launch for any
number of runs, where copies by the driver would take one each. A few programs saturate the bus and leave the card to
others. Host memory that is not pinned has no such address; it is packed into one staging buffer and copied whole.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.backend import select_backend
from kernels.triton.tiles import INTERPRETED

_PARTS = 4  # programs per row
_BLOCK = 8192  # bytes in flight per program


@triton.jit
def _copy_words(source, target, words, WORD: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    origin = source.to(tl.pointer_type(WORD))
    destination = target.to(tl.pointer_type(WORD))
    done = tl.program_id(1).to(tl.int64) * BLOCK
    while done < words:
        mask = done + lane < words
        tl.store(destination + done + lane, tl.load(origin + done + lane, mask=mask), mask=mask)
        done += PARTS * BLOCK


@triton.jit
def _copy_bytes_kernel(source, target, rows, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    row = rows + tl.program_id(0).to(tl.int64) * 3
    origin = source + tl.load(row)
    destination = target + tl.load(row + 1)
    size = tl.load(row + 2)
    if (origin.to(tl.int64) | destination.to(tl.int64) | size) % 16 == 0:
        # Only told so does the compiler move 16 bytes per instruction.
        origin = tl.multiple_of(origin, 16)
        destination = tl.multiple_of(destination, 16)
        words = tl.multiple_of(size // 8, 2)
        _copy_words(origin, destination, words, tl.int64, BLOCK // 8, PARTS)
    else:
        # (Another number of words than above: with the same one, both loops get one layout, and a shuffle.)
        _copy_words(origin, destination, size // 2, tl.int16, BLOCK // 16, PARTS)


def copy_constants() -> dict[str, int]:
    """Compile-time constants (also for ahead-of-time compilation)."""
    return {"BLOCK": _BLOCK, "PARTS": _PARTS}


def copy_bytes_launcher(source: torch.Tensor, target: torch.Tensor, rows: torch.Tensor) -> None:
    """Launch the kernel; allocates nothing and does not wait. All three where the device reaches them."""
    _copy_bytes_kernel[(rows.shape[0], _PARTS)](source, target, rows, **copy_constants(), num_warps=4, num_stages=1)


def copy_bytes(source: torch.Tensor, target: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy runs of bytes; see :func:`kernels.ops.copy_bytes`."""
    if not rows.shape[0]:
        return
    if not _reachable(source):
        _copy_from_pageable(source, target, rows)
    elif not _reachable(target):
        _copy_to_pageable(source, target, rows)
    else:
        device = target.device if target.is_cuda else source.device
        copy_bytes_launcher(source, target, _on_device(rows, device))


def _reachable(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda or INTERPRETED.value or tensor.is_pinned()


def _on_device(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The rows on the device. From pinned memory, which torch keeps until the copy is over, nothing waits."""
    rows = rows.contiguous()
    if device.type == "cpu" or rows.is_cuda:
        return rows
    return rows.pin_memory().to(device, non_blocking=True)


def _packed(rows: torch.Tensor, column: int) -> tuple[torch.Tensor, int]:
    """Rows whose given column points into one buffer that holds all of them one after the other, and its size."""
    ends = rows[:, 2].cumsum(0)
    packed = rows.clone()
    packed[:, column] = ends - rows[:, 2]
    return packed, int(ends[-1])


def _copy_from_pageable(source: torch.Tensor, target: torch.Tensor, rows: torch.Tensor) -> None:
    host_rows = rows.cpu()
    pack, size = _packed(host_rows, 1)
    unpack, _ = _packed(host_rows, 0)
    staging = torch.empty(size, dtype=torch.uint8)
    select_backend(staging.device).copy_bytes(source, staging, pack)
    copy_bytes_launcher(staging.to(target.device), target, _on_device(unpack, target.device))


def _copy_to_pageable(source: torch.Tensor, target: torch.Tensor, rows: torch.Tensor) -> None:
    host_rows = rows.cpu()
    pack, size = _packed(host_rows, 1)
    unpack, _ = _packed(host_rows, 0)
    staging = torch.empty(size, dtype=torch.uint8, device=source.device)
    copy_bytes_launcher(source, staging, _on_device(pack, source.device))
    select_backend(target.device).copy_bytes(staging.cpu(), target, unpack)
