"""Paged layouts with everything in them that a kernel must cope with, shared by the kernel tests.

Whatever a kernel must not read is NaN (0xff bytes: NaN in all three native dtypes): blocks that nobody uses, tokens
past a block's ``valid``, table rows past ``num_entries`` and outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from kernels.layout import ENTRY_WIDTH, FORMATS, INT4, INT8, K8V4, NATIVE, OFFSET_UNIT, KVFormat, KVShape
from kernels.reference.tiles import tile_parts, tile_view
from kernels.reference.tolerances import attention_tolerance
from kernels.table import TableView

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (48, 64, 80, 96, 128, 256)
HEADS = ((4, 4), (8, 2), (6, 3), (5, 1))  # query heads, KV heads
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 257)


@pytest.fixture(scope="session")
def kernel_cases() -> ModuleType:
    """This file: with importmode=importlib, tests cannot import from each other."""
    return sys.modules[__name__]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors gain nothing from torch's threads, and wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Piece:
    """``valid`` tokens from position ``first`` on, in one block."""

    kv_format: KVFormat
    block_size: int
    first: int
    valid: int


@dataclass(frozen=True)
class Cache:
    arena: torch.Tensor
    shape: KVShape
    entries: torch.Tensor
    num_entries: torch.Tensor

    def table(self, query_first: Sequence[int]) -> TableView:
        return TableView(self.entries, self.num_entries, torch.tensor(query_first, dtype=torch.int32))


def random_kv(shape: KVShape, tokens: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Unit noise with a bias per key channel, as models have: [layers, 2, tokens, kv_heads, head_dim]."""
    kv = torch.randn((shape.num_layers, 2, tokens, shape.num_kv_heads, shape.head_dim), generator=generator)
    kv[:, 0] += torch.randn((shape.num_layers, 1, shape.num_kv_heads, shape.head_dim), generator=generator)
    return kv.to(dtype)


def uniform(length: int, kv_format: KVFormat, block_size: int) -> list[Piece]:
    """A sequence in blocks of one class; the last one partly valid."""
    return [
        Piece(kv_format, block_size, first, min(block_size, length - first)) for first in range(0, length, block_size)
    ]


def mixed(length: int, formats: Sequence[KVFormat], hole: tuple[int, int] = (0, 0)) -> list[Piece]:
    """Classes in turn where a full block of one fits, else native blocks of 16; without positions in ``hole``."""
    pieces: list[Piece] = []
    sizes = (32, 64, 128)
    position = turn = 0
    while position < length:
        kv_format, size = formats[turn % len(formats)], sizes[turn % len(sizes)]
        turn += 1
        if position % size or position + size > length:
            kv_format, size = NATIVE, 16
        valid = min(size, length - position)
        if position + valid <= hole[0] or position >= hole[1]:
            pieces.append(Piece(kv_format, size, position, valid))
        position += valid
    return pieces


def prefix_hits(length: int) -> list[Piece]:
    """Shared blocks of which a prefix is used, each followed by an entry that starts there."""
    pieces = [Piece(NATIVE, 64, 0, 48), Piece(NATIVE, 16, 48, 16), Piece(INT8, 64, 64, 48), Piece(NATIVE, 16, 112, 16)]
    pieces += [Piece(INT4, 128, 128, 80), Piece(NATIVE, 16, 208, 16), Piece(K8V4, 32, 224, 16)]
    position = 240
    while position < length:
        pieces.append(Piece(NATIVE, 16, position, min(16, length - position)))
        position += 16
    return pieces


def build(
    shape: KVShape,
    dtype: torch.dtype,
    sequences: Sequence[tuple[torch.Tensor, Sequence[Piece]]],
    generator: torch.Generator,
    *,
    poison: int = 255,
) -> Cache:
    """Store sequences in blocks at shuffled offsets. KV must reach one tile past the last stored position.

    ``poison``: the byte that everything else is made of; tests that compare set another than NaN's.
    """
    blocks = [(index, piece) for index, (_, pieces) in enumerate(sequences) for piece in pieces]
    units = [shape.block_bytes(piece.kv_format, piece.block_size) // OFFSET_UNIT for _, piece in blocks]
    arena = torch.full(((sum(units) + 1) * OFFSET_UNIT,), poison, dtype=torch.uint8)
    rows: list[list[tuple[int, int, int, int]]] = [[] for _ in sequences]
    offset = 1
    for number in torch.randperm(len(blocks), generator=generator).tolist():
        index, piece = blocks[number]
        fill_block(arena, shape, offset, piece, sequences[index][0], dtype, poison=poison)
        rows[index].append((piece.first, offset, piece.kv_format.code, piece.valid))
        offset += units[number]
    entries = torch.full((len(rows), max(map(len, rows)) + 1, ENTRY_WIDTH), -(1 << 24), dtype=torch.int32)
    for index, row in enumerate(rows):
        for place, (first, block, code, valid) in enumerate(sorted(row)):
            entries[index, place] = torch.tensor((block, code, first, valid))
    return Cache(arena, shape, entries, torch.tensor([len(row) for row in rows], dtype=torch.int32))


def fill_block(
    arena: torch.Tensor,
    shape: KVShape,
    offset: int,
    piece: Piece,
    kv: torch.Tensor,
    dtype: torch.dtype,
    *,
    poison: int = 255,
) -> None:
    """Write a block's valid tokens; the others stay poisoned (in a quantised tile: their codes and constants)."""
    tokens = piece.kv_format.tile_tokens
    for tile, start in enumerate(range(0, piece.valid, tokens)):
        view = tile_view(arena, shape, piece.kv_format, offset, tile)
        count = min(tokens, piece.valid - start)
        position = piece.first + start
        for which, part in enumerate(tile_parts(view, shape, piece.kv_format, dtype)):
            values = kv[:, which, position : position + tokens].transpose(1, 2)
            if piece.kv_format.is_native:
                part.data[..., :count, :] = values[..., :count, :]
                continue
            part.quantise(values.to(torch.float32))
            part.data[..., count:, :] = poison
            if which == 1:
                constant = torch.full((dtype.itemsize,), poison, dtype=torch.uint8).view(dtype)
                part.scale[..., count:, :] = constant
                part.zero[..., count:, :] = constant


def random_cache(
    shape: KVShape, dtype: torch.dtype, layouts: Sequence[Sequence[Piece]], generator: torch.Generator
) -> Cache:
    stored = [
        (random_kv(shape, pieces[-1].first + pieces[-1].valid + 32, dtype, generator), pieces) for pieces in layouts
    ]
    return build(shape, dtype, stored, generator)


def lengths_of(layouts: Sequence[Sequence[Piece]]) -> list[int]:
    return [pieces[-1].first + pieces[-1].valid for pieces in layouts]


def every_layout() -> list[list[Piece]]:
    """One batch with all formats alone and mixed, lengths around every boundary, gaps and prefix hits."""
    layouts = [uniform(length, NATIVE, (16, 32, 64, 128, 256)[i % 5]) for i, length in enumerate(LENGTHS)]
    layouts += [uniform(length, form, 32) for form in (INT8, K8V4, INT4) for length in (17, 32, 65)]
    layouts += [mixed(length, FORMATS) for length in (95, 224, 385)]
    layouts += [mixed(300, (INT4, NATIVE, INT8), hole=(32, 96)), mixed(161, (NATIVE,), hole=(16, 144))]
    return [*layouts, prefix_hits(240), prefix_hits(250)]


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(shape), torch.nan, dtype=dtype)


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Within the tolerance that is written down once; NaN never is."""
    limit = attention_tolerance(dtype)
    torch.testing.assert_close(got.to(torch.float64), want, rtol=limit.rtol, atol=limit.atol)


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
