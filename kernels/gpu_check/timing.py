"""Times, bandwidth and uniform caches on a GPU. On a CPU (Triton's interpreter) all runs, and figures mean nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.layout import OFFSET_UNIT, KVFormat, KVShape
from kernels.table import TableView

_FLUSH_BYTES = 256 << 20  # more than any card's last-level cache
_PATTERN_BYTES = 16 << 20


@dataclass(frozen=True)
class Clock:
    """Median microseconds of a call on ``device``. Caches are emptied before each repeat, outside of the time."""

    device: torch.device
    repeats: int = 20

    def micros(self, call: Callable[[], object], *, graph: bool = False) -> float:
        """``graph``: record the call once and time its replays, so that launches from Python do not count."""
        call()
        if self.device.type != "cuda":
            started = time.perf_counter()
            call()
            return (time.perf_counter() - started) * 1e6
        torch.cuda.synchronize(self.device)
        if graph:
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                call()
            call = recorded.replay
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        times: list[float] = []
        for _ in range(self.repeats + 2):
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times[2:])

    def copy_bandwidth(self) -> float:
        """GB/s (10^9) that torch's copy of a large tensor reads and writes, taken together."""
        size = (2 << 30) if self.device.type == "cuda" else (1 << 20)
        source = torch.empty(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / self.micros(lambda: target.copy_(source)) / 1e3


def arena_bytes(shape: KVShape, kv_format: KVFormat, block_size: int, sequences: int, tokens: int) -> int:
    """What `uniform_cache` allocates."""
    return sequences * tokens // block_size * shape.block_bytes(kv_format, block_size)


def uniform_cache(
    shape: KVShape, kv_format: KVFormat, block_size: int, sequences: int, tokens: int, device: torch.device
) -> tuple[torch.Tensor, TableView]:
    """Sequences of ``tokens`` tokens in blocks of one class at shuffled offsets; queries at the last position.

    Contents are random bytes, a pattern repeated, with small exponents, so that all values are finite.
    """
    blocks = sequences * tokens // block_size
    units = shape.block_bytes(kv_format, block_size) // OFFSET_UNIT
    arena = torch.empty(blocks * units * OFFSET_UNIT, dtype=torch.uint8, device=device)
    pattern = torch.randint(0, 128, (min(_PATTERN_BYTES, arena.numel()),), dtype=torch.uint8, device=device)
    # Odd bytes are the high halves of 16-bit floats: 0x20 .. 0x3f keeps them under 2.
    pattern[1::2] = pattern[1::2] % 32 + 32
    for start in range(0, arena.numel(), pattern.numel()):
        part = arena[start : start + pattern.numel()]
        part.copy_(pattern[: part.numel()])
    entries = torch.zeros((sequences, tokens // block_size, 4), dtype=torch.int32, device=device)
    entries[..., 0] = (torch.randperm(blocks, device=device) * units).view(sequences, -1)
    entries[..., 1] = kv_format.code
    entries[..., 2] = torch.arange(0, tokens, block_size, device=device)
    entries[..., 3] = block_size
    counts = torch.full((sequences,), entries.shape[1], dtype=torch.int32, device=device)
    last = torch.full((sequences,), tokens - 1, dtype=torch.int32, device=device)
    return arena, TableView(entries, counts, last, max_position=tokens - 1)
