"""Shares of attention per chunk of 16 positions: decode's by-product and the prompt's observation window."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kernels import ops, reference
from kernels.cpu.decode_attention import PreparedRows, attend
from kernels.layout import CHUNK_TOKENS, FORMATS, NATIVE, KVShape
from kernels.reference.tolerances import mass_tolerance
from kernels.table import TableView

GEOMETRIES = [
    (torch.float32, 48, 4, 4, 0),
    (torch.float32, 64, 8, 2, 100),
    (torch.float32, 80, 6, 3, 1),
    (torch.bfloat16, 64, 8, 2, 0),
    (torch.bfloat16, 96, 5, 1, 33),
    (torch.float16, 128, 6, 3, 0),
]
BACKENDS = ("cpu", "reference")


def _assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Stored values are read exactly and all else is float32 on the CPU: every dtype has float32's tolerance."""
    limit = mass_tolerance(torch.float32)
    torch.testing.assert_close(got.double(), want, rtol=limit.rtol, atol=limit.atol)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shares_are_softmax_weights_by_hand(kernel_cases: Any, backend: str) -> None:
    """Positions 16..31 are evicted and 0..6 outside the window; heads 0, 1 read KV head 0, heads 2, 3 KV head 1."""
    shape, window = KVShape(2, 2, 8, 4), 38
    generator = torch.Generator().manual_seed(1)
    kv = kernel_cases.random_kv(shape, 80, torch.float32, generator)
    pieces = [kernel_cases.Piece(NATIVE, 16, 0, 16), kernel_cases.Piece(NATIVE, 32, 32, 13)]
    cache = kernel_cases.build(shape, torch.float32, [(kv, pieces)], generator)
    query = torch.randn((3, 4, 8), generator=generator)

    def by_hand(index: int, kv_head: int) -> list[float]:
        seen = [p for p in (*range(16), *range(32, 45)) if 42 + index - window < p <= 42 + index]
        shares = [0.0] * 4
        for head in (2 * kv_head, 2 * kv_head + 1):
            scores = [0.3 * float(query[index, head] @ kv[1, 0, p, kv_head]) for p in seen]
            total = sum(math.exp(score) for score in scores)
            for p, score in zip(seen, scores, strict=True):
                shares[p // CHUNK_TOKENS] += math.exp(score) / total / 2
        return shares

    out, mass = torch.empty(1, 4, 8), kernel_cases.poisoned((1, 2, 4), torch.float32)
    arguments: dict[str, Any] = {"scale": 0.3, "window": window, "backend": backend}
    ops.decode_attention(query[2:], cache.arena, shape, 1, cache.table([44]), out=out, mass=mass, **arguments)
    both = kernel_cases.poisoned((1, 2, 4), torch.float32)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    ops.attention_mass(query, cache.arena, shape, 1, cache.table([42]), starts, last=2, mass=both, **arguments)
    for kv_head in range(2):
        first, second = (torch.tensor(by_hand(index, kv_head)) for index in (1, 2))
        torch.testing.assert_close(mass[0, kv_head], second, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(both[0, kv_head], (first + second) / 2, rtol=1e-5, atol=1e-6)
    assert (mass[:, :, 1] == 0).all()
    assert (both[:, :, 1] == 0).all()


@pytest.mark.parametrize(("dtype", "head_dim", "heads", "kv_heads", "window"), GEOMETRIES)
def test_decode_matches_reference_on_every_layout(
    kernel_cases: Any, dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, window: int
) -> None:
    generator = torch.Generator().manual_seed(head_dim + window)
    shape = KVShape(2, kv_heads, head_dim, dtype.itemsize)
    layouts = kernel_cases.every_layout()
    cache = kernel_cases.random_cache(shape, dtype, layouts, generator)
    table = cache.table([length - 1 for length in kernel_cases.lengths_of(layouts)])
    query = torch.randn((len(layouts), heads, head_dim), generator=generator).to(dtype) * 2
    arguments: dict[str, Any] = {"scale": head_dim**-0.5, "window": window}
    chunks = max(kernel_cases.lengths_of(layouts)) // CHUNK_TOKENS + 3
    mass = kernel_cases.poisoned((len(layouts), kv_heads, chunks), torch.float32)
    out, alone = torch.empty_like(query), torch.empty_like(query)
    ops.decode_attention(query, cache.arena, shape, 1, table, out=out, mass=mass, **arguments)
    ops.decode_attention(query, cache.arena, shape, 1, table, out=alone, **arguments)
    kernel_cases.assert_same_bits(out, alone)
    want = torch.empty(mass.shape, dtype=torch.float64)
    unused = torch.empty(query.shape, dtype=torch.float64)
    reference.decode_attention(
        query, cache.arena, shape, 1, table, out=unused, mass=want, dtype=torch.float64, **arguments
    )
    _assert_close(mass, want)
    assert torch.equal(mass == 0, want == 0), "evicted, hidden and future chunks have nothing, all others something"
    torch.testing.assert_close(mass.sum(dim=2), torch.ones(mass.shape[:2]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "head_dim", "heads", "kv_heads", "window"), GEOMETRIES)
@pytest.mark.parametrize("last", [1, 5, 1000])
def test_prompts_match_reference_on_every_layout(
    kernel_cases: Any, dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, window: int, last: int
) -> None:
    generator = torch.Generator().manual_seed(head_dim + last)
    shape = KVShape(2, kv_heads, head_dim, dtype.itemsize)
    layouts = kernel_cases.every_layout()[-10:]
    lengths = kernel_cases.lengths_of(layouts)
    cache = kernel_cases.random_cache(shape, dtype, layouts, generator)
    new = [1, 40, 3, 64, 9, 16, 1, 33, 7, 12]
    table = cache.table([length - count for length, count in zip(lengths, new, strict=True)])
    starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    query = torch.randn((sum(new), heads, head_dim), generator=generator).to(dtype) * 2
    arguments: dict[str, Any] = {"scale": head_dim**-0.5, "window": window, "last": last}
    mass = kernel_cases.poisoned((len(layouts), kv_heads, max(lengths) // CHUNK_TOKENS + 1), torch.float32)
    ops.attention_mass(query, cache.arena, shape, 1, table, starts, mass=mass, **arguments)
    want = torch.empty(mass.shape, dtype=torch.float64)
    reference.attention_mass(query, cache.arena, shape, 1, table, starts, mass=want, dtype=torch.float64, **arguments)
    _assert_close(mass, want)
    # Queries whose own token is not stored, as some layouts have it, see nothing and add nothing.
    assert (mass.sum(dim=2) <= 1 + 1e-5).all()
    assert ((mass.sum(dim=2) - 1).abs() <= 1e-5).sum() > mass.shape[1] * len(layouts) // 2


def _same_tiles_in_blocks_of(
    kernel_cases: Any, kv_format: Any, dtype: torch.dtype, call: Callable[[torch.Tensor, KVShape, TableView], Any]
) -> list[Any]:
    shape = KVShape(1, 2, 64, dtype.itemsize)
    kv = [kernel_cases.random_kv(shape, n + 32, dtype, torch.Generator().manual_seed(n)) for n in (256, 301, 33)]
    results = []
    for size in (16, 32, 64, 128, 256):
        size = max(size, kv_format.tile_tokens)  # noqa: PLW2901 - 16 exists for native only
        layouts = [kernel_cases.uniform(values.shape[2] - 32, kv_format, size) for values in kv]
        generator = torch.Generator().manual_seed(size)
        cache = kernel_cases.build(shape, dtype, list(zip(kv, layouts, strict=True)), generator)
        results.append(call(cache.arena, shape, cache.table([255, 300, 32])))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_format", FORMATS, ids=lambda kv_format: kv_format.name)
def test_block_size_changes_no_bit(kernel_cases: Any, dtype: torch.dtype, kv_format: Any) -> None:
    query = torch.randn((9, 4, 64), generator=torch.Generator().manual_seed(2)).to(dtype)

    def decode(arena: torch.Tensor, shape: KVShape, table: TableView) -> torch.Tensor:
        mass: torch.Tensor = kernel_cases.poisoned((3, 2, 19), torch.float32)
        ops.decode_attention(query[:3], arena, shape, 0, table, scale=0.125, out=torch.empty_like(query[:3]), mass=mass)
        return mass

    def prompt(arena: torch.Tensor, shape: KVShape, table: TableView) -> torch.Tensor:
        mass: torch.Tensor = kernel_cases.poisoned((3, 2, 19), torch.float32)
        before = TableView(table.entries, table.num_entries, table.query_first - 2)
        starts = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
        ops.attention_mass(query, arena, shape, 0, before, starts, scale=0.125, last=2, mass=mass)
        return mass

    for call in (decode, prompt):
        results = _same_tiles_in_blocks_of(kernel_cases, kv_format, dtype, call)
        assert results[0].sum() > 0
        for other in results[1:]:
            kernel_cases.assert_same_bits(other, results[0])


def test_number_of_threads_changes_no_bit(kernel_cases: Any) -> None:
    shape = KVShape(1, 2, 64, 4)
    generator = torch.Generator().manual_seed(3)
    layouts = kernel_cases.every_layout()
    cache = kernel_cases.random_cache(shape, torch.float32, layouts, generator)
    positions = torch.tensor([length - 1 for length in kernel_cases.lengths_of(layouts)], dtype=torch.int32)
    query = torch.randn((len(layouts), 8, 64), generator=generator)
    table = cache.table(positions.tolist())
    rows = PreparedRows.of(table, np.arange(len(layouts), dtype=np.int32), positions.numpy())
    results = []
    for threads in (1, 2):
        mass = kernel_cases.poisoned((len(layouts), 2, 30), torch.float32)
        out = torch.empty_like(query)
        attend(query, cache.arena, shape, 0, rows, 0.125, 0, out, mass=mass, threads=threads)
        results.append(mass)
    kernel_cases.assert_same_bits(results[1], results[0])


def test_peaks_that_rise_along_the_sequence(kernel_cases: Any) -> None:
    """Each chunk's sum was taken under an older peak; scores reach hundreds, so early chunks end up with nothing."""
    shape = KVShape(1, 1, 64, 4)
    generator = torch.Generator().manual_seed(5)
    kv = kernel_cases.random_kv(shape, 352, torch.float32, generator)
    kv[:, 0] *= torch.linspace(1, 60, kv.shape[2])[None, :, None, None]
    pieces = kernel_cases.mixed(320, FORMATS)
    cache = kernel_cases.build(shape, torch.float32, [(kv, pieces)], generator)
    query = torch.randn((1, 4, 64), generator=generator) * 4
    mass, want = torch.empty(1, 1, 20), torch.empty((1, 1, 20), dtype=torch.float64)
    arguments = (query, cache.arena, shape, 0, cache.table([319]))
    ops.decode_attention(*arguments, scale=0.125, out=torch.empty_like(query), mass=mass)
    reference.decode_attention(
        *arguments, scale=0.125, out=torch.empty_like(query).double(), mass=want, dtype=torch.float64
    )
    torch.testing.assert_close(mass.double(), want, rtol=0, atol=1e-3)
    assert (mass[0, 0, :5] < 1e-30).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_sequences_and_sequences_without_queries_have_nothing(kernel_cases: Any, backend: str) -> None:
    shape = KVShape(1, 1, 64, 4)
    generator = torch.Generator().manual_seed(7)
    layouts = [kernel_cases.uniform(20, NATIVE, 16)] * 3
    cache = kernel_cases.random_cache(shape, torch.float32, layouts, generator)
    table = cache.table([19, 1 << 20, 19])
    table.num_entries[1] = 0
    query = torch.ones(3, 2, 64)
    mass = kernel_cases.poisoned((3, 1, 2), torch.float32)
    ops.decode_attention(
        query, cache.arena, shape, 0, table, scale=0.125, out=torch.empty_like(query), mass=mass, backend=backend
    )
    torch.testing.assert_close(mass.sum(dim=2)[:, 0], torch.tensor([1.0, 0.0, 1.0]))
    mass.fill_(torch.nan)
    starts = torch.tensor([0, 1, 3, 3], dtype=torch.int32)
    ops.attention_mass(query, cache.arena, shape, 0, table, starts, scale=0.125, last=64, mass=mass, backend=backend)
    torch.testing.assert_close(mass.sum(dim=2)[:, 0], torch.tensor([1.0, 0.0, 0.0]))


def test_slices_of_queries_and_strided_targets(kernel_cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = KVShape(1, 2, 64, 4)
    generator = torch.Generator().manual_seed(8)
    cache = kernel_cases.random_cache(shape, torch.float32, [kernel_cases.mixed(200, FORMATS)], generator)
    query = torch.randn((31, 4, 64), generator=generator)
    starts = torch.tensor([0, 31], dtype=torch.int32)
    whole, parts = torch.empty(1, 2, 13), kernel_cases.poisoned((13, 2, 1), torch.float32).transpose(0, 2)
    arguments: Any = (query, cache.arena, shape, 0, cache.table([169]), starts)
    ops.attention_mass(*arguments, scale=0.125, last=16, mass=whole)
    monkeypatch.setattr(sys.modules["kernels.cpu.attention_mass"], "_SCORE_BYTES", 4 * 2 * 200 * 3)
    ops.attention_mass(*arguments, scale=0.125, last=16, mass=parts)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-7)
    decoded, strided = torch.empty(1, 2, 13), kernel_cases.poisoned((13, 2, 1), torch.float32).transpose(0, 2)
    for mass in (decoded, strided):
        out = torch.empty(1, 4, 64)
        ops.decode_attention(query[30:], cache.arena, shape, 0, cache.table([199]), scale=0.125, out=out, mass=mass)
    assert torch.equal(decoded, strided)


def test_refuses_targets_that_do_not_fit(kernel_cases: Any) -> None:
    shape = KVShape(1, 2, 64, 4)
    generator = torch.Generator().manual_seed(9)
    cache = kernel_cases.random_cache(shape, torch.float32, [kernel_cases.uniform(33, NATIVE, 16)], generator)
    table, query = cache.table([32]), torch.zeros(1, 4, 64)
    starts = torch.tensor([0, 1], dtype=torch.int32)

    def decode(mass: torch.Tensor) -> None:
        ops.decode_attention(query, cache.arena, shape, 0, table, scale=1.0, out=torch.zeros(1, 4, 64), mass=mass)

    def prompt(mass: torch.Tensor, last: int = 1) -> None:
        ops.attention_mass(query, cache.arena, shape, 0, table, starts, scale=1.0, last=last, mass=mass)

    for call in (decode, prompt):
        for bad in (torch.zeros(1, 2, 3).double(), torch.zeros(1, 4, 3), torch.zeros(2, 2, 3), torch.zeros(1, 2)):
            with pytest.raises(ValueError, match="mass must be float32"):
                call(bad)
        with pytest.raises(ValueError, match="2 chunks of 16, a query is at position 32"):
            call(torch.zeros(1, 2, 2))
    with pytest.raises(ValueError, match="last must be at least 1"):
        prompt(torch.zeros(1, 2, 3), last=0)
    with pytest.raises(ValueError, match="query_starts"):
        ops.attention_mass(
            query, cache.arena, shape, 0, table, starts[:1], scale=1.0, last=1, mass=torch.zeros(1, 2, 3)
        )
