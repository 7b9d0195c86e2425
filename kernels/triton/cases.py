"""Random mixed-class caches for the checks: what is stored, and in blocks of which classes.

Everything that a kernel must not read is poisoned: the arena is all NaN (0xff bytes) before it is filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.layout import FORMATS, INT4, INT8, K8V4, NATIVE, OFFSET_UNIT, KVFormat, KVShape
from kernels.reference.tiles import tile_parts, tile_view
from kernels.table import TableView


@dataclass(frozen=True)
class Segment:
    """``tokens`` positions from ``first`` on, stored in blocks of one class (the last may be partly valid)."""

    kv_format: KVFormat
    block_size: int
    first: int
    tokens: int


@dataclass(frozen=True)
class Geometry:
    """Shape of one check. Heads per KV head: ``group``."""

    dtype: torch.dtype
    head_dim: int
    kv_heads: int = 2
    group: int = 2
    layers: int = 2

    @property
    def shape(self) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_dim, self.dtype.itemsize)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} dim {self.head_dim}, {self.kv_heads} x {self.group} heads"


@dataclass(frozen=True)
class Cache:
    arena: torch.Tensor
    shape: KVShape
    entries: torch.Tensor
    num_entries: torch.Tensor

    def table(self, query_first: Sequence[int]) -> TableView:
        first = torch.tensor(query_first, dtype=torch.int32, device=self.arena.device)
        return TableView(self.entries, self.num_entries, first)

    def cpu(self) -> Cache:
        return Cache(self.arena.cpu(), self.shape, self.entries.cpu(), self.num_entries.cpu())


def random_kv(geometry: Geometry, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Keys and values [layers, 2, tokens, kv_heads, head_dim]: unit noise, and a bias per key channel."""
    kv = torch.randn((geometry.layers, 2, tokens, geometry.kv_heads, geometry.head_dim), generator=generator)
    kv[:, 0] += torch.randn((geometry.layers, 1, geometry.kv_heads, geometry.head_dim), generator=generator)
    return kv.to(geometry.dtype)


def build_cache(
    geometry: Geometry,
    sequences: Sequence[tuple[torch.Tensor, Sequence[Segment]]],
    generator: torch.Generator,
    device: torch.device,
) -> Cache:
    """Store sequences (KV of `random_kv` for all positions, and their segments) in blocks at shuffled offsets.

    What lies beyond a block's valid tokens stays NaN. ``tokens`` of the KV must cover whole tiles of the segments.
    """
    shape = geometry.shape
    blocks = [
        (index, segment, start)
        for index, (_, segments) in enumerate(sequences)
        for segment in segments
        for start in range(0, segment.tokens, segment.block_size)
    ]
    units = [shape.block_bytes(s.kv_format, s.block_size) // OFFSET_UNIT for _, s, _ in blocks]
    arena = torch.full(((sum(units) + 1) * OFFSET_UNIT,), 255, dtype=torch.uint8)
    rows: list[list[tuple[int, int, int, int]]] = [[] for _ in sequences]
    offset = 1
    for choice in torch.randperm(len(blocks), generator=generator).tolist():
        index, segment, start = blocks[choice]
        valid = min(segment.block_size, segment.tokens - start)
        first = segment.first + start
        _fill_block(arena, shape, segment.kv_format, offset, sequences[index][0], first, valid)
        rows[index].append((offset, segment.kv_format.code, first, valid))
        offset += units[choice]
    width = max(len(row) for row in rows) + 1
    entries = torch.full((len(rows), width, 4), -(1 << 20), dtype=torch.int32)
    for index, row in enumerate(rows):
        row.sort(key=lambda entry: entry[2])
        entries[index, : len(row)] = torch.tensor(row, dtype=torch.int32).reshape(-1, 4)
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    return Cache(arena.to(device), shape, entries.to(device), counts.to(device))


def _fill_block(
    arena: torch.Tensor, shape: KVShape, kv_format: KVFormat, offset: int, kv: torch.Tensor, first: int, valid: int
) -> None:
    tokens = kv_format.tile_tokens
    for tile, start in enumerate(range(0, valid, tokens)):
        view = tile_view(arena, shape, kv_format, offset, tile)
        count = min(tokens, valid - start)
        for which, part in enumerate(tile_parts(view, shape, kv_format, kv.dtype)):
            values = kv[:, which, first + start : first + start + tokens].transpose(1, 2)
            if kv_format.is_native:
                part.data[..., :count, :] = values[..., :count, :]
                continue
            part.quantise(values.to(torch.float32))
            part.data[..., count:, :] = 255
            if which == 1:
                part.scale[..., count:, :] = float("nan")
                part.zero[..., count:, :] = float("nan")


def mixed_segments(
    tokens: int, formats: Sequence[KVFormat], block_sizes: Sequence[int], *, hole: tuple[int, int] | None = None
) -> list[Segment]:
    """Segments that cover ``tokens`` positions: classes in turn, one block each, the rest native in 16-token blocks.

    ``hole``: positions (multiples of 16) that are evicted.
    """
    segments: list[Segment] = []
    position, turn = 0, 0
    while position < tokens:
        kv_format, size = formats[turn % len(formats)], block_sizes[turn % len(block_sizes)]
        turn += 1
        if not kv_format.is_native:
            size = max(size, 32)
        if position % size or position + size > tokens:
            kv_format, size = NATIVE, 16
        count = min(size, tokens - position)
        if hole is None or position + count <= hole[0] or position >= hole[1]:
            segments.append(Segment(kv_format, size, position, count))
        position += count
    return segments


def shared_prefix_segments() -> list[Segment]:
    """Blocks that end early and are followed by smaller ones, as after prefix hits that end inside a block."""
    return [
        Segment(INT8, 64, 0, 48),
        Segment(NATIVE, 16, 48, 16),
        Segment(NATIVE, 64, 64, 32),
        Segment(NATIVE, 32, 96, 32),
        Segment(INT4, 32, 128, 16),
        Segment(NATIVE, 16, 144, 16),
        Segment(K8V4, 32, 160, 21),
    ]


def recode_jobs(
    geometry: Geometry, generator: torch.Generator, scale: float
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int]]]:
    """An arena with two native tiles and one tile of each quantised format, and jobs for every allowed pair.

    Returns (arena, jobs, the pairs of codes (source, destination)).
    """
    shape = geometry.shape
    kv = random_kv(geometry, 64, generator) * scale
    kv[:, :, :, 0, 1] = 3.5
    kv[:, :, 5] = -100.0
    sources, offset = {}, 1
    most = len(FORMATS) * (len(FORMATS) + 3) // 2  # one block per format, and one per pair
    arena = torch.full((shape.block_bytes(NATIVE, 64) * most + OFFSET_UNIT,), 255, dtype=torch.uint8)
    for kv_format in FORMATS:
        _fill_block(arena, shape, kv_format, offset, kv, 0, 64)
        sources[kv_format.code] = offset
        offset += shape.block_bytes(kv_format, 64) // OFFSET_UNIT
    jobs, pairs = [], []
    for source in FORMATS:
        for target in FORMATS:
            if target.lossiness >= source.lossiness:
                two = source.is_native and not target.is_native
                second = (sources[0], 3) if two else (-1, -1)
                jobs.append([target.code, offset, 1, source.code, sources[source.code], 2 if two else 1, *second])
                pairs.append((source.code, target.code))
                offset += shape.block_bytes(target, 64) // OFFSET_UNIT
    return arena, torch.tensor(jobs, dtype=torch.int32), pairs


def random_cache(
    geometry: Geometry, sequences: Sequence[Sequence[Segment]], generator: torch.Generator, device: torch.device
) -> tuple[Cache, list[int]]:
    """A cache with fresh values for these segments, and the sequences' lengths."""
    lengths = [segments[-1].first + segments[-1].tokens for segments in sequences]
    stored = [
        (random_kv(geometry, length + 32, generator), segments)
        for length, segments in zip(lengths, sequences, strict=True)
    ]
    return build_cache(geometry, stored, generator, device), lengths


def copy_rows(generator: torch.Generator, source_bytes: int) -> tuple[torch.Tensor, int]:
    """Runs for a copy, shuffled, with gaps in the target: many odd ones, and long ones whose ends are multiples of 16.

    Returns rows int64 [rows, 3] as `kernels.ops.copy_bytes` takes them, and the target's size.
    """
    rows, place = [], 2
    for step, longest in ((2, 40), (2, 9000), (16, 64), (16, 9000), (16, 36_000)):
        for _ in range(4):
            size = int(torch.randint(0, longest // step + 1, (1,), generator=generator)) * step
            start = int(torch.randint(0, (source_bytes - size) // step + 1, (1,), generator=generator)) * step
            place += step - place % step
            rows.append((start, place, size))
            place += size + 2
    order = torch.randperm(len(rows), generator=generator)
    return torch.tensor(rows)[order], place + 4
