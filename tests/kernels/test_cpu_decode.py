"""CPU decode attention against the float64 reference, and what must not change a bit of it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from kernels import ops, reference
from kernels.cpu.decode_attention import PreparedRows, attend
from kernels.layout import FORMATS, INT4, INT8, K8V4, NATIVE, KVShape

GEOMETRIES = [
    (torch.float32, 48, 4, 4),
    (torch.float32, 64, 8, 2),
    (torch.float32, 80, 6, 3),
    (torch.float32, 256, 2, 2),
    (torch.bfloat16, 64, 8, 2),
    (torch.bfloat16, 96, 5, 1),
    (torch.float16, 128, 6, 3),
    (torch.bfloat16, 40, 6, 2),
]


@pytest.mark.parametrize(("dtype", "head_dim", "heads", "kv_heads"), GEOMETRIES)
@pytest.mark.parametrize("window", [0, 1, 8, 100])
def test_matches_reference_on_every_layout(
    kernel_cases: Any, dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, window: int
) -> None:
    generator = torch.Generator().manual_seed(head_dim + window)
    shape = KVShape(2, kv_heads, head_dim, dtype.itemsize)
    layouts = kernel_cases.every_layout()
    cache = kernel_cases.random_cache(shape, dtype, layouts, generator)
    table = cache.table([length - 1 for length in kernel_cases.lengths_of(layouts)])
    query = torch.randn((len(layouts), heads, head_dim), generator=generator).to(dtype)
    out = kernel_cases.poisoned(query.shape, dtype)
    ops.decode_attention(query, cache.arena, shape, 1, table, scale=head_dim**-0.5, window=window, out=out)
    want = torch.empty(query.shape, dtype=torch.float64)
    reference.decode_attention(
        query, cache.arena, shape, 1, table, scale=head_dim**-0.5, window=window, out=want, dtype=torch.float64
    )
    kernel_cases.assert_close(out, want, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_format", FORMATS, ids=lambda kv_format: kv_format.name)
def test_block_size_changes_no_bit(kernel_cases: Any, dtype: torch.dtype, kv_format: Any) -> None:
    shape = KVShape(1, 2, 64, dtype.itemsize)
    kv = [
        kernel_cases.random_kv(shape, length + 32, dtype, torch.Generator().manual_seed(1)) for length in (256, 301, 33)
    ]
    query = torch.randn((3, 4, 64), generator=torch.Generator().manual_seed(2)).to(dtype)
    results = []
    for size in (16, 32, 64, 128, 256):
        size = max(size, kv_format.tile_tokens)  # noqa: PLW2901 - 16 exists for native only
        layouts = [kernel_cases.uniform(values.shape[2] - 32, kv_format, size) for values in kv]
        cache = kernel_cases.build(
            shape, dtype, list(zip(kv, layouts, strict=True)), torch.Generator().manual_seed(size)
        )
        out = kernel_cases.poisoned(query.shape, dtype)
        ops.decode_attention(query, cache.arena, shape, 0, cache.table([255, 300, 32]), scale=0.125, out=out)
        results.append(out)
    for other in results[1:]:
        kernel_cases.assert_same_bits(other, results[0])


def test_number_of_threads_changes_no_bit(kernel_cases: Any) -> None:
    shape = KVShape(1, 2, 64, 4)
    generator = torch.Generator().manual_seed(3)
    layouts = kernel_cases.every_layout()
    cache = kernel_cases.random_cache(shape, torch.float32, layouts, generator)
    positions = torch.tensor([length - 1 for length in kernel_cases.lengths_of(layouts)], dtype=torch.int32)
    table = cache.table(positions.tolist())
    query = torch.randn((len(layouts), 8, 64), generator=generator)
    rows = PreparedRows.of(table, np.arange(len(layouts), dtype=np.int32), positions.numpy())
    results = []
    for threads in (1, 2):
        out = kernel_cases.poisoned(query.shape, torch.float32)
        attend(query, cache.arena, shape, 0, rows, 0.125, 0, out, threads=threads)
        results.append(out)
    kernel_cases.assert_same_bits(results[1], results[0])


def test_two_threads_may_call_at_once(kernel_cases: Any) -> None:
    """Numba's threads serve one caller; the other one computes alone instead of aborting the process."""
    shape = KVShape(1, 2, 64, 4)
    generator = torch.Generator().manual_seed(4)
    layouts = [kernel_cases.uniform(257, INT8, 32)] * 8
    cache = kernel_cases.random_cache(shape, torch.float32, layouts, generator)
    table = cache.table([256] * 8)
    query = torch.randn((8, 8, 64), generator=generator)
    rows = PreparedRows.of(table, np.arange(8, dtype=np.int32), table.query_first.numpy())
    outs = [kernel_cases.poisoned(query.shape, torch.float32) for _ in range(3)]

    def call(out: torch.Tensor) -> None:
        for _ in range(20):
            attend(query, cache.arena, shape, 0, rows, 0.125, 0, out, threads=2)

    threads = [threading.Thread(target=call, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out in outs[1:]:
        kernel_cases.assert_same_bits(out, outs[0])
    assert torch.isfinite(outs[0]).all()


def test_large_scores_do_not_overflow_and_rise_along_the_sequence(kernel_cases: Any) -> None:
    """The online softmax rescales what it has whenever a later tile has a larger score."""
    shape = KVShape(1, 1, 64, 4)
    generator = torch.Generator().manual_seed(5)
    kv = kernel_cases.random_kv(shape, 320 + 32, torch.float32, generator)
    kv[:, 0] *= torch.linspace(1, 60, kv.shape[2])[None, :, None, None]
    layouts = [kernel_cases.mixed(320, (NATIVE, INT8, K8V4, INT4))]
    cache = kernel_cases.build(shape, torch.float32, [(kv, layouts[0])], generator)
    query = torch.randn((1, 4, 64), generator=generator) * 4
    out = kernel_cases.poisoned(query.shape, torch.float32)
    table = cache.table([319])
    ops.decode_attention(query, cache.arena, shape, 0, table, scale=0.125, out=out)
    want = torch.empty(query.shape, dtype=torch.float64)
    reference.decode_attention(query, cache.arena, shape, 0, table, scale=0.125, out=want, dtype=torch.float64)
    # Scores reach hundreds, so that their own rounding (2^-24 of them) dominates.
    torch.testing.assert_close(out.to(torch.float64), want, rtol=1e-3, atol=1e-3)


def test_nan_that_is_attended_is_not_hidden(kernel_cases: Any) -> None:
    shape = KVShape(1, 1, 64, 4)
    generator = torch.Generator().manual_seed(6)
    cache = kernel_cases.random_cache(shape, torch.float32, [kernel_cases.uniform(40, NATIVE, 16)] * 2, generator)
    table = cache.table([39, 39])
    broken = int(table.entries[1, 1, 0]) * 256
    cache.arena[broken : broken + 4] = 255
    out = torch.zeros((2, 2, 64))
    ops.decode_attention(torch.ones_like(out), cache.arena, shape, 0, table, scale=0.125, out=out)
    assert torch.isfinite(out[0]).all()
    assert out[1].isnan().all()


def test_sequence_without_entries_gets_zeros(kernel_cases: Any) -> None:
    shape = KVShape(1, 1, 64, 4)
    cache = kernel_cases.random_cache(
        shape, torch.float32, [kernel_cases.uniform(4, NATIVE, 16)], torch.Generator().manual_seed(7)
    )
    table = cache.table([3])
    table.num_entries.zero_()
    for backend in ("cpu", "reference"):
        out = kernel_cases.poisoned((1, 2, 64), torch.float32)
        ops.decode_attention(torch.ones(1, 2, 64), cache.arena, shape, 0, table, scale=1.0, out=out, backend=backend)
        assert torch.equal(out, torch.zeros_like(out))


def test_strided_output_and_query(kernel_cases: Any) -> None:
    shape = KVShape(1, 2, 64, 4)
    generator = torch.Generator().manual_seed(8)
    cache = kernel_cases.random_cache(shape, torch.float32, [kernel_cases.mixed(70, (INT4,))] * 2, generator)
    table = cache.table([69, 69])
    wide = torch.randn((2, 3, 4, 64), generator=generator)
    plain, target = torch.empty(2, 4, 64), kernel_cases.poisoned((4, 2, 64), torch.float32)
    ops.decode_attention(wide[:, 1].contiguous(), cache.arena, shape, 0, table, scale=0.125, out=plain)
    ops.decode_attention(wide[:, 1], cache.arena, shape, 0, table, scale=0.125, out=target.transpose(0, 1))
    assert torch.equal(target.transpose(0, 1), plain)
