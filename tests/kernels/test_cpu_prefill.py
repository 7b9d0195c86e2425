"""CPU prefill attention against the float64 reference: chunks of any length at any place of any layout."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from kernels import ops, reference
from kernels.layout import FORMATS, INT4, INT8, NATIVE, KVShape


@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads", "kv_heads"),
    [
        (torch.float32, 64, 8, 2),
        (torch.float32, 80, 4, 4),
        (torch.bfloat16, 96, 6, 3),
        (torch.float16, 48, 5, 1),
    ],
)
@pytest.mark.parametrize("window", [0, 1, 8, 100])
def test_matches_reference_on_every_layout(
    kernel_cases: Any, dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, window: int
) -> None:
    """The last tokens of every layout are new: 1, 7, 32 or all of the last run without a gap."""
    generator = torch.Generator().manual_seed(head_dim + window)
    shape = KVShape(2, kv_heads, head_dim, dtype.itemsize)
    layouts = kernel_cases.every_layout()
    cache = kernel_cases.random_cache(shape, dtype, layouts, generator)
    lengths = kernel_cases.lengths_of(layouts)
    counts = [min((1, 7, 32, 512)[i % 4], length) for i, length in enumerate(lengths)]
    table = cache.table([length - count for length, count in zip(lengths, counts, strict=True)])
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    query = torch.randn((sum(counts), heads, head_dim), generator=generator).to(dtype)
    out = kernel_cases.poisoned(query.shape, dtype)
    scale = head_dim**-0.5
    ops.prefill_attention(query, cache.arena, shape, 1, table, starts, scale=scale, window=window, out=out)
    want = torch.empty(query.shape, dtype=torch.float64)
    reference.prefill_attention(
        query, cache.arena, shape, 1, table, starts, scale=scale, window=window, out=want, dtype=torch.float64
    )
    kernel_cases.assert_close(out, want, dtype)


@pytest.mark.parametrize("kv_format", FORMATS, ids=lambda kv_format: kv_format.name)
def test_block_size_changes_no_bit(kernel_cases: Any, kv_format: Any) -> None:
    shape = KVShape(1, 2, 64, 4)
    kv = kernel_cases.random_kv(shape, 333, torch.float32, torch.Generator().manual_seed(1))
    query = torch.randn((43, 4, 64), generator=torch.Generator().manual_seed(2))
    starts = torch.tensor([0, 3, 43], dtype=torch.int32)
    results = []
    for size in (16, 32, 64, 128, 256):
        size = max(size, kv_format.tile_tokens)  # noqa: PLW2901 - 16 exists for native only
        layout = kernel_cases.uniform(301, kv_format, size)
        cache = kernel_cases.build(shape, torch.float32, [(kv, layout)] * 2, torch.Generator().manual_seed(size))
        out = kernel_cases.poisoned(query.shape, torch.float32)
        ops.prefill_attention(query, cache.arena, shape, 0, cache.table([298, 261]), starts, scale=0.125, out=out)
        results.append(out)
    for other in results[1:]:
        kernel_cases.assert_same_bits(other, results[0])


def test_torchs_attention_where_no_panels_are_to_be_had(kernel_cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts are done a head and a few queries at a time there; the result stays right."""
    module = importlib.import_module("kernels.cpu.prefill_attention")
    monkeypatch.setattr(module, "HERE", None)
    shape = KVShape(1, 4, 64, 4)
    generator = torch.Generator().manual_seed(3)
    layouts = [kernel_cases.mixed(400, FORMATS), kernel_cases.mixed(300, (INT4, NATIVE, INT8), hole=(32, 96))]
    cache = kernel_cases.random_cache(shape, torch.float32, layouts, generator)
    table = cache.table([0, 96])
    starts = torch.tensor([0, 400, 604], dtype=torch.int32)
    query = torch.randn((604, 8, 64), generator=generator)
    want = torch.empty(query.shape, dtype=torch.float64)
    arguments = (query, cache.arena, shape, 0, table, starts)
    reference.prefill_attention(*arguments, scale=0.125, window=150, out=want, dtype=torch.float64)
    for limit, chunk in ((1, 61), (3 * 8 * 400 * 64, 61), (module._GATHER_BYTES, module._QUERY_CHUNK)):
        monkeypatch.setattr(module, "_GATHER_BYTES", limit)
        monkeypatch.setattr(module, "_QUERY_CHUNK", chunk)
        out = kernel_cases.poisoned(query.shape, torch.float32)
        ops.prefill_attention(*arguments, scale=0.125, window=150, out=out)
        kernel_cases.assert_close(out, want, torch.float32)


def test_queries_without_stored_tokens_get_zeros(kernel_cases: Any) -> None:
    """Not in service (a query's own KV is always stored), but never NaN."""
    shape = KVShape(1, 1, 64, 4)
    cache = kernel_cases.random_cache(
        shape, torch.float32, [kernel_cases.uniform(4, NATIVE, 16)], torch.Generator().manual_seed(7)
    )
    starts = torch.tensor([0, 20], dtype=torch.int32)
    for count, first in ((0, 0), (1, 100)):
        table = cache.table([first])
        table.num_entries.fill_(count)
        out = kernel_cases.poisoned((20, 2, 64), torch.float32)
        ops.prefill_attention(torch.ones(20, 2, 64), cache.arena, shape, 0, table, starts, scale=1.0, window=8, out=out)
        assert torch.equal(out, torch.zeros_like(out))
