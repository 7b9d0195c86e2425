"""One host buffer per step, cut into int32 arrays and sent to the device in a single copy."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32 = npt.NDArray[np.int32]


class StagingBuffer:
    """On CUDA the buffer is pinned and copied without waiting; on CPU the arrays themselves are the tensors.

    ``is_kept``: the arrays of the last call are those of the call before, and hold what they were filled with.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._buffer = torch.empty(0, dtype=torch.int32)
        self._sizes: list[int] = []
        self._bounds: list[tuple[int, int]] = []
        self._arrays: list[Int32] = []
        self._tensors: list[Tensor] = []  # on CPU: the arrays as tensors
        self._sent: torch.cuda.Event | None = None
        self.is_kept = False

    def reserve(self, sizes: list[int]) -> list[Int32]:
        """Arrays of these numbers of elements, contents undefined unless ``is_kept``. Those of the call before become
        invalid.
        """
        if self._sent is not None:
            self._sent.synchronize()  # the copy that may still read the buffer
        self.is_kept = sizes == self._sizes
        if self.is_kept:
            return self._arrays
        self._sizes = list(sizes)
        ends = list(accumulate(sizes))
        self._bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        if ends[-1] > len(self._buffer):
            self._buffer = torch.empty(2 * ends[-1], dtype=torch.int32, pin_memory=not self._on_cpu)
        host: Int32 = self._buffer.numpy()
        self._arrays = [host[start:stop] for start, stop in self._bounds]
        self._tensors = [self._buffer[start:stop] for start, stop in self._bounds] if self._on_cpu else []
        return self._arrays

    def send(self) -> list[Tensor]:
        """The same arrays as tensors on the device."""
        if self._on_cpu:
            return self._tensors
        sent = self._buffer[: self._bounds[-1][1]].to(self._device, non_blocking=True)
        if self._sent is None:
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._sent.record()
        return [sent[start:stop] for start, stop in self._bounds]
