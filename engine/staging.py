"""One host buffer per step, cut into int32 arrays and sent to the device in a single copy."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32 = npt.NDArray[np.int32]


class StagingBuffer:
    """On CUDA the buffer is pinned and copied without waiting; on CPU the arrays themselves are the tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._buffer = torch.empty(0, dtype=torch.int32)
        self._bounds: list[tuple[int, int]] = []
        self._total = 0
        self._sent: torch.cuda.Event | None = None

    def reserve(self, sizes: list[int]) -> list[Int32]:
        """Arrays of these numbers of elements, contents undefined. On CUDA those of the call before become invalid."""
        ends = list(accumulate(sizes))
        self._bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        self._total = ends[-1]
        if self._sent is not None:
            self._sent.synchronize()  # the copy that may still read the buffer
        if self._on_cpu:
            self._buffer = torch.empty(self._total, dtype=torch.int32)
        elif self._total > len(self._buffer):
            self._buffer = torch.empty(2 * self._total, dtype=torch.int32, pin_memory=True)
        host: Int32 = self._buffer.numpy()
        return [host[start:stop] for start, stop in self._bounds]

    def send(self) -> list[Tensor]:
        """The same arrays as tensors on the device."""
        sent = self._buffer[: self._total]
        if not self._on_cpu:
            sent = sent.to(self._device, non_blocking=True)
            if self._sent is None:
                self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record()
        return [sent[start:stop] for start, stop in self._bounds]
