"""How fast memory is, measured. Imports torch."""

from __future__ import annotations

import time

import torch

_BYTES = 64 << 20
_TRIES = 4


def measure_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by the best of a few large copies; takes under a tenth of a second."""
    source = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    return 2 * _rate(source, torch.empty_like(source))


def measure_link(device: torch.device) -> tuple[float, float]:
    """Bytes per second from a GPU to pinned host memory, and back."""
    host = torch.zeros(_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    return _rate(on_device, host), _rate(host, on_device)


def _rate(source: torch.Tensor, target: torch.Tensor) -> float:
    best = float("inf")
    for _ in range(_TRIES):
        _synchronise(source, target)
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _synchronise(source, target)
        best = min(best, time.perf_counter() - begin)
    return _BYTES / best


def _synchronise(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)
