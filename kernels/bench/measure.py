"""Cases, times and bandwidth.

Calls that are compared take turns, and medians count: another load then hits all alike. With one thread the time is
the process's own processor time, to which others' load adds little; with more it is wall time.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kernels.layout import ENTRY_WIDTH, OFFSET_UNIT, KVFormat, KVShape
from kernels.reference.tiles import tile_parts
from kernels.table import TableView

_TILES = 64  # different ones in a cache: quick to build
_BANDWIDTH_BYTES = 256 << 20


@dataclass(frozen=True)
class Case:
    """Sequences of equal length in blocks of one class."""

    sequences: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 64

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def shape(self, dtype: torch.dtype) -> KVShape:
        """Of one layer."""
        return KVShape(1, self.kv_heads, self.head_dim, dtype.itemsize)

    def stored_bytes(self, kv_format: KVFormat, dtype: torch.dtype) -> int:
        """Bytes of keys, values and constants."""
        return self.sequences * self.tokens * self.shape(dtype).tile_bytes(kv_format) // kv_format.tile_tokens

    def __str__(self) -> str:
        return f"{self.sequences} x {self.tokens} tokens, {self.heads}/{self.kv_heads} heads of {self.head_dim}"


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each call over ``rounds`` in which all take turns, after one round that does not count.

    Each round has its own order, so that no call always finds the caches as a certain other one left them.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    shuffle, order = random.Random(0).shuffle, list(calls)
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            call = calls[name]
            started = clock()
            call()
            times[name].append(clock() - started)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def read_bandwidth(rounds: int = 5, size: int = _BANDWIDTH_BYTES) -> float:
    """Bytes per second that torch's sum reads from an array that fits no cache but a server's last level."""
    array = torch.ones(size // 4, dtype=torch.float32)
    return size / interleaved({"sum": array.sum}, rounds)["sum"]


def paged_cache(
    case: Case, kv_format: KVFormat, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, TableView]:
    """Arena and tables of a case: shuffled blocks of random tiles, queries at the last position."""
    shape = case.shape(dtype)
    stride, block = shape.tile_stride(kv_format), shape.block_bytes(kv_format, case.block_size)
    tiles = torch.zeros((_TILES, 1, case.kv_heads, shape.head_bytes(kv_format)), dtype=torch.uint8)
    size = (_TILES, 1, case.kv_heads, kv_format.tile_tokens, case.head_dim)
    for part in tile_parts(tiles, shape, kv_format, dtype):
        values = torch.randn(size, generator=generator).to(dtype)
        if kv_format.is_native:
            part.data.copy_(values)
        else:
            part.quantise(values.float())
    per_sequence = -(-case.tokens // case.block_size)
    blocks, per_block = case.sequences * per_sequence, case.block_size // kv_format.tile_tokens
    chosen = torch.randint(_TILES, (blocks * per_block,), generator=generator)
    arena = torch.zeros((blocks, block), dtype=torch.uint8)
    arena[:, : per_block * stride] = tiles.view(_TILES, stride)[chosen].view(blocks, per_block * stride)
    entries = torch.zeros((case.sequences, per_sequence, ENTRY_WIDTH), dtype=torch.int32)
    first = torch.arange(per_sequence) * case.block_size
    offsets = torch.randperm(blocks, generator=generator) * (block // OFFSET_UNIT)
    entries[..., 0] = offsets.view(case.sequences, per_sequence)
    entries[..., 1] = kv_format.code
    entries[..., 2] = first
    entries[..., 3] = (case.tokens - first).clamp(max=case.block_size)
    counts = torch.full((case.sequences,), per_sequence, dtype=torch.int32)
    last = torch.full((case.sequences,), case.tokens - 1, dtype=torch.int32)
    return arena.view(-1), TableView(entries, counts, last)
